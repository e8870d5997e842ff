"""The commands that `starts.py` times: ours, and the training scripts of nanoGPT and nanochat on
the same text.

Their files are used as they are, in a copy. nanoGPT reads token files as ours do. nanochat makes
its own tokens from text while it trains: the text is decoded from the token files, and its
tokenizer has GPT-2's vocabulary. Packages that its script imports and does not use here are empty
modules if they are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import tomli_w
import torch
from nanochat_peer import HEAD_WIDTH, RATES

from gristmill.config.load import load_text
from gristmill.config.resolve import Resolved, resolve
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.tokens.store import open_tokens

GPT2_SIZE = 50257
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
MODES = {"auto": "", "true": ", the whole model compiled", "blocks": ", blocks compiled"}
UNUSED = ("wandb", "rustbpe", "requests")
"""Packages that nanochat's script imports."""
SPECIAL = (
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
"""Tokens that nanochat knows by name."""
PYTHONPATH = os.environ.get("PYTHONPATH")
BATCH = 2**19
"""nanochat's script multiplies its rates by the root of the batch relative to this one."""
BEST, DECAY = 1.6, 0.1
"""The factor of its rates and the decay that were best in `time_to_loss.py`."""
LEARNING_RATE = 1e-3
"""nanoGPT's, which was the best one there."""


@dataclass(frozen=True)
class Command:
    """What is started."""

    name: str
    words: list[str]
    folder: Path
    first_step: re.Pattern[str]
    compiled: re.Pattern[str] | None = None
    """The line that says for how many seconds it compiled."""
    validation: re.Pattern[str] | None = None
    """The line of a validation, with its result."""
    environment: Mapping[str, str] = field(default_factory=dict)


def ours(options: argparse.Namespace, scratch: Path, mode: str) -> Command:
    """`gristmill train` with a run file."""
    tables = {
        "name": "start",
        "preset": options.preset,
        "folder": str(scratch / "run"),
        "data": {"paths": str(options.data), "validation": str(options.validation)},
        "train": {"until": options.until, "batch": options.batch},
        # All of the text, as nanochat does, at the start and at the end.
        "validate": {"every": options.until, "windows": len(open_tokens(options.validation))},
        "precision": {"compute": options.compute},
        "runtime": {"device": options.device},
    }
    if mode != "auto":
        tables["runtime"]["compile"] = {"true": True}.get(mode, mode)
    file = scratch / f"{mode}.toml"
    file.write_text(tomli_w.dumps(tables))
    return Command(
        name="gristmill" + MODES[mode],
        words=[sys.executable, "-m", "gristmill", "train", str(file), *options.set],
        folder=scratch,
        first_step=re.compile(r"^step 1/"),
        compiled=re.compile(r"compiled in ([\d.]+)s"),
        validation=re.compile(r"^validation .* (loss [\d.]+)"),
    )


def nanogpt(options: argparse.Namespace, scratch: Path) -> Command:
    """nanoGPT's own script on the same token files, with as many steps and the same shape."""
    script = options.nanogpt / "train.py"
    if not script.is_file():
        raise SystemExit(f"{script} does not exist: give --nanogpt a checkout of nanoGPT")
    shape, numbers = shape_of(options)
    checkout = scratch / "nanogpt"
    shutil.copytree(options.nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
    data = checkout / "data/start"
    data.mkdir(parents=True)
    for name, prefix in (("train", options.data), ("val", options.validation)):
        (data / f"{name}.bin").symlink_to(Path(f"{prefix}.bin").resolve())
    settings = {
        "dataset": "start",
        "device": options.device,
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[options.compute],
        "compile": options.device == "cuda",
        "n_layer": shape["layers"],
        "n_head": shape["heads"],
        "n_embd": shape["width"],
        "block_size": numbers.sequence,
        "batch_size": numbers.batch,
        "gradient_accumulation_steps": 1,
        "max_iters": numbers.steps,
        "lr_decay_iters": numbers.steps,
        "eval_interval": numbers.steps,
        # As many windows as all of the text has, which it draws at random; the same of training.
        "eval_iters": max(1, len(open_tokens(options.validation)) // numbers.tokens_per_step),
        "log_interval": 10,
        # The recipe that was best in `time_to_loss.py`.
        "learning_rate": LEARNING_RATE,
        "min_lr": LEARNING_RATE / 10,
        "warmup_iters": max(1, numbers.steps // 20),
        "out_dir": str(scratch / "run"),
    }
    return Command(
        name="nanoGPT",
        words=[
            sys.executable,
            "train.py",
            *(f"--{key}={value}" for key, value in settings.items()),
        ],
        folder=checkout,
        first_step=re.compile(r"^iter 0:"),
        validation=re.compile(r"^step \d+: .*val (loss [\d.]+)"),
    )


def nanochat(options: argparse.Namespace, scratch: Path) -> Command:
    """nanochat's own script, with as many steps and the same layers, at its best rates."""
    if not (options.nanochat / "scripts/base_train.py").is_file():
        raise SystemExit(f"{options.nanochat} has no scripts/base_train.py: give a checkout of it")
    shape, numbers = shape_of(options)
    checkout, base = scratch / "nanochat", scratch / "nanochat-base"
    shutil.copytree(options.nanochat, checkout, ignore=shutil.ignore_patterns(".git"))
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            (checkout / f"{name}.py").touch()
    tokenizer = open_tokenizer(Path(f"{options.data}.tokenizer"))
    if tokenizer.size != GPT2_SIZE:
        raise SystemExit(
            f"{options.data} was not made with GPT-2's tokenizer: prepare it with gpt2"
        )
    write_tokenizer(tokenizer, base / "tokenizer")
    data = base / "base_data_climbmix"
    write_text(options.data, tokenizer, data / "shard_00000.parquet")
    write_text(options.validation, tokenizer, data / "shard_00001.parquet")
    scale = (numbers.tokens_per_step / BATCH) ** 0.5
    windows = len(open_tokens(options.validation)) // numbers.tokens_per_step
    settings = {
        "device-type": options.device,
        "depth": shape["layers"],
        "aspect-ratio": shape["width"] // shape["layers"],
        "head-dim": min(HEAD_WIDTH, shape["width"]),
        "max-seq-len": numbers.sequence,
        "window-pattern": "L",  # without FlashAttention 3, short windows cost time
        "num-iterations": numbers.steps,
        "device-batch-size": numbers.batch,
        "total-batch-size": numbers.tokens_per_step,
        "eval-every": numbers.steps,
        "eval-tokens": max(1, windows) * numbers.tokens_per_step,
        "core-metric-every": -1,
        "sample-every": -1,
        "weight-decay": DECAY / scale,
        **{name.replace("_", "-"): rate * BEST / scale for name, rate in RATES.items()},
    }
    return Command(
        name="nanochat",
        words=[
            *(sys.executable, "-m", "scripts.base_train"),
            *(f"--{key}={value}" for key, value in settings.items()),
        ],
        folder=checkout,
        first_step=re.compile(r"^step 00000/"),
        validation=re.compile(r"^Step .*Validation (bpb: [\d.]+)"),
        environment={
            "NANOCHAT_BASE_DIR": str(base),
            "NANOCHAT_DTYPE": {"bf16": "bfloat16", "fp32": "float32"}[options.compute],
            "PYTHONPATH": os.pathsep.join([str(checkout), *filter(None, [PYTHONPATH])]),
        },
    )


def shape_of(options: argparse.Namespace) -> tuple[dict[str, int], Resolved]:
    """Layers, heads and width of a peer's model, and the numbers of its run."""
    preset, until = options.peer_preset or options.preset, options.peer_until or options.until
    text = f'name = "x"\npreset = "{preset}"\ndata.paths = "{options.data}"\n'
    text += f'train = {{ until = "{until}", batch = {options.batch} }}\n'
    config = load_text(text, (), place="start.toml")
    vocab = open_tokens(options.data).info.vocab_size or 1
    shape = {name: int(config.model.effective(name)) for name in ("layers", "heads", "width")}
    return shape, resolve(config, vocab=vocab)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """GPT-2's vocabulary as nanochat reads it; the end of a text is its beginning there."""
    import tiktoken

    folder.mkdir(parents=True)
    end = tokenizer.size - 1
    ranks = {tokenizer.token_bytes(id): id for id in range(end)}
    special = {name: end + number for number, name in enumerate(SPECIAL)}
    encoding = tiktoken.Encoding(
        name="gpt2-nanochat", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = [len(token) for token in ranks] + [0] * len(special)
    torch.save(torch.tensor(lengths, dtype=torch.int32), folder / "token_bytes.pt")


def write_text(prefix: Path, tokenizer: Tokenizer, file: Path) -> None:
    """The documents of a token set as text, in groups of rows."""
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": list(documents(prefix, tokenizer))})
    pyarrow.parquet.write_table(table, file, row_group_size=1024)


def documents(prefix: Path, tokenizer: Tokenizer) -> Iterator[str]:
    tokens = open_tokens(prefix)
    assert tokens.document_starts is not None, f"{prefix} has no documents"
    starts = [*map(int, tokens.document_starts), len(tokens)]
    for begin, end in pairwise(starts):
        yield tokenizer.decode(tokens.read(begin, end - begin)[:-1].tolist())
