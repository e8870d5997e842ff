"""tiktoken's encodings as byte-level BPEs, with the ids that tiktoken gives.

    rank file, a line per token             "IHRoZQ== 262"     " the" has the rank and id 262
    merges, worked out from the ranks       "Ġt he"            the last pair merged within " the"

tiktoken repeatedly merges the adjacent pair whose union has the lowest rank; a BPE merges the pair
that comes first in its list of merges. Both give the same ids if the list holds, in the order of
ranks, the pair that is left when the bytes of each token are merged as far as possible without the
token itself. A token that leaves more than a pair can only come from a word that equals it, which
tiktoken looks up first; a BPE does so with `ignore_merges`.

The patterns are tiktoken's, without the possessive quantifiers that only save time and that the
library `tokenizers` reads differently; its `$` is written `\\z`, the end of the text. The ids are
exact as far as both libraries know the same Unicode: a newer character may be split differently.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import models

from gristmill.base.caches import cache_folder
from gristmill.base.downloads import download
from gristmill.base.errors import DataError, UserError
from gristmill.base.files import sha256_file
from gristmill.text.tokenizers.byte_level import CHARACTER_OF, byte_level
from gristmill.text.tokenizers.vocabularies import package_folder, tiktoken_cache

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
