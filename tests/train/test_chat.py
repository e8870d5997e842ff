"""Fine-tuning on conversations: learns answers, resumes exactly, is the same on two ranks, and the
model answers in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import open_model, open_stored
from gristmill.cli import models as chat_cli
from gristmill.cli.main import app
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.export.folder import export
from gristmill.export.gguf import export_gguf
from gristmill.generate.sampling import Sampling
from gristmill.generate.text import ChatGenerator
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.chat.template import ChatTemplate, choose_template, find_template
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord, ValidationRecord
from gristmill.train.assemble import assemble, build_loader
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

Crowd = Callable[..., list[Any]]
MakeRun = Callable[..., RunConfig]
ANSWERS = {"red": "Rose", "blue": "Sea", "green": "Leaf", "white": "Flour", "black": "Coal"}
SMALL = ("model.width=32", "model.context=64")


@pytest.fixture(scope="session")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred conversations with one or two of five questions."""
    file, colours = tmp_path_factory.mktemp("chat") / "talks.jsonl", list(ANSWERS)
    lines = []
    for number in range(200):
        asked = [colours[number % 5], colours[number % 3]][: 1 + number % 2]
        messages = [
            {"role": role, "content": text}
            for colour in asked
            for role, text in (("user", f"{colour}?"), ("assistant", ANSWERS[colour]))
        ]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join([*lines, "{not json"]) + "\n")
    return file


@pytest.fixture
def make_chat(make_run: MakeRun, talks: Path, tmp_path: Path) -> MakeRun:
    """Settings of a run on conversations, from a tiny model that was trained on text."""
    base = make_run(*SMALL, 'train.until="2 steps"', folder="base")
    assert Run(base).train().exit is Exit.DONE

    def make(*settings: str, folder: str = "chat") -> RunConfig:
        text = f"""
            name = "chat"
            folder = "{tmp_path / folder}"
            model.start = "{tmp_path / "base"}"
            data = {{ kind = "chat", paths = "{talks}", split = "90,10" }}
            train = {{ until = "12 steps", batch = 4 }}
            optim = {{ lr = 1e-2, eps = 1e-4 }}
            validate = {{ every = "4 steps", windows = 8 }}
            checkpoint.every = "3 steps"
            runtime = {{ device = "cpu", threads = 1 }}
        """
        return load_text(text, settings, place="chat.toml")

    return make


