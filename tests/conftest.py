"""Fixtures for tests of the torch half: tiny token files and run files, made in a moment."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer

WORDS = "the mill turns and grinds the corn into flour while water runs below the wheel".split()


def tiny_documents(count: int = 60) -> list[Document]:
    rng = random.Random(5)
    texts = (" ".join(rng.choices(WORDS, k=rng.randint(20, 60))) for _ in range(count))
    return [Document(text + ".", f"tiny:{number}") for number, text in enumerate(texts, 1)]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of a small text, one id a byte."""
    prefix = tmp_path_factory.mktemp("tokens") / "tiny"
    prepare_documents(tiny_documents(), tokenizer=open_tokenizer("bytes"), output=prefix)
    return prefix


RUN = """
name = "tiny"
folder = "{folder}"
[model]
layers = 2
heads = 2
width = 16
context = 24
[data]
paths = "{tokens}"
split = "90,10"
[train]
until = "12 steps"
batch = 4
[optim]
lr = 1e-2
[validate]
every = "4 steps"
windows = 8
[checkpoint]
every = "3 steps"
[runtime]
device = "cpu"
threads = 1
"""


@pytest.fixture
def make_run(tokens: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a run of a few seconds, with settings replaced as on the command line."""

    def make(*settings: str, folder: str = "run") -> RunConfig:
        text = RUN.format(folder=tmp_path / folder, tokens=tokens)
        return load_text(text, settings, place="tiny.toml")

    return make
