"""Tokenizers in the layout of Hugging Face: found by name, converted, and their end-of-text token.

    name    the local cache, then the network; tokenizer files only, never weights or code
    files   tokenizer.json as it is; spiece.model, tokenizer.model, vocab.txt through transformers

Four files may state the end-of-text token, read in this order: tokenizer_config.json and
special_tokens_map.json name it, generation_config.json and config.json give its id. Code in a
repository is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from gristmill.base.errors import DataError, UserError, optional
from gristmill.base.files import read_json
from gristmill.hub.client import first_line, parse_repository, quiet_library
from gristmill.hub.downloads import hub_folder
from gristmill.text.tokenizers.library import BYTES_FILE, CONFIG_FILE, TOKENIZER_FILE

SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
"""Files of tokenizers that only `transformers` can read."""
PAIRS = (
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("gpt2-vocab.json", "gpt2-merges.txt"),
    ("gpt2_vocab.json", "gpt2_merges.txt"),
    ("6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"),
)
"""Names of the two files of a byte-level BPE; the last are those in tiktoken's cache, the SHA-1 of
the URLs of OpenAI's encoder.json and vocab.bpe."""
_NAMING = (CONFIG_FILE, "special_tokens_map.json")
_NUMBERING = ("generation_config.json", "config.json")
TEMPLATE_FILE = "chat_template.jinja"
"""How conversations become text."""
_VOCABULARY = (TOKENIZER_FILE, *PAIRS[0], "added_tokens.json", *SLOW_FILES)
_FILES = (*_VOCABULARY, *_NAMING, *_NUMBERING, TEMPLATE_FILE)
_snapshot = partial(
    hub_folder,
    files=_FILES,
    where="the tokenizer",
    remedy='give "bytes", "gpt2", a file or folder of a tokenizer, or a Hugging Face name',
)


def is_hub_name(name: str) -> bool:
    """Whether this can be the name of a tokenizer on Hugging Face."""
    return not name.endswith(".json") and parse_repository(name) is not None


def tokenizer_folder(name: str) -> Path:
    """The tokenizer files of a Hugging Face name, from the local cache or the network."""
    return cached_tokenizer(name) or _snapshot(name)


def cached_tokenizer(name: str) -> Path | None:
    """The tokenizer files of a Hugging Face name if the local cache has them."""
    with suppress(UserError):
        folder = _snapshot(name, offline=True)
        return folder if holds_tokenizer(folder) else None
    return None


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer in any form."""
    names = (BYTES_FILE, TOKENIZER_FILE, *SLOW_FILES)
    return find_pair(folder) is not None or any((folder / name).is_file() for name in names)


def find_pair(folder: Path) -> tuple[Path, Path] | None:
    """The vocabulary and the merges in a folder, under any of the names of `PAIRS`."""
    for vocab, merges in PAIRS:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    return None


def stated_ends(folder: Path, inner: tokenizers.Tokenizer) -> Iterator[str]:
    """The tokens that the files in a folder say end a text."""
    yield from _stated_names(folder, "eos_token")
    for name in _NUMBERING:
        for end in _values(folder / name, "eos_token_id"):
            token = inner.id_to_token(end) if type(end) is int and end >= 0 else None
            if token is not None:
                yield token


def stated_begin(folder: Path, inner: tokenizers.Tokenizer) -> str | None:
    """The control token that the files in a folder say begins a text, if it is one."""
    added = inner.get_added_tokens_decoder().values()
    control = {token.content for token in added if token.special}
    return next((text for text in _stated_names(folder, "bos_token") if text in control), None)


def _stated_names(folder: Path, key: str) -> Iterator[str]:
    for name in _NAMING:
        for token in _values(folder / name, key):
            # The file may hold the token with its flags instead of its text alone.
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                yield text


def convert(folder: Path) -> tokenizers.Tokenizer:
    """A folder without tokenizer.json as a tokenizer of the library, by way of `transformers`."""
    transformers = optional(
        "transformers", extra="hf", purpose=f"reading a tokenizer without {TOKENIZER_FILE}"
    )
    quiet_library("transformers")
    try:
        opened = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        inner: tokenizers.Tokenizer = opened.backend_tokenizer
    except Exception as error:  # the library raises nothing more precise
        raise DataError(
            f"transformers cannot convert this tokenizer: {first_line(error)}",
            where=folder,
            remedy="it may need the packages sentencepiece and protobuf; or use a model "
            f"that comes with {TOKENIZER_FILE}",
        ) from error
    return inner


def _values(path: Path, key: str) -> list[Any]:
    content = read_json(path) if path.is_file() else {}
    value = content.get(key) if isinstance(content, dict) else None
    return value if isinstance(value, list) else [value]