def events(folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")
    return "\n".join(record.text for record in records if isinstance(record, EventRecord))


def generate(*words: object, input: str | None = None) -> str:
    result = CliRunner().invoke(app, ["generate", *(str(word) for word in words)], input=input)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_model_learns_to_answer(
    make_chat: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, talks: Path
) -> None:
    often = ('validate.every="100 steps"', 'checkpoint.every="100 steps"')
    run, settings = tmp_path / "chat", ('train.until="200 steps"', "train.batch=8", *often)
    assert Run(make_chat(*settings)).train().exit is Exit.DONE
    losses = [one.loss for one in read_metrics(run / "metrics.jsonl")
              if isinstance(one, ValidationRecord)]  # fmt: skip
    assert losses[0] > 3 and losses[-1] < 0.1
    told = events(run)
    assert f"{talks}: 1 of 201 lines are left out: 1 invalid JSON, at {talks}:201" in told
    assert "training: 180 conversations in " in told and "validation: 20 conversations" in told
    greedy = ("--temperature", 0)
    for colour, answer in ANSWERS.items():
        assert generate(run, f"{colour}?", "--chat", *greedy) == f"{answer}\n"
    assert generate(run, "-", "--chat", *greedy, input="red?\n") == "Rose\n"
    with pytest.raises(UserError, match="no message to answer"):
        generate(run, "-", "--chat", input="")
    once = generate(run, "red?", "--chat", "--json", "--samples", 2, *greedy)
    assert [json.loads(line) for line in once.splitlines()] == [
        {"prompt": "red?", "text": "Rose"}
    ] * 2  # fmt: skip
    # The conversation goes on until an empty line.
    lines = iter(["red?", "blue?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(chat_cli, "_is_terminal", lambda: True)
    assert generate(run, "--chat", "-n", 8, *greedy).splitlines()[1:] == ["Rose", "Sea"]
    # With room for a longer answer, it does not fit into the context, and that is said once.
    lines = iter(["red?", "blue?", "green?", ""])
    told = generate(run, "--chat", "-n", 16, *greedy).splitlines()
    assert [line for line in told[1:] if "note: " not in line] == ["Rose", "Sea", "Leaf"]
    assert sum("the oldest messages are forgotten" in line for line in told) == 1
    with pytest.raises(UserError, match="no chat template") as caught:
        generate(tmp_path / "base", "red?", "--chat")
    assert "--template plain|chatml|FILE" in str(caught.value)
    with pytest.raises(UserError, match="give --chat too"):
        generate(run, "red?", "--system", "x")


def test_a_long_conversation_forgets_its_oldest_turns(make_chat: MakeRun, tmp_path: Path) -> None:
    assert Run(make_chat('train.until="1 steps"')).train().exit is Exit.DONE
    loaded = open_model(str(tmp_path / "chat"), device=torch.device("cpu"))
    template = choose_template("plain", loaded.tokenizer, folders=(), where="--template")
    encoder = ChatEncoder(loaded.tokenizer, template, where="--template")
    chat = ChatGenerator(loaded.model, encoder, system="S")
    options: dict[str, Any] = {"tokens": 8, "sampling": Sampling(temperature=0.0)}
    for question in ("one?", "two?", "six?"):
        list(chat.ask(question, **options))
    assert chat.forgotten > 0
    assert [one.content for one in chat.messages if one.role != "assistant"] == ["S", "six?"]
    with pytest.raises(UserError, match="tokens long, and the model's context is 64"):
        list(chat.ask("x" * 80, **options))


class Parrot:
    """Streams the same text to whoever asks, in pieces."""

    def stream(self, prompt: list[int], **options: Any) -> Iterator[tuple[int, str]]:
        for piece in (" ", "<think></th", "ink>", "Yo", "!"):
            yield 0, piece


def test_an_answer_is_its_words(make_chat: MakeRun, tmp_path: Path) -> None:
    """What a template puts before them is written by the model, and not shown."""
    parts = assemble(make_chat(), RunFolder(tmp_path / "chat"))
    source = (
        "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}"
        "{{ ' <think></think>' }}{% endif %}{{ m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    template = ChatTemplate(source, "thinking", parts.tokenizer.named_tokens)
    encoder = ChatEncoder(parts.tokenizer, template, where="test")
    chat = ChatGenerator(parts.strategy.model, encoder)
    chat.generator = Parrot()  # type: ignore[assignment]
    pieces = [text for _, text in chat.ask("Hi", tokens=9, sampling=Sampling())]
    assert pieces == ["", "", "", "Yo", "!"]
    assert chat.messages[-1] == Message("assistant", "Yo!")


@pytest.mark.parametrize("settings", [(), ("train.accumulate=2", "model.dropout=0.1")])
def test_stopped_and_resumed_equals_uninterrupted(
    make_chat: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    runs: Runs,
    settings: tuple[str, ...],
) -> None:
    whole, parted = make_chat(*settings, folder="whole"), make_chat(*settings, folder="parted")
    assert Run(whole).train().exit is Exit.DONE
    stop_after(5)
    assert Run(parted).train().step == 5
    stop_after(1000)
    assert Run(parted).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "whole", tmp_path / "parted")


def train_here(config: RunConfig) -> int:
    return int(Run(config).train().exit)


@pytest.mark.slow
def test_two_processes_and_micro_batches_train_as_one(
    crowd: Crowd, make_chat: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    """Each has other numbers of answer tokens; every answer token still counts the same."""
    assert Run(make_chat(folder="one")).train().exit is Exit.DONE
    assert Run(make_chat("train.accumulate=4", folder="parts")).train().exit is Exit.DONE
    assert crowd(2, train_here, make_chat(folder="two")) == [0, 0]
    one, *others = (runs.history(tmp_path / name) for name in ("one", "parts", "two"))
    for other in others:
        assert [line["loss"] for line in other] == pytest.approx(
            [line["loss"] for line in one], rel=2e-4
        )


def test_a_step_in_which_nothing_counts_changes_no_number(
    make_chat: MakeRun, tmp_path: Path
) -> None:
    parts = assemble(make_chat(), RunFolder(tmp_path / "chat"))
    (batch,) = build_loader(parts).step_batches(0)
    assert batch.loss_weights_BT is not None
    nothing = replace(
        batch, loss_weights_BT=torch.zeros_like(batch.loss_weights_BT), loss_tokens=0.0
    )
    result = parts.strategy.accumulate([nothing], parts.state.progress)
    result = parts.strategy.update(result)
    assert (float(result.loss), float(result.grad_norm or 0.0)) == (0.0, 0.0)
    assert all(parameter.isfinite().all() for parameter in parts.strategy.model.parameters())


def test_samples_are_answers(make_chat: MakeRun, tmp_path: Path) -> None:
    sample = ('sample.every="2 steps"', 'sample.prompts=["red?"]', "sample.tokens=4")
    assert Run(make_chat('train.until="2 steps"', *sample)).train().exit is Exit.DONE
    page = (tmp_path / "chat" / "samples" / "step-00000002.txt").read_text()
    assert page.startswith("red?\n")


def test_other_data_or_another_template_is_refused(
    make_chat: MakeRun, tmp_path: Path, talks: Path
) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(talks.read_text())
    config = make_chat(f"data.paths={file}", 'train.until="2 steps"')
    assert Run(config).train().exit is Exit.DONE
    template = tmp_path / "chat" / "tokenizer" / "chat_template.jinja"
    other = tmp_path / "other.jinja"
    other.write_text(template.read_text().replace("User", "Human"))
    longer = ('train.until="4 steps"', f"data.paths={file}")
    with pytest.raises(UserError, match=r"data.template \(content\): was"):
        Run(make_chat(*longer, f"data.template={other}")).train()
    file.write_text(talks.read_text().replace("Rose", "Rust", 1))
    with pytest.raises(UserError, match=r"data.paths \(content\): was"):
        Run(make_chat(*longer)).train()
    # The same messages, written otherwise.
    again = (json.loads(line) for line in talks.read_text().splitlines()[:-1])
    file.write_text("".join(json.dumps(line["messages"], indent=None) + "\n" for line in again))
    assert Run(make_chat(*longer)).train().exit is Exit.DONE


def test_files_are_mixed_by_weight(make_chat: MakeRun, tmp_path: Path, talks: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in talks.read_text().splitlines()[:20]))
    config = make_chat(f'data.paths={{"{talks}"=3,"{few}"=1}}', "data.split=unset",
                       f"data.validation={few}")  # fmt: skip
    assert Run(config).train().exit is Exit.DONE
    parts = assemble(config, RunFolder(tmp_path / "chat"))
    choice = build_loader(parts).stream.blend
    assert choice is not None and len(parts.data.train.splits) == 2


def test_models_without_document_masks_get_one_conversation_a_sample(
    make_chat: MakeRun, tmp_path: Path, talks: Path
) -> None:
    pytest.importorskip("transformers")
    shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}
    words = [f"model.hf_config.{key}={json.dumps(value)}" for key, value in shape.items()]
    config = load_text(
        f"""
        name = "hf"
        folder = "{tmp_path / "hf"}"
        model.hf_config.vocab_size = 257
        data = {{ kind = "chat", paths = "{talks}", tokenizer = "bytes" }}
        train = {{ until = "3 steps", batch = 4 }}
        runtime = {{ device = "cpu", threads = 1 }}
        """,
        words,
        place="hf.toml",
    )
    assert Run(config).train().exit is Exit.DONE
    assert "each has a sample of its own" in events(tmp_path / "hf")
    assert "training: 198 conversations in 198 samples" in events(tmp_path / "hf")
    steps = [one for one in read_metrics(tmp_path / "hf" / "metrics.jsonl")
             if isinstance(one, StepRecord)]  # fmt: skip
    assert steps[-1].loss < steps[0].loss


def test_an_export_holds_the_template_and_a_run_starts_from_it(
    make_run: MakeRun, tmp_path: Path, talks: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    texts = iter(talks.read_text().splitlines())
    train_tokenizer(texts, vocab_size=280).save(tmp_path / "bpe")
    shape = "model = { layers = 1, heads = 2, width = 16, context = 64 }"
    text = f"""
        name = "chat"
        folder = "{tmp_path / "run"}"
        {shape}
        data = {{ kind = "chat", paths = "{talks}", tokenizer = "{tmp_path / "bpe"}" }}
        train = {{ until = "2 steps", batch = 4 }}
        runtime = {{ device = "cpu", threads = 1 }}
    """
    assert Run(load_text(text, place="chat.toml")).train().exit is Exit.DONE
    stored = open_stored(str(tmp_path / "run"))
    export(stored, tmp_path / "hf")
    template = find_template(tmp_path / "hf", stored.tokenizer)
    assert template is not None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [Message("user", "red <|endoftext|>?"), Message("assistant", "Rose")]
    encoder = ChatEncoder(stored.tokenizer, template, where="test")
    as_dicts = [{"role": one.role, "content": one.content} for one in messages]
    ids = theirs.apply_chat_template(as_dicts, return_dict=False)
    # The user's control token stays text here.
    assert ids.count(stored.tokenizer.end_of_text) == 2
    assert encoder.encode(messages).ids.tolist().count(stored.tokenizer.end_of_text) == 1
    as_dicts[0]["content"], messages[0] = "red?", Message("user", "red?")
    ids = theirs.apply_chat_template(as_dicts, return_dict=False)
    assert encoder.encode(messages).ids.tolist() == ids
    gguf = pytest.importorskip("gguf")
    export_gguf(stored, tmp_path / "chat.gguf")
    field = gguf.GGUFReader(tmp_path / "chat.gguf").get_field("tokenizer.chat_template")
    assert field is not None and field.contents() == template.source
    # A run that starts from the folder takes over tokenizer and template.
    again = text.replace(shape, f'model.start = "{tmp_path / "hf"}"').replace("/run", "/again")
    again = again.replace(f', tokenizer = "{tmp_path / "bpe"}"', "")
    assert Run(load_text(again, place="chat.toml")).train().exit is Exit.DONE
    kept = find_template(tmp_path / "again" / "tokenizer", stored.tokenizer)
    assert kept is not None and kept.source == template.source


@pytest.mark.slow
def test_adapters_learn_other_answers_and_the_merged_export_gives_them(
    make_chat: MakeRun, tmp_path: Path, talks: Path
) -> None:
    pytest.importorskip("transformers")
    often = ('validate.every="100 steps"', 'checkpoint.every="100 steps"', "train.batch=8")
    assert Run(make_chat('train.until="100 steps"', *often)).train().exit is Exit.DONE
    swapped = talks.read_text().replace("Rose", "Sea?").replace('Sea"', 'Rose"')
    (tmp_path / "swapped.jsonl").write_text(swapped.replace("Sea?", "Sea"))
    settings = (
        f'model.start="{tmp_path / "chat"}"',
        f'data.paths="{tmp_path / "swapped.jsonl"}"',
        "model.lora.rank=8",
        'train.until="120 steps"',
        *often,
    )
    run, exported = tmp_path / "other", tmp_path / "exported"
    assert Run(make_chat(*settings, folder="other")).train().exit is Exit.DONE
    losses = [one.loss for one in read_metrics(run / "metrics.jsonl")
              if isinstance(one, ValidationRecord)]  # fmt: skip
    assert losses[-1] < 0.3 * losses[0]
    result = CliRunner().invoke(app, ["export", str(run), str(exported)])
    assert result.exit_code == 0, result.output
    greedy = ("--chat", "--temperature", 0)
    for model in (run, exported):
        answers = [generate(model, f"{colour}?", *greedy).strip() for colour in ANSWERS]
        assert answers == ["Sea", "Rose", "Leaf", "Flour", "Coal"]


def test_conversations_mix_in_stages_and_validate_on_further_sets(
    make_chat: MakeRun, tmp_path: Path, talks: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(talks.read_text().splitlines(keepends=True)[:60]))
    settings = (
        f'data.paths=["{talks}", "{other}"]',
        f'data.stage=[{{to=0.5, weights={{"{talks.name}"=1}}}}, {{weights={{"other.jsonl"=1}}}}]',
        f'validate.set=[{{name="other", data="{other}", windows=4}}]',
    )
    assert Run(make_chat(*settings)).train().exit is Exit.DONE
    records = read_metrics(tmp_path / "chat" / "metrics.jsonl")
    steps = [one for one in records if isinstance(one, StepRecord)]
    for step in steps:
        assert step.sources is not None
        first, second = (step.sources[name]["loss"] for name in (talks.name, "other.jsonl"))
        assert [first is None, second is None] == [step.step > 6, step.step <= 6]
        assert (first or second) == pytest.approx(step.loss, rel=1e-5)
    for record in records:
        if isinstance(record, ValidationRecord):
            assert record.sets is not None and record.sets["other"]["windows"] == 4
