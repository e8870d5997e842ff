"""A small tokenizer with the control tokens of ChatML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


@pytest.fixture(scope="session")
def chatml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a byte-level BPE as transformers writes it."""
    folder = tmp_path_factory.mktemp("chatml")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    inner.train_from_iterator(["the user and the assistant talk about the mill"] * 4, trainer)
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def chatml(chatml_folder: Path) -> Tokenizer:
    return open_tokenizer(chatml_folder)
