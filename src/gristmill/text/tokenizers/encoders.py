"""Encoding text in bulk: the fastest way to the same ids that a tokenizer gives.

    gigatoken    byte-level BPE cut into words by GPT-2's pattern
    tokenizers   everything else, and whatever the fast way may not do

The ids are the same by construction, not by luck. The two libraries differ in one thing that we
know of: the tables of Unicode they were built with, which decide what is a letter. They can
disagree only on code points that the older table leaves unassigned, so a text that holds a code
point which Unicode 14 leaves unassigned (`unassigned.txt`, of 2021) takes the slow way.
Control tokens are not known to the fast way at all, so that a text which spells one is encoded as
plain text. And before it is used, in every process, the fast way must agree with the slow one on a
few thousand words of all kinds.

A batch gives one array of ids and the length of each text, never a Python number for each token. A
worker opens the fast way from a folder, and the tokenizer itself, which takes longer than all the
rest, only when a text needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.base.files import write_atomic

if TYPE_CHECKING:
    from gristmill.text.tokenizers.tokenizer import Tokenizer

_UNASSIGNED = Path(__file__).with_name("unassigned.txt")
_FAST_FILE = "fast.json"
_EXPECTED_FILE = "expected.npy"
_BYTES_FILE = "bytes"
_MEMORY = 512 << 20
_TEXT_UNSEEN = 128 << 20
"""How much text is encoded between openings where memory cannot be asked for."""


@dataclass(frozen=True)
class Encoded:
    """The ids of several texts, end to end."""

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    """How many ids each text has."""
    text_bytes: npt.NDArray[np.int64]
    """How many bytes of UTF-8 each text has."""


class Encoder(Protocol):
    """Text to ids, many at a time."""

    name: str
    """The library that does the work."""

    def encode(self, texts: Sequence[str]) -> Encoded: ...


def choose_encoder(tokenizer: Tokenizer) -> Encoder:
    """The fastest encoder for a tokenizer that is installed."""
    if tokenizer.spec["type"] == "bytes":
        return BytesEncoder()
    exact = ExactEncoder(tokenizer)
    if tokenizer.definition is None or not _fast_is_installed():
        return exact
    fast = GigatokenEncoder(tokenizer.definition, lambda: exact)
    return fast if _agrees(fast, _expected(exact)) else exact


def save_encoder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what `open_encoder` needs."""
    if tokenizer.spec["type"] == "bytes":
        write_atomic(folder / _BYTES_FILE, b"")
        return
    tokenizer.save(folder)
    if tokenizer.definition is not None and _fast_is_installed():
        write_atomic(folder / _FAST_FILE, tokenizer.definition)
        np.save(folder / _EXPECTED_FILE, _expected(ExactEncoder(tokenizer)), allow_pickle=False)


def open_encoder(folder: Path) -> Encoder:
    """What `choose_encoder` would choose, in a process that has only the folder."""
    if (folder / _BYTES_FILE).exists():
        return BytesEncoder()
    exact = functools.cache(lambda: _open_exact(folder))
    if (folder / _FAST_FILE).exists():
        fast = GigatokenEncoder((folder / _FAST_FILE).read_text("utf-8"), exact)
        if _agrees(fast, np.load(folder / _EXPECTED_FILE, allow_pickle=False)):
            return fast
    return exact()


def _fast_is_installed() -> bool:
    return importlib.util.find_spec("gigatoken") is not None


def _open_exact(folder: Path) -> ExactEncoder:
    from gristmill.text.tokenizers.tokenizer import open_tokenizer

    return ExactEncoder(open_tokenizer(folder))


class ExactEncoder:
    """The tokenizer's own way."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Encoded:
        rows = self._tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, rows), np.int64, count=len(rows))
        ids = np.fromiter((id for row in rows for id in row), np.uint32, count=int(lengths.sum()))
        sizes = np.fromiter((len(text.encode()) for text in texts), np.int64, count=len(texts))
        return Encoded(ids, lengths, sizes)


class BytesEncoder:
    """The bytes of a text are its ids."""

    name = "bytes"

    def encode(self, texts: Sequence[str]) -> Encoded:
        contents = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, contents), np.int64, count=len(contents))
        return Encoded(np.frombuffer(b"".join(contents), np.uint8), sizes, sizes)


class GigatokenEncoder:
    """Byte-level BPE by gigatoken, except for texts on which it might disagree.

    The library remembers every word it has seen, which is why it is fast, and never forgets one. So
    it is opened anew when that has taken too much memory; on ordinary text that is hardly ever.
    """

    name = "gigatoken"

    def __init__(self, definition: str, exact: Callable[[], ExactEncoder]) -> None:
        """Open a tokenizer.json without control tokens; `exact` opens the slow way."""
        self._definition = definition
        self._exact = functools.cache(exact)
        self._open()

    def _open(self) -> None:
        import gigatoken

        self._backend = gigatoken.Tokenizer.from_json(self._definition).backend
        self._resident = _resident()
        self._encoded = 0

    def _is_full(self) -> bool:
        resident = _resident()
        if resident is None or self._resident is None:
            return self._encoded > _TEXT_UNSEEN
        return resident - self._resident > _MEMORY

    def encode(self, texts: Sequence[str]) -> Encoded:
        contents = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, contents), np.int64, count=len(contents))
        # One by one is as fast as all at once, which would bring another library of arrays.
        rows = [self._backend.encode(content) for content in contents]
        doubtful = _doubtful(b"".join(contents), sizes)
        if doubtful:
            exact = self._exact().encode([texts[number] for number in doubtful])
            ends = np.cumsum(exact.lengths)[:-1]
            for number, row in zip(doubtful, np.split(exact.ids, ends), strict=True):
                rows[number] = row
        self._encoded += int(sizes.sum())
        if self._is_full():
            self._open()
        lengths = np.fromiter(map(len, rows), np.int64, count=len(rows))
        return Encoded(np.concatenate(rows) if rows else np.empty(0, np.uint32), lengths, sizes)


def _resident() -> int | None:
    """Bytes of memory that this process holds; not known on every system."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------ when the fast way may be used


