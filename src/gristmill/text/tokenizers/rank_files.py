"""tiktoken's encodings as byte-level BPEs, with the ids that tiktoken gives.

    rank file, a line per token             "IHRoZQ== 262"     " the" has the rank and id 262
    merges, worked out from the ranks       "Ġt he"            the last pair merged within " the"

tiktoken joins the neighbours whose union has the lowest rank, again and again; a BPE joins those
that stand first in its list of merges. Both do the same if the list holds, in the order of ranks,
for each token the pair that is left when its own bytes are joined as far as they go without it.
A token that leaves more than a pair can only come from a piece that is just this token, which
tiktoken looks for first and a BPE does with `ignore_merges`.

The patterns are tiktoken's, without the possessive marks that only save time and that the library
`tokenizers` reads otherwise; its `$` is written `\\z`, the end of the text. The ids are exact as
far as both know the same Unicode; a character that is newer than one of them may be cut otherwise.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import models

from gristmill.base.downloads import cache_folder, download
from gristmill.base.errors import Exit, UserError
from gristmill.base.files import sha256_file
from gristmill.text.tokenizers.byte_level import CHARACTER_OF, byte_level
from gristmill.text.tokenizers.vocabularies import PublicFile, package_folder, tiktoken_cache

_URL = "https://openaipublic.blob.core.windows.net/encodings/"
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


@dataclass(frozen=True)
class Encoding:
    """A named encoding: its ranks, how text is cut, and its control tokens."""

    file: PublicFile
    pattern: str | None
    """None is GPT-2's pattern."""
    control: Mapping[str, int] = field(default_factory=dict)


_P50K = PublicFile(
    f"{_URL}p50k_base.tiktoken",
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
)
_CL100K = PublicFile(
    f"{_URL}cl100k_base.tiktoken",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
)
_O200K = PublicFile(
    f"{_URL}o200k_base.tiktoken",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
)
_R50K = PublicFile(
    f"{_URL}r50k_base.tiktoken",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
)
_AFTER_CL100K = {_END: 100257, **{token: 100258 + i for i, token in enumerate(_FILL)}}
ENCODINGS: Mapping[str, Encoding] = {
    "r50k_base": Encoding(_R50K, None, {_END: 50256}),
    "p50k_base": Encoding(_P50K, None, {_END: 50256}),
    "p50k_edit": Encoding(
        _P50K, None, {_END: 50256, **{token: 50281 + i for i, token in enumerate(_FILL)}}
    ),
    "cl100k_base": Encoding(_CL100K, CL100K_PATTERN, {**_AFTER_CL100K, "<|endofprompt|>": 100276}),
    "o200k_base": Encoding(_O200K, O200K_PATTERN, {_END: 199999, "<|endofprompt|>": 200018}),
}
"""tiktoken's encodings by their names; `gpt2` is that of `vocabularies`, equal to r50k_base."""


def open_encoding(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of the library that gives the ids of one of `ENCODINGS`."""
    encoding = ENCODINGS[name]
    ranks = read_ranks(_find(encoding.file))
    return from_ranks(ranks, pattern=encoding.pattern, control=encoding.control)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a rank file: a token in base 64 and its rank on each line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(
                "this is not a line of a rank file: a token in base 64, and its rank",
                where=f"{path}:{number}",
                exit=Exit.DATA,
            ) from error
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UserError(
            f"the rank file lacks {missing} of the 256 bytes", where=str(path), exit=Exit.DATA
        )
    return ranks


def from_ranks(
    ranks: Mapping[bytes, int], *, pattern: str | None, control: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """A byte-level BPE that gives each token its rank as id, and control tokens theirs."""
    merges, leftover = _merges(ranks)
    ids = {_written(token): rank for token, rank in ranks.items()} | dict(control)
    # The library wants every id to have a token. No text gives these: no merge makes them.
    for id in sorted(set(range(max(ids.values()) + 1)) - set(ids.values())):
        ids[f"<|unused_{id}|>"] = id
    model = models.BPE(ids, list(merges), ignore_merges=bool(leftover))
    inner = byte_level(model, pattern=pattern)
    inner.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in control]
    )
    return inner


def _find(file: PublicFile) -> Path:
    """A rank file from our cache, tiktoken's, a package that carries it, or the network."""
    own = cache_folder() / "tiktoken" / file.name
    carrier = package_folder("litellm", "litellm_core_utils", "tokenizers")
    places = [own, tiktoken_cache() / file.tiktoken_name]
    places += [carrier / file.tiktoken_name] if carrier else []
    wrong = []
    for place in places:
        if place.is_file():
            if sha256_file(place) == file.sha256:
                return place
            wrong.append(place)
    if own in wrong:
        raise UserError(
            "this is not the file that OpenAI publishes, by its SHA-256",
            where=str(own),
            remedy="delete it and start again",
            exit=Exit.DATA,
        )
    try:
        return download(file.url, to=own, sha256=file.sha256)
    except UserError as error:
        raise UserError(
            f"the ranks {file.name} are not on this machine: {error.problems[0].what}",
            where=file.url,
            remedy=f"run once with network, or copy the file to {own}",
            exit=error.exit,
        ) from error


def _written(token: bytes) -> str:
    return "".join(CHARACTER_OF[byte] for byte in token)


def _merges(ranks: Mapping[bytes, int]) -> tuple[Sequence[tuple[str, str]], int]:
    """The merges in the order of their ranks, and how many tokens no merge makes."""
    merges, leftover = [], 0
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        parts = _joined(token, ranks)
        if len(parts) == 2:
            merges.append((_written(parts[0]), _written(parts[1])))
        else:
            leftover += 1
    return merges, leftover


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
