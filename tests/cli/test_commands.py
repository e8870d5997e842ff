"""The command line as a person uses it: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import UserError
from gristmill.cli.main import app

runner = CliRunner()


def run(*words: object, input: str | None = None, code: int = 0) -> str:
    result = runner.invoke(app, [str(word) for word in words], input=input)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, tokenizer, token files and a trained run."""
    folder = tmp_path_factory.mktemp("cli")
    text = "The mill turns, the corn is ground, the flour is white. " * 40
    (folder / "text.txt").write_text(text)
    run("tokenizer", "train", folder / "text.txt", "-o", folder / "bpe", "-n", 270)
    run("prepare", folder / "text.txt", "-o", folder / "corn", "-t", folder / "bpe")
    (folder / "run.toml").write_text(
        f"""
name = "corn"
folder = "{folder / "run"}"
[model]
layers = 1
heads = 2
width = 16
context = 16
[data]
paths = "{folder / "corn"}"
split = "8,2"
[train]
until = "6 steps"
batch = 2
[runtime]
device = "cpu"
threads = 1
"""
    )
    run("train", folder / "run.toml", "optim.lr=1e-2")
    return folder


def test_train_prints_what_happens(trained: Path) -> None:
    output = run("train", trained / "run.toml", "optim.lr=1e-2", f"folder={trained / 'other'}")
    assert "corn: 9.71k parameters" in output
    assert "step 6/6 | loss" in output
    assert "validation at step 6" in output
    assert "done at step 6" in output


def test_a_run_folder_goes_on(trained: Path) -> None:
    run("train", trained / "run.toml", f"folder={trained / 'on'}", "train.until=2 steps")
    assert "done at step 4" in run("train", trained / "on", "train.until=4 steps")


def test_prepare_and_tokens(trained: Path) -> None:
    lines = [json.dumps({"text": "white flour"}), "{broken", json.dumps({"body": "x"}), ""]
    (trained / "more.jsonl").write_text("\n".join(lines))
    output = run("prepare", trained / "more.jsonl", "-o", trained / "more", "-t", "bytes")
    assert "12 tokens in 1 documents" in output
    assert "3 read = 1 kept + 2 dropped" in output
    assert f"{trained / 'more.jsonl'}:2: invalid json" in output
    assert "ids         32 to 256" in run("tokens", "inspect", trained / "more")
    assert "intact" in run("tokens", "verify", trained / "more")
    with pytest.raises(UserError, match=r"more\.jsonl:2"):
        run("prepare", trained / "more.jsonl", "-o", trained / "m2", "-t", "bytes", "--strict")
    with pytest.raises(UserError, match="there is already a token set"):
        run("prepare", trained / "more.jsonl", "-o", trained / "more", "-t", "bytes")


def test_tokenizer_show(trained: Path) -> None:
    output = run("tokenizer", "show", trained / "bpe", "the mill")
    assert "ids          270" in output
    assert "end of text  269" in output
    assert "     256  b'he'" in output


def test_evaluate(trained: Path) -> None:
    output = run("evaluate", trained / "run")
    assert [line.split()[-5:-3] for line in output.splitlines() if "tokens in" in line]
    file = trained / "run" / "evals" / "step-00000006-corn-held-out.json"
    kept = json.loads(file.read_text())
    assert kept["unit"] == "tokens" and kept["count"] > 0
    assert list(kept["measures"]) == ["bits_per_byte", "loss", "perplexity"]
    assert kept["made_by"]["checkpoint_sha256"] and kept["facts"]["ids_sha256"]
    by_text = run("evaluate", trained / "run", "--text", trained / "text.txt", "--limit", 50)
    assert " 50 tokens in " in by_text


def test_evaluate_makes_a_table_of_models_and_precisions(trained: Path) -> None:
    words = ("--text", trained / "text.txt", "--precision", "fp32", "--precision", "bf16")
    checkpoint = trained / "run" / "checkpoints" / "step-00000006"
    lines = run("evaluate", trained / "run", checkpoint, *words, "--limit", 400).splitlines()
    assert lines[0].split()[:4] == ["on", "measure", "model", "precision"]
    begin = next(number for number, line in enumerate(lines) if " loss " in line)
    rows = [line.split() for line in lines[begin : begin + 4]]
    assert [row[1 if number else 2] for number, row in enumerate(rows)] == ["fp32", "bf16"] * 2
    values = [float(row[2 if number else 3]) for number, row in enumerate(rows)]
    assert values[0] == pytest.approx(values[1], rel=1e-2)
    assert values[:2] == values[2:]
    assert "0.0000 ± 0.0000, p = 1.000: may be chance" in lines[begin + 2]
    names = {file.name for file in (trained / "run" / "evals").iterdir()}
    assert {"step-00000006-text.txt.json", "step-00000006-text.txt-bf16.json"} < names


