"""Tasks: LAMBADA, HellaSwag, files of questions, CORE, and lm-evaluation-harness on the same."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import LoadedModel
from gristmill.config.model import GPTConfig
from gristmill.evaluate import core
from gristmill.evaluate.results import EvaluationResult
from gristmill.evaluate.tasks import TaskOptions, open_tasks
from gristmill.models.build import build_model
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

WORDS = "the mill grinds corn and wheat into flour for bread while water turns a wheel".split()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = GPTConfig(layers=2, heads=2, width=16, context=256)
    model = build_model(config, vocab=257, device=torch.device("cpu"))
    model.initialise(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(3))
    return LoadedModel(model.eval(), ByteTokenizer(), Path("nowhere"))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def phrase(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def run(task: str | Path, loaded: LoadedModel, **options: int) -> EvaluationResult:
    (opened,) = open_tasks([str(task)], TaskOptions(**options))
    (result,) = opened.run(loaded, lambda name, done, total: None)
    return result


def log_prob(loaded: LoadedModel, before: str, after: str) -> tuple[float, bool]:
    """By the model's own logits, one text at a time."""
    ids = [*before.encode(), *after.encode()]
    start = len(before.encode())
    with torch.inference_mode():
        logs = loaded.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    places = range(start, len(ids))
    right = all(int(logs[i - 1].argmax()) == ids[i] for i in places)
    return sum(float(logs[i - 1, ids[i]]) for i in places), right


# ------------------------------------------------------------------ built in


def lambada_rows() -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [{"text": phrase(rng, rng.randint(3, 12))} for _ in range(12)]


def test_lambada_predicts_the_last_word(loaded: LoadedModel, tmp_path: Path) -> None:
    rows = lambada_rows()
    found = run(f"lambada={write(tmp_path / 'rows.jsonl', rows)}", loaded)
    pairs = [row["text"].rpartition(" ")[::2] for row in rows]
    logs = [log_prob(loaded, before, f" {word}") for before, word in pairs]
    mean = sum(log for log, _ in logs) / len(logs)
    assert found.measures["perplexity"].value == pytest.approx(
        torch.tensor(-mean).exp().item(), rel=1e-3
    )
    assert found.measures["acc"].value == sum(right for _, right in logs) / len(logs)
    assert found.count == 12 and len(found.facts["data_sha256"]) == 64


def hellaswag_rows() -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [
        {
            "activity_label": phrase(rng, 2),
            "ctx_a": f"{phrase(rng, 6)}. [header] {phrase(rng, 2)} [title]",
            "ctx_b": phrase(rng, 2),
            "endings": [f"{phrase(rng, rng.randint(2, 5))} [step] end" for _ in range(4)],
            "label": str(rng.randrange(4)),
        }
        for _ in range(10)
    ]


def test_hellaswag_chooses_an_ending(loaded: LoadedModel, tmp_path: Path) -> None:
    rows = hellaswag_rows()
    found = run(f"hellaswag={write(tmp_path / 'rows.jsonl', rows)}", loaded)
    right = right_by_length = 0
    for row in rows:
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        context = context.replace(" [title]", ". ").replace("[header]", "").replace("  ", " ")
        endings = [one.replace("[step]", "").replace("  ", " ") for one in row["endings"]]
        logs = [log_prob(loaded, context, f" {one}")[0] for one in endings]
        scaled = [log / len(one) for log, one in zip(logs, endings, strict=True)]
        right += logs.index(max(logs)) == int(row["label"])
        right_by_length += scaled.index(max(scaled)) == int(row["label"])
    assert found.measures["acc"].value == right / 10
    assert found.measures["acc_norm"].value == right_by_length / 10


def test_files_of_questions(loaded: LoadedModel, tmp_path: Path) -> None:
    choices = [{"query": "corn", "choices": ["is ground", "flies"], "gold": 0}]
    found = run(write(tmp_path / "choices.jsonl", choices), loaded)
    assert found.name == "choices" and found.measures["acc"].value in (0.0, 1.0)
    contexts = [{"context_options": ["the mill", "a fish"], "continuation": "turns", "gold": 1}]
    found = run(write(tmp_path / "contexts.jsonl", contexts), loaded)
    logs = [log_prob(loaded, one, " turns")[0] for one in ("the mill", "a fish")]
    assert found.measures["acc"].value == float(logs[1] > logs[0])
    texts = [{"context": "the mill", "continuation": "turns"}] * 3
    found = run(write(tmp_path / "texts.jsonl", texts), loaded, items=2)
    assert set(found.measures) == {"acc", "perplexity"} and found.count == 2


