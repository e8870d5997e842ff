"""`gristmill new`: from a folder of text to a model in three commands, and what it refuses."""

from __future__ import annotations

import json
import random
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import DataError, UserError
from gristmill.cli.main import app
from gristmill.cli.new_data import find_data
from gristmill.cli.new_token_set import name_of
from gristmill.config.file_schema import run_file_schema
from gristmill.config.load import load_run
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig
from gristmill.plan.calibration import Calibration, write_calibration
from gristmill.text.tokenizers.vocabularies import has_gpt2

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in a folder of its own, on a CPU of known speed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("gristmill.plan.calibration.shutil.which", lambda name: None)
    monkeypatch.setattr("gristmill.plan.machine.time_imports", lambda: 2.0)
    write_calibration(Calibration("cpu", "mine", "2026-11-19T05:00:00", {"product_share": 0.1}))

    def call(*words: str) -> Any:
        result = CliRunner().invoke(app, list(words))
        if isinstance(result.exception, UserError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder, draw = tmp_path / "My stories", random.Random(0)
    folder.mkdir()
    words = ["".join(draw.choices("aeiorstlnm", k=draw.randint(2, 8))) for _ in range(900)]
    for number in range(12):
        story = " ".join(draw.choices(words, k=4000))
        (folder / f"{number}.txt").write_text(story)
    return folder


def new(run: Run, *words: str) -> dict[str, Any]:
    return dict(json.loads(run("new", *words, "--json").stdout))


def loaded(file: Path) -> RunConfig:
    return load_run(file)


def test_from_text_to_a_model_in_three_commands(run: Run, text: Path, tmp_path: Path) -> None:
    said = run("new", text.name).stdout
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  gristmill")]
    assert [command[1] for command in commands] == ["prepare", "train"]
    file = tmp_path / "My-stories.toml"
    assert f"Wrote {file.name}, with the preset modern-nano" in said
    content = file.read_text()
    assert all(" ".join(map(shlex.quote, command)) in content for command in commands)
    (_, *prepare), (_, *train) = commands
    run(*prepare, "--workers", "1")
    settings = ("train.until=2 steps", "validate.windows=2", "runtime.threads=1", "sample=unset")
    settings += ("runtime.device=cpu", "train.batch=2", "optim.momentum_warmup=0")
    assert "done at step 2" in run(*train, *settings).output
    assert (tmp_path / "runs" / "My-stories" / "checkpoints" / "step-00000002").is_dir()


def test_what_is_written_is_what_was_planned(run: Run, text: Path, tmp_path: Path) -> None:
    result = new(run, text.name, "train.seed=7", "name=second", "folder=here", "data.sequence=64")
    config = loaded(tmp_path / "second.toml")
    assert (config.name, config.folder, config.train.seed) == ("second", "here", 7)
    assert config.data.sequence == 64 and result["warnings"] == []
    assert result["tokens"] == pytest.approx(config.train.until.amount, rel=0.01)
    training = result["tokens"] / result["tokens_per_second"]
    assert training == pytest.approx(result["training_seconds"])
    validated = result["seconds"] - sum(result["overhead_seconds"].values())
    assert training * 1.01 < validated < training * 1.25  # validation takes some


def test_the_memory_is_that_of_the_process(run: Run, text: Path) -> None:
    """On a CPU Python and torch take most of it."""
    assert 400 * 2**20 < new(run, text.name)["memory_bytes"] < 800 * 2**20


def test_the_time_that_is_given_is_for_the_whole_command(
    run: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = new(run, text.name, "--hours", "1m")
    assert 0.8 * 60 < result["seconds"] <= 60
    overhead = result["overhead_seconds"]
    assert overhead["start"] > 2 and overhead["samples"] > 1 and overhead["saves"] > 0
    monkeypatch.setattr("gristmill.plan.machine.time_imports", lambda: 22.0)
    slower = new(run, text.name, "--hours", "1m", "--force")
    assert slower["tokens"] < 0.8 * result["tokens"] and slower["seconds"] <= 60


def test_the_estimate_is_near_to_what_prepare_counts(run: Run, text: Path) -> None:
    result = new(run, text.name)
    run(*shlex.split(result["commands"][0])[1:], "--workers", "1")
    counted = new(run, "tokens/My-stories", "-o", "again.toml")
    assert result["data"]["vocab"] == counted["data"]["vocab"]
    assert result["data"]["tokens"] == pytest.approx(counted["data"]["tokens"], rel=0.05)
    assert counted["commands"] == ["gristmill train again.toml"]


def test_tokens_that_are_there_are_not_prepared_again(run: Run, text: Path) -> None:
    run("prepare", text.name, "-o", "tokens/My-stories", "-t", "bytes", "--workers", "1")
    said = run("new", text.name).stdout
    assert "was already prepared" in said and "gristmill prepare" not in said
    with pytest.raises(UserError, match="already exists"):
        run("new", text.name, "-t", "gpt2", "--force")


def test_held_out_sets_become_the_validation_set(run: Run, text: Path, tmp_path: Path) -> None:
    words = ("-o", "tokens/x", "-t", "bytes", "--split", "9,3", "--workers", "1")
    run("prepare", text.name, *words)
    for number, name in enumerate(("tokens/x", "tokens/x_train")):
        new(run, name, "-o", f"{number}.toml")
        config = loaded(tmp_path / f"{number}.toml")
        assert (config.data.paths, config.data.validation) == ("tokens/x_train", "tokens/x_val")
        assert config.data.split is None


def test_nothing_is_replaced(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "My-stories.toml").write_text("mine")
    with pytest.raises(UserError, match="file already exists"):
        run("new", text.name)
    assert (tmp_path / "My-stories.toml").read_text() == "mine"
    run("new", text.name, "--force")
    assert loaded(tmp_path / "My-stories.toml").name == "My-stories"


def test_a_run_of_that_name_is_told_of(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "My-stories").mkdir(parents=True)
    assert "already holds a run" in run("new", text.name).stderr


def test_without_a_source_the_time_decides(run: Run, tmp_path: Path) -> None:
    result = new(run, "--hours", "10m", "--preset", "modern-nano")
    assert result["data"]["tokens"] is None and result["seconds"] < 610
    assert result["commands"][0].startswith("gristmill prepare TEXT… -o tokens/text -t bpe:4096")
    assert config_warnings_of(tmp_path / "first.toml") == []


def config_warnings_of(file: Path) -> list[str]:
    from gristmill.config.resolve import resolve

    config = loaded(file)
    return config_warnings(config, resolve(config, vocab=4096))


def test_another_machine(run: Run, text: Path) -> None:
    result = new(run, "--gpu", "h100-80gb", "--gpus", "8", "--hours", "24")
    assert result["machine"]["count"] == 8
    assert result["commands"][-1] == "gristmill train first.toml --processes 8"


def test_a_corpus_by_name(run: Run, tmp_path: Path) -> None:
    result = new(run, "openwebtext", "--gpu", "h200")
    config = loaded(tmp_path / "openwebtext.toml")
    assert config.data.validation == "tokens/openwebtext_val"
    assert result["commands"][0] == "gristmill prepare openwebtext -o tokens/openwebtext -t gpt2"
    assert result["data"]["tokens"] > 10**9


def test_the_schema_line_stands_where_an_editor_finds_the_schema(
    run: Run, text: Path, tmp_path: Path
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    run("new", text.name)
    file = tmp_path / "My-stories.toml"
    assert "#:schema" not in file.read_text()
    (tmp_path / "gristmill.schema.json").write_text(json.dumps(run_file_schema()))
    run("new", text.name, "--force")
    assert file.read_text().splitlines()[0] == "#:schema ./gristmill.schema.json"
    jsonschema.validate(tomllib.loads(file.read_text()), run_file_schema())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hours", "1", "--tokens", "1M"], "each decides the other"),
        (["--hours", "0"], "no time"),
        (["--hours", "soon"], "not a time"),
        (["--tokens", "many"], "not an amount"),
        (["--tokens", "0"], "no tokens"),
        (["--preset", "modern-tiny"], "there is no preset"),
        (["--preset", "gpt2-nano", "preset=gpt2-small"], "leave one of them out"),
        (["--gpus", "2"], "give --gpu"),
        (["--gpu", "h9000"], "no kind of device"),
        (["train.bacth=8"], "did you mean"),
        (["nowhere"], "no such file"),
        (["-"], "standard input"),
        (["-o", "cache"], "is a folder"),
        (["-o", "no/where.toml"], "there is no folder"),
        (["-t", "nonsense-9000"], "there is no such tokenizer|tokenizer"),
        (["-t", "characters"], "needs the text"),
        (["openwebtext", "nowhere"], "prepared separately"),
        (["nowhere", "openwebtext"], "prepared separately"),
        (["data.paths=tokens/x"], "the source decides it"),
        (["train.until=9 steps", "--hours", "1"], "decide it too"),
        (["name=a b"], "^name: "),
        (["train.micro_batch=3"], "^train.batch: .* is not a multiple"),
    ],
)
def test_mistakes(run: Run, words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run("new", *words)
    assert list(tmp_path.glob("*.toml")) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("books/", "books"),
        ("books/web.jsonl.gz", "web"),
        ("s3://bucket/crawl/", "crawl"),
        ("hf:org/name@main?split=train", "name"),
        ("logs/2024 & 25.txt", "2024-25"),
        ("/", "text"),
    ],
)
def test_names_of_sources(source: str, name: str) -> None:
    assert name_of(source) == name


