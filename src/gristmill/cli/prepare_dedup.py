"""Options of `prepare` that find duplicates, and how far finding them is."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.limits import free_memory
from gristmill.base.units import format_bytes
from gristmill.cli.progress import ProgressLine
from gristmill.config.track import parse_bytes
from gristmill.text.dedup.signatures import SignatureSettings
from gristmill.text.prepare.dedup_parts import group_signed_parts
from gristmill.text.prepare.dedup_request import LEAST_MEMORY, MEMORY, DedupRequest
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.prepare.signing import SIGNING, DedupProgress

_dedup_option = functools.partial(typer.Option, rich_help_panel="Duplicates")
_MOST_PERMUTATIONS = 4096


class DedupMethod(enum.StrEnum):
    """How documents are compared."""

    EXACT = "exact"
    MINHASH = "minhash"


class DedupUnit(enum.StrEnum):
    """What is compared as a whole."""

    DOCUMENT = "document"
    PARAGRAPH = "paragraph"
    LINE = "line"


Dedup = Annotated[
    DedupMethod | None,
    _dedup_option(
        "--dedup",
        metavar="METHOD",
        help="Drop duplicates, in all of the sources together: exact, or minhash for documents "
        "that share most of their words in a row.",
    ),
]
DedupBy = Annotated[
    DedupUnit | None,
    _dedup_option(
        "--dedup-by",
        metavar="UNIT",
        help="What is compared by exact: a document, or each paragraph or line, which is then "
        "removed from its document.",
        show_default="document",
    ),
]
DedupMinLength = Annotated[
    int | None,
    _dedup_option(
        min=0,
        metavar="N",
        help="Paragraphs and lines of fewer characters stay, however often they occur.",
        show_default="0",
    ),
]
DedupWords = Annotated[
    int | None,
    _dedup_option(
        min=1, max=64, metavar="N", help="Words in a row, for minhash.", show_default="5"
    ),
]
DedupBuckets = Annotated[
    int | None,
    _dedup_option(min=1, metavar="N", help="Buckets; documents match if any of them agrees.  [14]"),
]
DedupHashes = Annotated[
    int | None,
    _dedup_option(
        min=1, metavar="N", help="Hashes of a bucket, which must all agree.", show_default="8"
    ),
]
DedupMemory = Annotated[
    str | None,
    _dedup_option(
        metavar="SIZE",
        help="Memory that comparing may take: 4GB, or half of what is free if that is less.",
        show_default=False,
    ),
]
Against = Annotated[
    list[Path] | None,
    _dedup_option(
        "--against",
        metavar="SET",
        help="Also drop what this older token set contains. May be repeated.",
    ),
]
DedupGroup = Annotated[
    bool,
    _dedup_option(
        "--dedup-group",
        help="Group all --parts, once each of them is signed; then they can be prepared.",
    ),
]


def dedup_request(
    method: DedupMethod | None,
    *,
    unit: DedupUnit | None,
    min_length: int | None,
    words: int | None,
    buckets: int | None,
    hashes: int | None,
    memory: str | None,
    against: Sequence[Path],
    hold_out_end: float | None,
) -> DedupRequest | None:
    """How duplicates are found; None if they stay."""
    of_minhash = {
        "--dedup-words": words, "--dedup-buckets": buckets, "--dedup-hashes": hashes
    }  # fmt: skip
    of_exact = {"--dedup-by": unit, "--dedup-min-length": min_length}
    if method is None:
        given = {**of_minhash, **of_exact, "--dedup-memory": memory, "--against": against or None}
        _refuse(given, "this says how duplicates are found, and they are not", "add --dedup")
        return None
    if method is DedupMethod.EXACT:
        _refuse(of_minhash, "this is a setting of minhash", "choose --dedup minhash")
    else:
        _refuse(of_exact, "minhash compares documents", "choose --dedup exact")
    if min_length is not None and unit in (None, DedupUnit.DOCUMENT):
        what = "this is about paragraphs and lines, and documents are compared"
        _refuse({"--dedup-min-length": min_length}, what, "add --dedup-by")
    if hold_out_end is not None:
        what = "the end of a document is held out, and documents are compared as a whole"
        _refuse({"--hold-out-end": hold_out_end}, what, "leave out --dedup")
    chosen = SignatureSettings()
    settings = SignatureSettings(
        method.value,
        (unit or DedupUnit.DOCUMENT).value,
        chosen.words if words is None else words,
        chosen.buckets if buckets is None else buckets,
        chosen.hashes if hashes is None else hashes,
        min_length or 0,
    )
    if settings.buckets * settings.hashes > _MOST_PERMUTATIONS:
        raise UserError(
            f"{settings.buckets} buckets of {settings.hashes} hashes are more than "
            f"{_MOST_PERMUTATIONS} hashes for each document",
            where="--dedup-buckets",
            remedy="choose fewer: 14 of 8 find what has 3 of 4 words in a row in common",
            exit=Exit.USAGE,
        )
    return DedupRequest(settings, tuple(against), _memory(memory))


def _refuse(options: Mapping[str, object], what: str, remedy: str) -> None:
    for name, value in options.items():
        if value is not None:
            remedies = f"{remedy}, or leave this out"
            raise UserError(what, where=name, remedy=remedies, exit=Exit.USAGE)


def _memory(text: str | None) -> int:
    if text is None:
        return max(LEAST_MEMORY, min(MEMORY, free_memory() // 2))
    try:
        amount = parse_bytes(text)
    except ValueError as error:
        what = f"{text!r} {error}"
        raise UserError(what, where="--dedup-memory", exit=Exit.USAGE) from None
    if amount < LEAST_MEMORY:
        raise UserError(
            f"{format_bytes(amount)} are too little to sort signatures in",
            where="--dedup-memory",
            remedy=f"give {format_bytes(LEAST_MEMORY)} or more",
            exit=Exit.USAGE,
        )
    return amount


def show_dedup(line: ProgressLine, state: DedupProgress) -> None:
    """Show how far finding duplicates is."""
    if state.what == SIGNING:
        of = f" of {format_bytes(state.total)}" if state.total else ""
        line.update(state.done, state.total, f"{state.what}, {format_bytes(state.done)}{of}")
    elif state.total:
        line.show_count(state.what, state.done, state.total)


def check_dedup_group(request: PrepareRequest, parts: int | None, *, alone: bool) -> None:
    """Refuse to group what has no parts, or is not compared."""
    what = ""
    if request.dedup is None:
        what, remedy = "duplicates are not looked for", "give the whole command, with --dedup"
    elif parts is None or not alone:
        what, remedy = (
            "this groups all parts, which are run by others",
            "give --parts, and neither --part nor --engine",
        )
    if what:
        raise UserError(what, where="--dedup-group", remedy=remedy, exit=Exit.USAGE)


def group_all_parts(requests: Sequence[PrepareRequest], *, quiet: bool) -> None:
    """Group all parts, with progress."""
    with ProgressLine("grouping", quiet=quiet) as line:
        group_signed_parts(requests, listener=functools.partial(show_dedup, line), note=line.say)