BAD_ROWS = {
    "not JSON": ("{", "line 1: not JSON"),
    "no object": ("[1]", "line 1: not a JSON object"),
    "unknown": ('{"question": "?"}', "rows with question are no questions"),
    "gold": ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "'gold' is no number from 0 to 1"),
    "one choice": ('{"query": "a", "choices": ["b"], "gold": 0}', "no list of two or more texts"),
    "no text": ('{"context": 1, "continuation": "b"}', "'context' holds no text"),
    "one word": ('{"text": "mill"}', "no word to predict"),
    "empty": ("", "no rows"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows(tmp_path: Path, kind: str) -> None:
    content, message = BAD_ROWS[kind]
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        open_tasks([str(tmp_path / "rows.jsonl")])
    assert message in str(caught.value) and "rows.jsonl" in str(caught.value)


def test_names_and_options_that_do_not_fit(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", lambada_rows())
    with pytest.raises(UserError, match="no task is named"):
        open_tasks([" , "])
    with pytest.raises(UserError, match="'arc_easy' takes no file: only lambada, hellaswag, core"):
        open_tasks([f"arc_easy={rows}"])
    with pytest.raises(UserError, match="without further examples") as caught:
        open_tasks([f"lambada={rows}"], TaskOptions(shots=3))
    assert "harness:NAME --shots 3" in str(caught.value)
    assert len(open_tasks([f"lambada={rows},{rows}", f"lambada={rows}"])) == 2


# ------------------------------------------------------------------ CORE


def make_bundle(folder: Path) -> Path:
    rng = random.Random(5)
    data = folder / "eval_data" / "some"
    data.mkdir(parents=True)
    choices = [
        {"query": phrase(rng, 4), "choices": [phrase(rng, 2) for _ in range(3)], "gold": i % 3}
        for i in range(8)
    ]
    schema = [
        {
            "context_options": [phrase(rng, 3), phrase(rng, 4)],
            "continuation": phrase(rng, 2),
            "gold": i % 2,
        }
        for i in range(9)
    ]
    texts = [{"context": f"{phrase(rng, 4)} ", "continuation": phrase(rng, 1)} for _ in range(8)]
    listed = []
    for name, kind, rows, shots in (
        ("chosen", "multiple_choice", choices, 2),
        ("schema", "schema", schema, 0),
        ("told", "language_modeling", texts, 1),
    ):
        write(data / f"{name}.jsonl", rows)
        listed.append(
            {
                "label": name,
                "dataset_uri": f"some/{name}.jsonl",
                "num_fewshot": [shots],
                "icl_task_type": kind,
                **({"continuation_delimiter": "\nAnswer: "} if name == "chosen" else {}),
            }
        )
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": listed}))
    (folder / "eval_meta_data.csv").write_text(
        "Eval Task,Random baseline\nchosen,33.3\nschema,50\ntold,0\n"
    )
    return folder


def expected_core(folder: Path, loaded: LoadedModel) -> dict[str, float]:
    """The accuracies, by the rules and one item at a time."""
    found = {}
    for task in yaml.safe_load((folder / "core.yaml").read_text())["icl_tasks"]:
        lines = (folder / "eval_data" / task["dataset_uri"]).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(rows)
        gap, right = task.get("continuation_delimiter", " "), 0
        for number, row in enumerate(rows):
            others = [i for i in range(len(rows)) if i != number]
            shots = random.Random(1234 + number).sample(others, task["num_fewshot"][0])
            if "choices" in row:
                solved = [
                    rows[i]["query"] + gap + rows[i]["choices"][rows[i]["gold"]] for i in shots
                ]
                asked = [row["query"] + gap + one for one in row["choices"]]
            elif "context_options" in row:
                solved, asked = (
                    [],
                    [f"{one} {row['continuation']}" for one in row["context_options"]],
                )
            else:
                solved = [rows[i]["context"].strip() + gap + rows[i]["continuation"] for i in shots]
                asked = [row["context"].strip() + gap + row["continuation"]]
            texts = ["\n\n".join([*solved, one]).encode() for one in asked]
            if "choices" in row or "context_options" in row:
                turn = -1 if "context_options" in row else 1
                marked = [one[::turn] for one in texts]
                same = next(i for i in range(999) if len({one[i : i + 1] for one in marked}) > 1)
                losses = []
                for one in texts:
                    start = len(one) - same if turn < 0 else same
                    total, _ = continued(loaded, one, start)
                    losses.append(-total / (len(one) - start))
                right += losses.index(min(losses)) == row["gold"]
            else:
                start = len(texts[0]) - len(row["continuation"].encode()) - len(gap)
                right += continued(loaded, texts[0], start)[1]
        found[task["label"]] = right / len(rows)
    return found


def continued(loaded: LoadedModel, text: bytes, start: int) -> tuple[float, bool]:
    ids = [256, *text]
    with torch.inference_mode():
        logs = loaded.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    places = range(start + 1, len(ids))
    right = all(int(logs[i - 1].argmax()) == ids[i] for i in places)
    return sum(float(logs[i - 1, ids[i]]) for i in places), right


def test_core(loaded: LoadedModel, tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "eval_bundle")
    found = run(f"core={folder}", loaded)
    expected = expected_core(folder, loaded)
    assert {name: one["acc"].value for name, one in found.parts.items()} == pytest.approx(expected)
    guessing = {"chosen": 0.333, "schema": 0.5, "told": 0.0}
    centered = [(value - guessing[name]) / (1 - guessing[name]) for name, value in expected.items()]
    assert found.measures["core"].value == pytest.approx(sum(centered) / 3)
    assert found.measures["core"].stderr is not None and found.count == 25
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as packed:
        for file in folder.rglob("*"):
            packed.write(file, Path("eval_bundle") / file.relative_to(folder))
    again = run(f"core={tmp_path / 'bundle.zip'}", loaded)
    assert again.measures == found.measures
    assert again.facts == found.facts
    assert run(f"core={folder}", loaded, items=4).count == 12


def test_a_bundle_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "LARGEST", 1000)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("core.yaml", " " * 1001)
    with pytest.raises(UserError, match=r"core\.yaml is larger than any"):
        open_tasks([f"core={tmp_path / 'bomb.zip'}"])


def test_core_without_its_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="CORE needs its bundle") as caught:
        open_tasks(["core"])
    assert "eval_bundle.zip" in str(caught.value)
    with pytest.raises(UserError, match="no folder and no zip file"):
        open_tasks([f"core={tmp_path / 'none'}"])
    folder = make_bundle(tmp_path / "eval_bundle")
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    with pytest.raises(UserError, match="not a bundle as nanochat has it"):
        open_tasks([f"core={folder}"])