def test_what_is_no_text_is_refused(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "body": "a text"}\n')
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "nano.bin").write_bytes(bytes(2000))
    (tmp_path / "a.toml").write_text('name = "a"')
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "run.toml").write_text('name = "old"')
    for source, message in (
        ("photo.jpg", "not UTF-8"),
        ("rows.jsonl", "under the key text; the first row has id, body"),
        ("short.txt", "short.txt: about 11 tokens are too few"),
        ("nano.bin", "tokens convert nano.bin --from flat --format flat -o tokens/nano"),
        ("a.toml", "this is a run file"),
        ("runs/old", "this is a run folder"),
    ):
        with pytest.raises(DataError, match=message):
            run("new", source)


def test_a_key_of_json_is_passed_on(run: Run, text: Path, tmp_path: Path) -> None:
    stories = [file.read_text() for file in sorted(text.iterdir())]
    rows = "".join(json.dumps({"body": story}) + "\n" for story in stories)
    (tmp_path / "rows.jsonl").write_text(rows)
    result = new(run, "rows.jsonl", "--json-key", "body")
    assert result["commands"][0].startswith("gristmill prepare rows.jsonl --json-key body -o ")
    run(*shlex.split(result["commands"][0])[1:], "--workers", "1")


def test_files_of_a_token_set_name_the_set(run: Run, text: Path, tmp_path: Path) -> None:
    run("prepare", text.name, "-o", "elsewhere/mine", "-t", "bytes", "--workers", "1")
    for number, ending in enumerate(("", ".bin", ".json", ".starts", ".ledger.json")):
        new(run, f"elsewhere/mine{ending}", "-o", f"{number}.toml")
        assert loaded(tmp_path / f"{number}.toml").data.paths == "elsewhere/mine"
    with pytest.raises(DataError, match=r"holds token sets\n.*elsewhere/mine"):
        run("new", "elsewhere")
    for words in ((text.name, "elsewhere/mine"), ("elsewhere/mine", text.name)):
        with pytest.raises(UserError, match="cannot be combined with other sources"):
            run("new", *words)


