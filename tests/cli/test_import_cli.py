"""`import`, and what the rest of the program does with its folder; lines of other programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app

RUN = """
name = "corn"
folder = "{folder}/run"
[model]
start = "{folder}/model"
[data]
paths = "{tokens}"
split = "9,1"
[train]
until = "3 steps"
batch = 6
[checkpoint]
every = "1 steps"
[validate]
every = "3 steps"
[runtime]
device = "cpu"
threads = 1
"""
LINE = re.compile(
    r"^ iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \|.* global batch size: +6 \| lm "
    r"loss: (\S+) \| loss scale: 1\.0 \| grad norm: \S+ \| number of skipped iterations:   0 \| "
    r"number of nan iterations:   0 \|$",
    re.MULTILINE,
)


def run(*words: object) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def save_nanogpt(path: Path) -> None:
    width, generator = 16, torch.Generator().manual_seed(0)
    state = {"transformer.wte.weight": torch.randn(260, width, generator=generator) * 0.1}
    state["transformer.wpe.weight"] = torch.randn(16, width, generator=generator) * 0.1
    state["transformer.h.0.ln_1.weight"] = state["transformer.h.0.ln_2.weight"] = torch.ones(width)
    for name, shape in (
        ("attn.c_attn", (48, 16)),
        ("attn.c_proj", (16, 16)),
        ("mlp.c_fc", (64, 16)),
        ("mlp.c_proj", (16, 64)),
    ):
        state[f"transformer.h.0.{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
    state["transformer.ln_f.weight"] = torch.ones(width)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    arguments = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 260}
    arguments |= {"bias": False, "dropout": 0.0}
    torch.save({"model": state, "model_args": arguments, "iter_num": 5}, path)


def test_a_run_starts_from_an_import_and_prints_lines_of_megatron(
    tokens: Path, tmp_path: Path
) -> None:
    save_nanogpt(tmp_path / "ckpt.pt")
    output = run("import", tmp_path / "ckpt.pt", "-o", tmp_path / "model", "--tokenizer", "bytes")
    assert "of nanoGPT, 7.54k parameters, 29.4 KiB in 1 file" in output
    assert f'model.start="{tmp_path / "model"}"' in output
    with pytest.raises(UserError) as caught:
        run("import", tmp_path / "ckpt.pt", "-o", tmp_path / "model")
    assert caught.value.exit is Exit.REFUSED
    run("import", tmp_path / "ckpt.pt", "-o", tmp_path / "model", "--tokenizer", "bytes",
        "--overwrite")  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(folder=tmp_path, tokens=tokens))
    output = run("train", file, "--log-format", "megatron")
    assert [found[:3] for found in LINE.findall(output)] == [
        ("1", "3", "6"), ("2", "3", "12"), ("3", "3", "18"),
    ]  # fmt: skip
    assert re.search(r"^ validation loss at iteration 3 \| lm loss value: \S+ \|", output, re.M)
    # The run keeps the format, and its files are as ever.
    assert 'log_format = "megatron"' in (tmp_path / "run" / "run.toml").read_text()
    assert "iteration" not in (tmp_path / "run" / "train.log").read_text()
    output = run("train", tmp_path / "run", "train.until=4 steps")
    assert [found[:3] for found in LINE.findall(output)] == [("4", "4", "24")]
    output = run("train", tmp_path / "run", "train.until=6 steps", "--log-format", "decentralized")
    assert re.search(
        r"^\[\d\d:\d\d:\d\d  INFO\] Step      6, Val loss: \d\.\d{6}, Train loss: \d\.\d{6}, Train "
        r"time: \d+\.\d{3} s \(\d+\.\d{3} ms/step\), Total train time: \d+\.\d{3} s$",
        output,
        re.MULTILINE,
    )


def test_an_imported_model_generates_and_is_exported(tmp_path: Path) -> None:
    save_nanogpt(tmp_path / "ckpt.pt")
    run("import", tmp_path / "ckpt.pt", "-o", tmp_path / "model", "--tokenizer", "bytes")
    assert run("generate", tmp_path / "model", "Corn", "-n", 4, "--device", "cpu").startswith(
        "Corn"
    )
    output = run("export", tmp_path / "model", tmp_path / "exported", "--check", "files")
    assert "GPT2LMHeadModel" in output and (tmp_path / "exported" / "config.json").is_file()


def test_megatron_says_its_own_activation(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(UserError, match="--activation"):
        run("import", tmp_path, "-o", tmp_path / "model", "--activation", "gelu")
