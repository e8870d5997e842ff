"""One preparation divided among several machines: `--part 2/8`.

All sources, laid end to end by their size on the disk, are cut into equal stretches. A line belongs
to the part in whose stretch it begins; a source that cannot be sought (compressed, or one document
in itself) belongs whole to the part in which it begins. Parts follow one another, so merging them
in order gives what one preparation would have given.

    part 2/3:        [-- a.jsonl ----------][-- b.jsonl --------][- c.gz -]
                                   |>>>>>>>>>>>>>>>>|
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gristmill.base.errors import UserError
from gristmill.text.sources.blocks import Block
from gristmill.text.sources.reading import kind_of
from gristmill.text.sources.source import ReadOptions, Source


@dataclass(frozen=True)
class PartNumber:
    """Which of how many parts, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def suffix(self) -> str:
        """What follows the name of the whole set in that of the part."""
        return f".part-{self.number:0{len(str(self.of))}d}-of-{self.of}"


WHOLE = PartNumber(1, 1)


def parse_part(part: str, environment: Mapping[str, str] = os.environ) -> PartNumber:
    """The part that "2/8" names, or "slurm": the task of a job array."""
    if part == "slurm":
        try:
            first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
            number = int(environment["SLURM_ARRAY_TASK_ID"]) - first + 1
            return _checked(number, int(environment["SLURM_ARRAY_TASK_COUNT"]), part)
        except (KeyError, ValueError) as error:
            raise UserError(
                "this is not a task of a Slurm job array: SLURM_ARRAY_TASK_ID and "
                "SLURM_ARRAY_TASK_COUNT are not set",
                where="--part slurm",
                remedy="submit with sbatch --array=1-8, or give the part: --part 2/8",
            ) from error
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    return _checked(int(match[1]), int(match[2]), part) if match else _checked(0, 0, part)


def _checked(number: int, of: int, part: str) -> PartNumber:
    if 1 <= number <= of:
        return PartNumber(number, of)
    raise UserError(
        f"{part!r} is no part of a whole",
        where="--part",
        remedy="give the number of the part and of all parts, such as 2/8; the first is 1/8",
    )


@dataclass(frozen=True)
class Span:
    """What a part takes of a source."""

    source: int
    begin: int = 0
    end: int | None = None
    """The position after the last; None for all there is."""
    disk: int = 0
    """Bytes on the disk, for progress."""


def spans_of(sources: Sequence[Source], options: ReadOptions, part: PartNumber) -> list[Span]:
    """What a part takes of each source, in order."""
    if part == WHOLE:
        return [Span(n, disk=source.size or 0) for n, source in enumerate(sources)]
    total = sum(_size(source) for source in sources)
    low, high = total * (part.number - 1) // part.of, total * part.number // part.of
    spans, offset = [], 0
    for number, source in enumerate(sources):
        size = _size(source)
        if source.can_seek and kind_of(source, options).lines_before:
            begin, end = max(low - offset, 0), min(high - offset, size)
            if begin < end:
                spans.append(Span(number, begin, end, disk=end - begin))
        elif low <= offset < high or (offset >= high == total):
            spans.append(Span(number, disk=size))
        offset += size
    return spans


def _size(source: Source) -> int:
    if source.size is None:
        raise UserError(
            "this source cannot be divided into parts, since its size is not known",
            where=source.name,
            remedy="give files, or leave out --part",
        )
    return source.size


def blocks_of(span: Span, source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    """The blocks of a span from a position on."""
    for block in kind_of(source, options).cut(source, options, begin):
        if span.end is not None and block.begin >= span.end:
            return
        if span.end is not None and block.end > span.end:
            block = replace(block, end=span.end, disk=span.end)
        yield block


def first_line(span: Span, source: Source, options: ReadOptions) -> int:
    """The number of the first line of a span, counted from 1."""
    counting = kind_of(source, options).lines_before
    return 1 + (counting(source, span.begin) if counting and span.begin else 0)