def test_tokens_of_another_text_are_not_taken_for_those_of_this(
    run: Run, text: Path, tmp_path: Path
) -> None:
    run("prepare", text.name, "-o", "tokens/My-stories", "-t", "bytes", "--workers", "1")
    other = tmp_path / "other" / text.name
    other.mkdir(parents=True)
    (other / "x.txt").write_text((text / "0.txt").read_text())
    result = new(run, f"other/{text.name}")
    assert result["file"] == "My-stories-2.toml" and len(result["commands"]) == 2
    assert "-o tokens/My-stories-2" in result["commands"][0]
    assert new(run, f"./{text.name}")["commands"] == ["gristmill train My-stories.toml"]


def test_a_name_with_a_dash_is_no_option(run: Run, text: Path, tmp_path: Path) -> None:
    text.rename(tmp_path / "-x")
    result = json.loads(run("new", "--json", "--", "-x").stdout)
    assert result["commands"][0].startswith("gristmill prepare ./-x -o tokens/x")
    run(*shlex.split(result["commands"][0])[1:], "--workers", "1")


def test_a_text_that_is_read_too_often_is_told_of(run: Run, text: Path) -> None:
    assert "learns little more from it" in run("new", text.name, "--tokens", "2B").stdout
    said = run("new", text.name, "--hours", "90", "--force").stdout
    assert "learns little more" not in said and "more text would use the rest" in said


def test_small_models_of_a_corpus_get_a_small_vocabulary(run: Run) -> None:
    result = new(run, "tinyshakespeare", "--preset", "modern-nano")
    assert result["commands"][0].endswith("-t bpe:2048") and result["data"]["vocab"] == 2048


def test_names_of_patterns(tmp_path: Path) -> None:
    assert name_of(str(tmp_path / "books" / "*.txt")) == "books"


def test_a_tokenizer_of_ones_own(run: Run, text: Path) -> None:
    for tokenizer, vocab in (("bytes", 257), ("bpe:700", 700)):
        result = new(run, text.name, "-t", tokenizer, "--force")
        assert result["data"]["vocab"] == vocab
        assert f"-t {tokenizer}" in result["commands"][0]
    characters = new(run, text.name, "-t", "characters", "--force")
    assert characters["data"]["vocab"] == len("aeiorstlnm ") + 2


def test_wide_models_take_gpt2s_vocabulary_where_it_is(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.config.load import load_text

    rest = 'name = "x"\ndata.paths = "x"\ntrain = { until = "1 step", batch = 8 }\n'
    wide = load_text(f'preset = "modern-mini"\n{rest}', place="x").model
    for here in (True, False):
        monkeypatch.setattr("gristmill.cli.new_text.has_gpt2", lambda here=here: here)
        if here and not has_gpt2():
            continue
        vocab = find_data([str(text)], None).facts(wide).vocab  # type: ignore[arg-type]
        assert (vocab == 50257) is here
