"""Encoding text in bulk: the fastest library that gives the same ids as the tokenizer.

    gigatoken    byte-level BPE with GPT-2's pattern
    tokenizers   everything else, and every text on which gigatoken might differ

The two libraries were built with different Unicode tables, which decide what is a letter. They can
only disagree on code points that the older table leaves unassigned, so a text with a code point
that Unicode 14 (of 2021) leaves unassigned, see `unassigned.txt`, is encoded by `tokenizers`.
gigatoken does not know control tokens, so a text that spells one is encoded as plain text. Before
it is used, in every process, it must agree with `tokenizers` on a few thousand words of all kinds.

A batch gives one array of ids and the length of each text, never a Python number for each token. A
worker opens gigatoken from a folder, and the tokenizer itself, which takes longer than all the
rest, only when a text needs it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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
_TEXT_BETWEEN_OPENINGS = 128 << 20
"""Bytes of text, on systems that do not report how much memory a process holds."""


@dataclass(frozen=True)
class Encoded:
    """The ids of several texts, end to end."""

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    """Ids of each text."""
    text_bytes: npt.NDArray[np.int64]
    """Bytes of UTF-8 of each text."""


def choose_encoder(tokenizer: Tokenizer) -> Encoder:
    """The fastest encoder for a tokenizer that is installed."""
    if tokenizer.spec["type"] == "bytes":
        return BytesEncoder()
    exact = ExactEncoder(tokenizer)
    if tokenizer.definition is None or not find_spec("gigatoken"):
        return exact
    fast = GigatokenEncoder(tokenizer.definition, lambda: exact)
    return fast if np.array_equal(_probe(fast), _probe(exact)) else exact


def save_encoder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what `open_encoder` needs."""
    if tokenizer.spec["type"] == "bytes":
        write_atomic(folder / _BYTES_FILE, b"")
        return
    tokenizer.save(folder)
    if tokenizer.definition is not None and find_spec("gigatoken"):
        write_atomic(folder / _FAST_FILE, tokenizer.definition)
        np.save(folder / _EXPECTED_FILE, _probe(ExactEncoder(tokenizer)), allow_pickle=False)


def open_encoder(folder: Path) -> Encoder:
    """What `choose_encoder` would choose, in a process that has only the folder."""
    if (folder / _BYTES_FILE).exists():
        return BytesEncoder()

    def exact() -> ExactEncoder:
        from gristmill.text.tokenizers.tokenizer import open_tokenizer

        return ExactEncoder(open_tokenizer(folder))

    if (folder / _FAST_FILE).exists():
        fast = GigatokenEncoder((folder / _FAST_FILE).read_text("utf-8"), exact)
        expected = np.load(folder / _EXPECTED_FILE, allow_pickle=False)
        if np.array_equal(_probe(fast), expected):
            return fast
    return exact()


class ExactEncoder:
    """Encodes with the tokenizer itself."""

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
    """Takes the bytes of a text as its ids."""

    name = "bytes"

    def encode(self, texts: Sequence[str]) -> Encoded:
        contents = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, contents), np.int64, count=len(contents))
        return Encoded(np.frombuffer(b"".join(contents), np.uint8), sizes, sizes)


class GigatokenEncoder:
    """Encodes with gigatoken, except for texts on which it might differ.

    The library is fast because it caches every word, and it never drops one. It is reopened when
    the cache has taken too much memory, which ordinary text hardly ever causes.
    """

    name = "gigatoken"

    def __init__(self, definition: str, exact: Callable[[], ExactEncoder]) -> None:
        """Open a tokenizer.json without control tokens; `exact` opens the tokenizer itself."""
        self._definition = definition
        self._exact = functools.cache(exact)
        self._open()

    def _open(self) -> None:
        import gigatoken

        self._backend = gigatoken.Tokenizer.from_json(self._definition).backend
        self._memory = _resident()
        self._encoded = 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        contents = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, contents), np.int64, count=len(contents))
        # One by one is as fast as all at once, which would need another array library.
        rows = [self._backend.encode(content) for content in contents]
        doubtful = _doubtful(b"".join(contents), sizes)
        if doubtful:
            exact = self._exact().encode([texts[number] for number in doubtful])
            ends = np.cumsum(exact.lengths)[:-1]
            for number, row in zip(doubtful, np.split(exact.ids, ends), strict=True):
                rows[number] = row
        self._encoded += int(sizes.sum())
        memory = _resident()
        if memory is None or self._memory is None:
            full = self._encoded > _TEXT_BETWEEN_OPENINGS
        else:
            full = memory - self._memory > _MEMORY
        if full:
            self._open()
        lengths = np.fromiter(map(len, rows), np.int64, count=len(rows))
        return Encoded(np.concatenate(rows) if rows else np.empty(0, np.uint32), lengths, sizes)


Encoder: TypeAlias = ExactEncoder | BytesEncoder | GigatokenEncoder
"""Text to ids, many at a time; its `name` is the library that does the work."""


def _resident() -> int | None:
    """Bytes of memory that this process holds, on systems that report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _probe(encoder: Encoder) -> npt.NDArray[np.int64]:
    """What an encoder gives for the probes: lengths, then ids."""
    encoded = encoder.encode(list(_probes()))
    return np.concatenate([encoded.lengths, encoded.ids.astype(np.int64)])


def _probes() -> Iterator[str]:
    """Short texts that use every rule of the pattern and every byte of UTF-8."""
    ascii = ("a", "Ab", "7", "42", " ", "  ", "\t", "\n", "\r\n", ".", "'s", "'ll", "'", "_", "\0")
    beyond = ("\u00e9", "\u4e2d", "\u65e5\u672c", "\u0627", "\u0967", "\u00b2", "\u00a0", "\u2009",
              "\u2014", "\U0001f642", "\U0001f469\u200d\U0001f52c", "\U00010348")  # fmt: skip
    pieces = ascii + beyond
    for piece in pieces:
        for other in pieces:
            yield piece + other + piece
            yield f"word{piece}{other} {piece}1"
    yield "I'll say: it's 3,14159; don't you'd've THEY'RE we'Ll\n\n\n  \tdef f(x):\n        x\n"
    yield "<|endoftext|> <|endoftext|>a"


def _doubtful(content: bytes, sizes: npt.NDArray[np.int64]) -> list[int]:
    """The numbers of the texts, end to end in `content`, with an unassigned code point."""
    data = np.frombuffer(content, np.uint8)
    # The bytes beyond ASCII are whole characters, and most texts have few of them.
    characters = data[data >= 0x80].tobytes().decode()
    unassigned = _unassigned()[np.frombuffer(characters.encode("utf-32-le"), "<u4")]
    if not unassigned.any():
        return []
    begins = np.flatnonzero(data >= 0xC2)[unassigned]
    numbers = np.searchsorted(np.cumsum(sizes), begins, side="right")
    return [int(number) for number in np.unique(numbers)]


@functools.cache
def _unassigned() -> npt.NDArray[np.bool_]:
    """Which code points Unicode 14 leaves unassigned."""
    codes = np.zeros(0x110000, np.bool_)
    for line in _UNASSIGNED.read_text("ascii").split():
        first, last = line.split("-")
        codes[int(first, 16) : int(last, 16) + 1] = True
    return codes