def _expected(exact: ExactEncoder) -> npt.NDArray[np.int64]:
    """What the fast way must give for the probes: lengths, then ids."""
    encoded = exact.encode(list(_probes()))
    return np.concatenate([encoded.lengths, encoded.ids.astype(np.int64)])


def _agrees(fast: Encoder, expected: npt.NDArray[np.int64]) -> bool:
    encoded = fast.encode(list(_probes()))
    return np.array_equal(np.concatenate([encoded.lengths, encoded.ids]), expected)


def _probes() -> Iterator[str]:
    """Short texts in which every rule of the pattern and every byte of UTF-8 has its turn."""
    ascii = ("a", "Ab", "7", "42", " ", "  ", "\t", "\n", "\r\n", ".", "'s", "'ll", "'", "_", "\0")
    beyond = ("\u00e9", "\u4e2d", "\u65e5\u672c", "\u0627", "\u0967", "\u00b2", "\u00a0", "\u2009",
              "\u2014", "\U0001f642", "\U0001f469\u200d\U0001f52c", "\U00010348")  # fmt: skip
    pieces = ascii + beyond
    for one in pieces:
        for other in pieces:
            yield one + other + one
            yield f"word{one}{other} {one}1"
    yield "I'll say: it's 3,14159; don't you'd've THEY'RE we'Ll\n\n\n  \tdef f(x):\n        x\n"
    yield "<|endoftext|> <|endoftext|>a"


# ------------------------------------------------------------------ which texts are doubtful


def _doubtful(content: bytes, sizes: npt.NDArray[np.int64]) -> list[int]:
    """The numbers of texts, which lie end to end in `content`, that hold an unassigned code point.

    Nearly all text is passed by two looks: at the bytes that begin a character beyond ASCII, and at
    the byte that follows each. Only where these two may begin an unassigned code point is the
    character decoded.
    """
    data = np.frombuffer(content, np.uint8)
    leads = np.flatnonzero(data >= 0xC2)
    if not len(leads):
        return []
    free = _unassigned()
    pairs = data[leads].astype(np.intp) << 8 | data[leads + 1]
    suspects = leads[free.pairs[pairs]]
    found = suspects[free.codes[_decoded(data, suspects)]]
    numbers = np.searchsorted(np.cumsum(sizes), found, side="right")
    return [int(number) for number in np.unique(numbers)]


def _decoded(data: npt.NDArray[np.uint8], leads: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The code points of the characters that begin at some bytes."""
    first = data[leads]
    lengths = np.where(first < 0xE0, 2, np.where(first < 0xF0, 3, 4))
    # A lead byte of n has n ones and a zero before the bits that count.
    codes = (first & (0x7F >> lengths)).astype(np.intp)
    for more in (1, 2, 3):
        follow = lengths > more
        codes[follow] = codes[follow] << 6 | (data[leads[follow] + more] & 0x3F)
    return codes


@dataclass(frozen=True)
class _Unassigned:
    """What Unicode 14 leaves unassigned."""

    codes: npt.NDArray[np.bool_]
    """For each code point, whether it is."""
    pairs: npt.NDArray[np.bool_]
    """For each two bytes, as one number, whether they may begin such a code point."""


@functools.cache
def _unassigned() -> _Unassigned:
    codes = np.zeros(0x110000, np.bool_)
    for line in _UNASSIGNED.read_text("ascii").split():
        first, last = line.split("-")
        codes[int(first, 16) : int(last, 16) + 1] = True
    pairs = np.zeros(1 << 16, np.bool_)
    # Two bytes are a whole character below U+0800, and above begin 64 or more that lie together.
    free = np.flatnonzero(codes)
    groups = np.unique(free[free >= 0x800] >> 6) << 6
    for code in [*free[free < 0x800].tolist(), *groups.tolist()]:
        lead, second = chr(code).encode("utf-8", "surrogatepass")[:2]
        pairs[lead << 8 | second] = True
    return _Unassigned(codes, pairs)
