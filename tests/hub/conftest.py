"""A local Hub, and a user's machine whose commands talk to it.

The client libraries read their settings when they are imported, so every command runs in a process
of its own. It is forked from the one that all tests share, in which torch is imported already and
the client libraries are not.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

_spec = importlib.util.spec_from_file_location(
    "hub_server", Path(__file__).with_name("hub_server.py")
)
assert _spec and _spec.loader
hub_server = sys.modules["hub_server"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hub_server)

CONTEXT = multiprocessing.get_context("forkserver")
COMMAND = """
import os, resource, sys
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
for number, file in enumerate(files, 1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
if file_limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
assert "huggingface_hub" not in sys.modules
if code:
    exec(code)
    sys.exit()
from gristmill.cli import progress
progress.SECONDS_BETWEEN_LINES = seconds_between_lines
sys.argv = ["gristmill", *words]
from gristmill.__main__ import main
main()
"""


@dataclass
class Finished:
    """How a command ended, and what it printed."""

    status: int | None
    output: str
    errors: str

    @property
    def error(self) -> str:
        """The one error, without what comes before it."""
        first, *rest = self.errors.splitlines()[-2:]
        lines = [first, *rest] if first.startswith("error: ") else rest
        assert lines and lines[0].startswith("error: "), self.errors
        return "\n".join(lines)


@dataclass
class Machine:
    """A user's machine: a home, a folder for work, and commands."""

    home: Path
    work: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        *words: str,
        code: str = "",
        file_limit: int = 0,
        seconds_between_lines: float = 1e9,
        **environment: str,
    ) -> Finished:
        """Run `gristmill`, or other code, to its end."""
        files = [self.work / ".stdout", self.work / ".stderr"]
        names = {
            "environment": {**self.environment, **environment},
            "folder": str(self.work),
            "files": [str(file) for file in files],
            "file_limit": file_limit,
            "seconds_between_lines": seconds_between_lines,
            "code": code,
            "words": words,
        }
        process = CONTEXT.Process(target=exec, args=(COMMAND, names))
        process.start()
        process.join()
        return Finished(process.exitcode, *(file.read_text() for file in files))

    def download(self, name: str, **options: object) -> None:
        """Download a dataset into the cache, as `hf download` does."""
        call = f"huggingface_hub.snapshot_download({name!r}, repo_type='dataset', **{options!r})"
        finished = self.run(code=f"import huggingface_hub\n{call}")
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
def hub() -> Iterator[Any]:
    server = hub_server.HubServer()
    yield server
    server.close()


@pytest.fixture
def machine(hub: Any, tmp_path: Path) -> Machine:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return Machine(
        home,
        work,
        {
            **kept,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "HF_HOME": str(home / "huggingface"),
            "HF_ENDPOINT": hub.url,
            # As if there were no other network.
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
            "TERM": "dumb",
        },
    )


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
