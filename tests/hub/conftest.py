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
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
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
COMMANDS = """
import json, os, resource, sys, traceback
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
if file_limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
assert "huggingface_hub" not in sys.modules
from gristmill.__main__ import main
from gristmill.cli import progress
progress.SECONDS_BETWEEN_LINES = seconds_between_lines
for number, words in enumerate(commands):
    for output, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{place}/{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), output)
    status = 0
    try:
        if words[0] == "python":
            exec(words[1])
        else:
            sys.argv = ["gristmill", *words]
            main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = -1
    sys.stdout.flush()
    sys.stderr.flush()
    with open(f"{place}/{number}.status", "w") as file:
        file.write(str(status))
"""


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

    home: Path
    work: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str, **options: Any) -> Finished:
        """Run `gristmill` to its end."""
        return self.run_all(words, **options)[0]

    def run_all(
        self,
        *commands: tuple[str, ...],
        file_limit: int = 0,
        seconds_between_lines: float = 1e9,
        **environment: str,
    ) -> list[Finished]:
        """Run several commands in one process, since the imports take most of the time."""
        with tempfile.TemporaryDirectory(dir=self.work.parent) as place:
            names = {
                "environment": {**self.environment, **environment},
                "folder": str(self.work),
                "place": place,
                "file_limit": file_limit,
                "seconds_between_lines": seconds_between_lines,
                "commands": commands,
            }
            process = CONTEXT.Process(target=exec, args=(COMMANDS, names))
            process.start()
            process.join()
            return [
                Finished(
                    int(Path(place, f"{number}.status").read_text()),
                    *(Path(place, f"{number}.{name}").read_text() for name in ("stdout", "stderr")),
                )
                for number in range(len(commands))
            ]

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