def test_generate(trained: Path) -> None:
    once = run("generate", trained / "run", "The mill", "-n", 12, "--temperature", 0)
    assert once.startswith("The mill")
    plain = run("generate", trained / "run", "The mill", "-n", 12, "--temperature", 0, "--no-cache")
    assert once == plain
    by_stdin = run("generate", trained / "run", "-", "-n", 12, "--temperature", 0, input="The mill")
    assert by_stdin == once
    many = run("generate", trained / "run", "The", "--samples", 2, "--json", "-n", 5)
    assert [json.loads(line)["prompt"] for line in many.splitlines()] == ["The", "The"]
    step = run("generate", trained / "run", "The", "--checkpoint", "6", "-n", 1)
    assert step.startswith("The")
    with pytest.raises(UserError, match="there are: "):
        run("generate", trained / "run", "The", "--checkpoint", "99")


def test_export_and_use(trained: Path) -> None:
    pytest.importorskip("transformers")
    output = run("export", trained / "run", trained / "hf")
    assert "step-00000006 as GPT2LMHeadModel, " in output and " KiB in 1 file\n" in output
    assert "checked: all weights read back as they are in the source; transformers'" in output
    assert "greedy tokens are the same" in output
    theirs = run("generate", trained / "hf", "The mill", "-n", 12, "--temperature", 0)
    assert theirs == run("generate", trained / "run", "The mill", "-n", 12, "--temperature", 0)


def test_export_without_transformers(trained: Path) -> None:
    output = run("export", trained / "run", trained / "plain", "--check", "files")
    assert "as they are in the source; not compared with transformers\n" in output
    # And once more, from what was written.
    run("export", trained / "plain", trained / "again", "--check", "files")
    contents = {(trained / name / "model.safetensors").read_bytes() for name in ("plain", "again")}
    assert len(contents) == 1


def test_export_with_its_own_code(trained: Path) -> None:
    output = run("export", trained / "run", trained / "code", "--code", "--check", "files")
    assert "as GristmillForCausalLM, " in output
    assert f"{trained / 'code/modeling_gristmill.py'}: load it with trust_remote_code" in output
    theirs = run("generate", trained / "code", "The mill", "-n", 12, "--temperature", 0)
    assert theirs == run("generate", trained / "run", "The mill", "-n", 12, "--temperature", 0)


def test_export_to_a_gguf_file(trained: Path) -> None:
    pytest.importorskip("gguf")
    output = run("export", trained / "run", trained / "corn.gguf")
    assert re.search(r"step-00000006 as gpt2, \S+ KiB\nchecked: all weights read back", output)
    assert (trained / "corn.gguf").read_bytes()[:4] == b"GGUF"
    for words, message in {
        ("--code",): "a GGUF file holds no code",
        ("--check", "transformers"): "a GGUF file is not compared with transformers",
    }.items():
        with pytest.raises(UserError, match=message):
            run("export", trained / "run", trained / "other.gguf", *words)
    assert not (trained / "other.gguf").exists()


def test_report(trained: Path) -> None:
    run("report", trained / "run")
    assert "corn" in (trained / "run" / "report.html").read_text()
    page = trained / "both.html"
    run("report", trained / "run", trained / "run", "-o", page)
    assert "http://" not in page.read_text().replace("http://www.w3.org", "")


def test_config(trained: Path) -> None:
    output = run("config", trained / "run.toml", "optim.lr=0.5")
    assert "lr = 0.5" in output
    assert "# run         6 steps, 192 tokens" in output
    ramp = ("train.batch=4", "train.ramp={start=2, by=1, over='3 steps'}")
    growing = run("config", trained / "run.toml", *ramp)
    assert "2 stages before the full batch, which begins after 3 steps" in growing
    assert "# run         6 steps, 304 tokens" in growing
    assert re.search(r"# checkpoint  every 15m, \S+ [KM]iB each\n", output)
    assert "# warning" not in output
    muon = run("config", trained / "run.toml", "optim.type=muon")
    assert "# warning     optim.momentum_warmup, 300 steps, is longer than the run" in muon
    presets = run("config", "--presets")
    assert "gpt2-small" in presets and "124M" in presets and "gpt3-310b" in presets
    assert json.loads(run("config", "--schema"))["properties"]["optim"]


def test_doctor() -> None:
    output = run("doctor")
    assert "torch" in output and "file system" in output and "PROBLEM" not in output