# ------------------------------------------------------------------ lm-evaluation-harness


def harness_file(folder: Path, rows: Path, **settings: Any) -> Path:
    values = {
        "task": folder.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        **settings,
    }
    folder.mkdir()
    (folder / "task.yaml").write_text(yaml.safe_dump(values))
    return folder / "task.yaml"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("offline")
def test_the_harness_gives_the_same_numbers(
    loaded: LoadedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    rows = write(tmp_path / "texts.jsonl", lambada_rows())
    lambada = harness_file(
        tmp_path / "their_lambada",
        rows,
        output_type="loglikelihood",
        doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
        doc_to_target="{{' '+text.split(' ')[-1]}}",
        metric_list=[{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
    )
    plain = [
        {"query": row["ctx_a"], "endings": row["endings"], "label": int(row["label"])}
        for row in hellaswag_rows()
    ]
    questions = write(tmp_path / "questions.jsonl", plain)
    hellaswag = harness_file(
        tmp_path / "their_hellaswag",
        questions,
        output_type="multiple_choice",
        doc_to_text="{{query}}",
        doc_to_target="{{label}}",
        doc_to_choice="endings",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    before = torch.get_rng_state(), random.getstate()
    for ours, theirs in ((f"lambada={rows}", lambada), (f"hellaswag={questions}", hellaswag)):
        a, b = run(ours, loaded), run(theirs, loaded)
        assert {k: v.value for k, v in a.measures.items()} == pytest.approx(
            {k: v.value for k, v in b.measures.items()}
        )
        assert a.measures["acc"].stderr == pytest.approx(b.measures["acc"].stderr)
        assert a.measures["acc"].items == b.measures["acc"].items
        assert a.count == b.count and b.facts["lm_eval"]
    assert capfd.readouterr().out == ""
    # The harness seeds all generators, which a run that trains must not notice.
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_the_harness_generates_and_measures_texts(loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    texts = write(tmp_path / "texts.jsonl", [{"text": "corn " * 120}, {"text": "the mill"}])
    generated = harness_file(
        tmp_path / "generated",
        texts,
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="x",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 5},
        metric_list=[{"metric": "exact_match"}],
    )
    assert run(generated, loaded).measures["exact_match"].value == 0.0
    rolling = harness_file(
        tmp_path / "rolling",
        texts,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte", "aggregation": "bits_per_byte"}],
    )
    found = run(rolling, loaded).measures["bits_per_byte"].value
    # 600 bytes of the first text in windows of 256, each predicted once.
    assert 5 < found < 12


@pytest.mark.slow
def test_a_task_that_does_not_exist() -> None:
    """The harness reads the files of all its tasks to know their names."""
    pytest.importorskip("lm_eval")
    with pytest.raises(UserError, match="there is no task 'hellaswagg'") as caught:
        open_tasks(["hellaswagg"])
    assert "similar names: hellaswag" in str(caught.value)


def test_a_file_that_names_no_task(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "empty.yaml").write_text("dataset_path: json\n")
    with pytest.raises(UserError, match="names no task"):
        open_tasks([str(tmp_path / "empty.yaml")])


@pytest.mark.usefixtures("offline")
def test_data_that_cannot_be_reached(loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    task = harness_file(
        tmp_path / "lost", tmp_path / "nowhere.jsonl", output_type="loglikelihood",
        doc_to_text="{{text}}", doc_to_target="x", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    with pytest.raises(UserError, match="lm-evaluation-harness cannot run 'lost'"):
        run(task, loaded)


_CODE = {
    "function": {"doc_to_text": "!function code.render"},
    "class": {"class": "!function code.Task"},
    "metric": {"metric_list": [{"metric": "./metric.py"}]},
    "fetched metric": {"metric_list": [{"metric": "acc", "hf_evaluate": True}]},
    "pickles": {"dataset_path": "pandas"},
    "script": {"dataset_path": "./loader.py"},
    "reader options": {"dataset_kwargs": {"data_files": "x", "trust_remote_code": True}},
    "unsafe": {"unsafe_code": True},
}


@pytest.mark.parametrize("settings", _CODE.values(), ids=_CODE)
@pytest.mark.parametrize("included", [False, True])
def test_a_task_file_that_may_run_code_is_refused(
    tmp_path: Path, settings: dict[str, Any], included: bool
) -> None:
    pytest.importorskip("lm_eval")
    values = {"task": "hostile", "dataset_path": "json", **settings}
    # safe_dump would quote the tag.
    content = yaml.safe_dump(values).replace("'!function code.render'", "!function code.render")
    content = content.replace("'!function code.Task'", "!function code.Task")
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "task.yaml").write_text(content)
    if included:
        (tmp_path / "outer.yaml").write_text("include: task.yaml\ntask: outer\n")
    file = tmp_path / ("outer.yaml" if included else "task.yaml")
    with pytest.raises(UserError, match="may run Python code") as caught:
        open_tasks([str(file)], where="evaluate.tasks")
    assert caught.value.exit == 77 and "--trust-task-code" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_aliases_of_a_task_file_are_followed_to_an_end(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    lines = ["metadata:", "  a0: &a0 [x, x]"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    (tmp_path / "bomb.yaml").write_text("task: bomb\n" + "\n".join(lines))
    (tmp_path / "deep.yaml").write_text("task: deep\nmetadata: " + "[" * 100_000)
    for name in ("bomb", "deep"):
        with pytest.raises(UserError, match="not a task file"):
            open_tasks([str(tmp_path / f"{name}.yaml")])


@pytest.mark.usefixtures("offline")
def test_templates_of_task_files_stay_in_a_sandbox(loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    ran = tmp_path / "ran"
    task = harness_file(
        tmp_path / "escaping",
        write(tmp_path / "texts.jsonl", [{"text": "a b"}] * 2),
        output_type="loglikelihood",
        doc_to_text=f"{{{{ cycler.__init__.__globals__.os.mkdir({str(ran)!r}) }}}}",
        doc_to_target="x",
        metric_list=[{"metric": "acc"}],
    )
    with pytest.raises(UserError, match="SecurityError"):
        run(task, loaded)
    assert not ran.exists()


@pytest.mark.usefixtures("offline")
def test_code_of_a_task_file_runs_where_the_command_line_says_so(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    rows = write(tmp_path / "texts.jsonl", [{"text": "a b"}] * 2)
    task = harness_file(
        tmp_path / "coded", rows, output_type="loglikelihood", doc_to_text="CODE",
        doc_to_target="x", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    task.write_text(task.read_text().replace("CODE", "!function code.render"))
    (task.parent / "code.py").write_text("def render(doc):\n    return doc['text']\n")
    with pytest.raises(UserError, match="it has the tag '!function'"):
        open_tasks([str(task)])
    (opened,) = open_tasks([str(task)], TaskOptions(trust_code=True))
    (found,) = opened.run(loaded, lambda name, done, total: None)
    assert found.count == 2
