"""Find a phrase in a token set, whatever tokens it became.

The same words get other ids at the beginning of a text, behind a space or inside a longer word, so
ids are turned back into bytes, a few million at a time, and the bytes are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import PIECE, TokenReader


@dataclass(frozen=True)
class Occurrence:
    """A place in a token set where a phrase stands."""

    document: int
    begin: int
    """The position of the first token with a part of the phrase."""
    end: int
    """The position behind the last one."""


class VocabularyBytes:
    """The bytes of every id of a tokenizer, laid out to decode many ids at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = [tokenizer.token_bytes(id) for id in range(tokenizer.size)]
        self._lengths = np.array([len(text) for text in texts], np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths
        self._flat = np.frombuffer(b"".join(texts) or b"\0", np.uint8)

    def joined(self, ids: npt.NDArray[np.int64]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The text of some ids, and where in it each of them ends."""
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths)
        places = np.repeat(self._begins[ids] - (ends - lengths), lengths)
        places += np.arange(len(places))
        return self._flat[places].tobytes(), ends


def find_phrase(
    reader: TokenReader,
    tokenizer: Tokenizer,
    phrase: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Occurrence]:
    """Every place of a phrase that lies within one document, from the first on."""
    wanted = phrase.encode()
    if not wanted:
        raise UserError("give some text to look for", where="the phrase", exit=Exit.USAGE)
    texts, starts, total = VocabularyBytes(tokenizer), reader.document_starts, len(reader)
    # Tokens have at least a byte, but for control tokens, which end a document.
    overlap = len(wanted)
    for begin in range(0, total, PIECE):
        first = max(0, begin - overlap)
        ids = reader.read(first, min(begin + PIECE, total) - first).astype(np.int64)
        content, ends = texts.joined(np.clip(ids, 0, tokenizer.size - 1))
        at = content.find(wanted)
        while at >= 0:
            low, high = np.searchsorted(ends, [at, at + len(wanted) - 1], side="right")
            low, high = first + int(low), first + int(high) + 1
            document = int(np.searchsorted(starts, low, side="right")) - 1
            # What ends before this piece was found in the one before.
            if (
                high > begin
                and int(np.searchsorted(starts, high - 1, side="right")) - 1 == document
            ):
                yield Occurrence(document, low, high)
            at = content.find(wanted, at + 1)
        progress(min(begin + PIECE, total), total)


def excerpt(
    reader: TokenReader, tokenizer: Tokenizer, begin: int, end: int, *, around: int = 12
) -> str:
    """The text of some tokens with a few of their document around them."""
    starts = reader.document_starts
    document = int(np.searchsorted(starts, begin, side="right")) - 1
    first = int(starts[document])
    last = int(starts[document + 1]) if document + 1 < len(starts) else len(reader)
    low, high = max(first, begin - around), min(last, end + around)
    text = tokenizer.decode(reader.read(low, high - low).tolist())
    return ("" if low == first else "…") + text + ("" if high == last else "…")