IN_A_FRESH_PROCESS = """
import sys
from gristmill.cli.main import app

def run(*words, without):
    sys.argv = ["gristmill", *words]
    try:
        app()
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    assert without not in sys.modules, f"{words[0]} loads {without}"

folder = sys.argv[1]
run("config", f"{folder}/run.toml", without="torch")
run("generate", f"{folder}/run", "x", without="torch._dynamo")
run("train", f"{folder}/run.toml", f"folder={folder}/plain", without="torch._dynamo")
"""


def test_commands_load_only_what_they_need(trained: Path) -> None:
    """Light ones no torch, and no command the compiler, which takes two seconds, where nothing is
    compiled."""
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(trained)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def shell(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_a_mistake_prints_one_clear_message_and_no_traceback(trained: Path) -> None:
    done = shell("train", trained / "run.toml", "optim.rl=3", "train.until=5", cwd=trained)
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: command line 'train.until=5': train.until: needs a unit: write \"500 steps\", "
        '"1M samples" or "20B tokens" (it is 5)',
        '    Training length: "10k steps", "1M samples" or "20B tokens".',
        "error: command line 'optim.rl=3': optim.rl: there is no such setting",
        "    did you mean lr?",
    ]


def test_a_signal_saves_and_the_same_command_goes_on(
    trained: Path, begin_gristmill: Callable[..., Any]
) -> None:
    words = ("train", trained / "run.toml", f"folder={trained / 'signal'}")
    first = begin_gristmill(*words, "train.until=100k steps")
    metrics = trained / "signal" / "metrics.jsonl"
    while not (metrics.is_file() and '"step":3' in metrics.read_text().replace(" ", "")):
        time.sleep(0.05)
        assert first.process.is_alive()
    second = begin_gristmill(*words, "train.until=100k steps").end()
    assert second.returncode == 77
    assert f"in use by process {first.pid} on " in second.stderr
    os.kill(first.pid, signal.SIGUSR1)
    ended = first.end()
    assert ended.returncode == 75
    assert "stopping after signal SIGUSR1" in ended.stdout
    assert "stopped and saved at step" in ended.stdout
    assert "; run the same command again to resume" in ended.stdout
    assert json.loads((trained / "signal" / "status.json").read_text())["state"] == "stopped"


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "no run file": (["train", "missing.toml"], "cannot read the run file: No such file"),
    "no token files": (["train", "run.toml", "data.paths=nowhere"], "nowhere"),
    "no tokenizer": (["train", "run.toml", "data.tokenizer=./gone"], "no such tokenizer"),
    "other tokenizer": (["train", "run.toml", "data.tokenizer=bytes"], "made with tokenizer"),
    "vocabulary too small": (["train", "run.toml", "model.vocab=100"], "but the model has 100"),
    "text too short": (["train", "run.toml", "model.context=5000"], "too few for one window"),
    "validation too short": (
        ["train", "run.toml", "data.split=\"9999,1\""],
        "the validation text has",
    ),
    "nothing to validate": (["config", "run.toml", 'data.split="9999:1"'], "validation text has"),
    "nothing to train on": (["config", "run.toml", 'data.split="1:9999"'], "training text has"),
    "no such device": (["train", "run.toml", "runtime.device=\"mps\""], "no mps device"),
    "not a model": (["generate", "bpe", "x"], "neither a run folder"),
    "unknown device": (["generate", "run", "x", "--device", "tpu"], "is not auto, cpu"),
    "wrong checkpoint": (["generate", "run", "x", "--checkpoint", "newest"], "best or a step"),
    "not a run": (["report", "bpe"], "bpe"),
    "empty text": (["prepare", "empty.txt", "-o", "e", "-t", "bytes"], "empty"),
    "no text": (["prepare", "none.txt", "-o", "e", "-t", "bytes"], "none.txt"),
    "tokenizer too large": (
        ["tokenizer", "train", "text.txt", "-o", "big", "-n", "60000"],
        "too short for 60000 tokens",
    ),
    "evaluate on other tokens": (["evaluate", "run", "--data", "bytes"], "made with tokenizer"),
    "config without file": (["config"], "give a run file"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(
    trained: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(trained)
    (trained / "empty.txt").touch()
    if not (trained / "bytes.json").exists():
        run("prepare", "text.txt", "-o", "bytes", "-t", "bytes")
    if words[0] == "train":
        words = [*words, "folder=bad-run"]
    with pytest.raises(UserError) as error:
        run(*words)
    assert message in str(error.value)
    assert not (trained / "e.json").exists()


def test_wrong_command_lines_end_with_2() -> None:
    assert "No such command" in run("grind", code=2)
    assert "Missing argument" in run("train", code=2)


def test_demo_from_text_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("demo", "--steps", 2)
    for words in ("documents", "tokens in", "step 2/2", "guessing by frequency", "What to do next"):
        assert words in output
    assert (tmp_path / "runs/demo/report.html").is_file()
    assert output.count("A sample ") == 2
