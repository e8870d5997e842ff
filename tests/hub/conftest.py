"""A local Hub, and a user's machine whose commands talk to it.

Every command runs in a process of its own. The client libraries read their settings when they are
imported, so they are imported once with the address of the Hub and a home that leads to the one of
the test, and each command is forked from there: imports would take most of the time. A command
that is offline imports them itself.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from gristmill.base.errors import Exit

_spec = importlib.util.spec_from_file_location(
    "hub_server", Path(__file__).with_name("hub_server.py")
)
assert _spec and _spec.loader
hub_server = sys.modules["hub_server"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hub_server)

CONTEXT = multiprocessing.get_context("forkserver")
"""Its processes come from one that all tests share, in which torch is imported."""
COMMAND = """
import os, resource, sys, traceback
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
for number, file in ((1, stdout), (2, stderr)):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
if file_limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
from gristmill.__main__ import main
from gristmill.cli import progress
progress.SECONDS_BETWEEN_LINES = seconds_between_lines
status = -1
try:
    sys.argv = ["gristmill", *words]
    exec(words[1]) if words[0] == "python" else main()
    status = 0
except SystemExit as ended:
    status = int(ended.code or 0)
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status % 256)
"""
FORKS = """
import contextlib, os
os.environ.clear()
os.environ.update(environment)
import datasets, datasets.packaged_modules.parquet.parquet
with contextlib.suppress(ImportError):
    # What a stream of a dataset loads, if it is there.
    import fsspec.implementations.http, scipy.io
import huggingface_hub.hf_api, huggingface_hub.hf_file_system
import gristmill.checkpoint.model, gristmill.generate, gristmill.text.prepare.prepare
while (task := pipe.recv()) is not None:
    child = os.fork()
    if child == 0:
        exec(command, task)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@dataclass
class ProcessInfo:
    """What all machines of a test session share."""

    ports: tuple[int, int]
    home: Path
    """Leads to the home of the machine of the test."""
    environment: dict[str, str]
    pipe: Any


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessInfo]:
    home = tmp_path_factory.mktemp("machine") / "home"
    held = [hub_server.reserve_port(), hub_server.reserve_port()]
    ports = held[0].getsockname()[1], held[1].getsockname()[1]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment = {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_ENDPOINT": f"http://127.0.0.1:{ports[0]}",
        # As if there were no other network.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
        "TERM": "dumb",
    }
    pipe, theirs = CONTEXT.Pipe()
    names = {"environment": environment, "pipe": theirs, "command": COMMAND}
    process = CONTEXT.Process(target=exec, args=(FORKS, names))
    process.start()
    yield ProcessInfo(ports, home, environment, pipe)
    pipe.send(None)
    process.join()
    for one in held:
        one.close()


@dataclass
class Finished:
    """How a command ended, and what it printed."""

    status: int
    output: str
    errors: str

    @property
    def done(self) -> bool:
        assert self.status == 0, self.errors
        return True

    @property
    def notes(self) -> list[str]:
        """The lines on stderr, without the two of an error at their end."""
        lines = self.errors.splitlines()
        return lines[:-2] if self.status else lines

    def fails(self, *parts: str, status: Exit = Exit.DATA) -> bool:
        """Whether it ended with one error that holds these parts, and with what to do about it."""
        assert self.status == status, self.errors
        lines = self.errors.splitlines()
        assert lines[-2].startswith("error: ") and lines[-1].startswith("    "), self.errors
        assert self.errors.count("error: ") == 1
        for part in parts:
            assert part in "\n".join(lines[-2:])
        return True


@dataclass
class Machine:
    """A user's machine: a home, a folder for work, and commands."""

    place: ProcessInfo
    work: Path

    @property
    def home(self) -> Path:
        return self.place.home

    def run(
        self,
        *words: str,
        file_limit: int = 0,
        seconds_between_lines: float = 1e9,
        **environment: str,
    ) -> Finished:
        """Run `gristmill` to its end."""
        files = [self.work.parent / name for name in ("stdout", "stderr")]
        task = {
            "environment": {**self.place.environment, **environment},
            "folder": str(self.work),
            "stdout": str(files[0]),
            "stderr": str(files[1]),
            "file_limit": file_limit,
            "seconds_between_lines": seconds_between_lines,
            "words": words,
        }
        if "HF_HUB_OFFLINE" in environment:
            process = CONTEXT.Process(target=exec, args=(COMMAND, task))
            process.start()
            process.join()
            status = process.exitcode
        else:
            self.place.pipe.send(task)
            status = self.place.pipe.recv()
        return Finished(status, *(file.read_text() for file in files))

    def run_all(self, *commands: tuple[str, ...], **options: Any) -> list[Finished]:
        """Run one command after another."""
        return [self.run(*words, **options) for words in commands]

    def download(self, name: str, **options: object) -> None:
        """Download a dataset into the cache, as `hf download` does."""
        call = f"huggingface_hub.snapshot_download({name!r}, repo_type='dataset', **{options!r})"
        finished = self.run("python", f"import huggingface_hub\n{call}")
        assert finished.status == 0, finished.errors

    @property
    def cached(self) -> set[str]:
        """The names of all files in the cache of the libraries."""
        snapshots = self.home.glob("huggingface/hub/*/snapshots/*")
        return {
            str(file.relative_to(folder))
            for folder in snapshots
            for file in folder.rglob("*")
            if not file.is_dir()
        }


@pytest.fixture
def hub(place: ProcessInfo) -> Iterator[Any]:
    server = hub_server.HubServer(*place.ports)
    yield server
    server.close()


@pytest.fixture
def machine(place: ProcessInfo, tmp_path: Path) -> Iterator[Machine]:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    place.home.symlink_to(home)
    yield Machine(place, work)
    place.home.unlink()


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A tokenizer of single bytes and an end-of-text token, in the library's format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(sorted(letters))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def model_files(tokenizer_json: str) -> dict[str, bytes | str]:
    """A GPT-2 of 257 ids and a few thousand parameters, as it would be on the Hub."""
    width, context, vocab = 16, 32, 257
    torch.manual_seed(1)
    shapes = {
        "wte.weight": (vocab, width),
        "wpe.weight": (context, width),
        "h.0.ln_1.weight": (width,),
        "h.0.ln_1.bias": (width,),
        "h.0.attn.c_attn.weight": (width, 3 * width),
        "h.0.attn.c_attn.bias": (3 * width,),
        "h.0.attn.c_proj.weight": (width, width),
        "h.0.attn.c_proj.bias": (width,),
        "h.0.ln_2.weight": (width,),
        "h.0.ln_2.bias": (width,),
        "h.0.mlp.c_fc.weight": (width, 4 * width),
        "h.0.mlp.c_fc.bias": (4 * width,),
        "h.0.mlp.c_proj.weight": (4 * width, width),
        "h.0.mlp.c_proj.bias": (width,),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 1,
        "n_head": 2,
        "n_embd": width,
        "n_positions": context,
        "vocab_size": vocab,
    }
    weights = save({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()})
    return {
        "config.json": json.dumps(config),
        "model.safetensors": weights,
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>"}),
        # What must never be downloaded:
        "pytorch_model.bin": b"a pickle",
        "modeling_tiny.py": "raise SystemExit('this was run')",
        "onnx/config.json": "{}",
    }
