"""How many tokens a text will give, before it is prepared: from sizes on disk and a small sample.

    tokens = bytes on disk * (bytes of text / bytes on disk) / (bytes of text / token)

Both ratios are those of a sample: pieces of files that are spread over the list, a MiB in all. A
tokenizer that is to be learnt from the text is learnt from the sample, where it finds a little more
to merge than it will in the whole. Files that differ much from the sampled ones make the figure
wrong; `prepare` counts. What `prepare` would drop, such as an image in a folder of text, counts as
no text; if there is nothing else, the error says why.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from gristmill.base.errors import DataError
from gristmill.text.sources.reading import STDIN, find_sources, is_plain_text, read_rows
from gristmill.text.sources.source import (
    DAMAGE,
    ReadError,
    ReadOptions,
    Reason,
    Source,
    check_encoding,
    damaged,
)
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

_FILES, _MOST_FILES = 16, 512
"""Into how many a sample is divided, and how many are read where files are small."""
_SAMPLE = 1 << 20
_BLOCK = 1 << 16
"""Bytes that are read at a time, so that little more than the sample is."""
BYTES_OF_EACH = 400
"""Bytes of text for each id of a vocabulary that is learnt from it; with fewer, most of its tokens
would occur too rarely to be learnt."""


@dataclass(frozen=True)
class TextEstimate:
    """A text, as far as a sample tells."""

    files: int
    disk: int | None
    """Bytes of all files as they are stored; None where a source does not say."""
    text_bytes: int | None
    """Bytes of all documents, about."""
    sample: tuple[str, ...]

    @cached_property
    def sample_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.sample)

    def bytes_per_token(self, tokenizer: Tokenizer) -> float:
        """With the tokens that end documents left out, since the sample cuts documents."""
        ids = tokenizer.encode_batch(self.sample)
        return self.sample_bytes / max(sum(map(len, ids)), 1)

    def learnt(self, vocab: int) -> tuple[int, float] | None:
        """The size of a BPE of at most `vocab` ids that this text is enough for, and its bytes a
        token in the sample; None if the text is too short or too uniform for any."""
        wanted = largest_vocabulary(self.text_bytes, most=vocab)
        if wanted is None:
            return None
        # The sample may be too small for what the whole text is enough for.
        size = largest_vocabulary(self.sample_bytes, most=wanted)
        if size is None:
            return None
        try:
            tokenizer = train_tokenizer(iter(self.sample), vocab_size=size)
        except DataError:
            return None
        return wanted, self.bytes_per_token(tokenizer)


def largest_vocabulary(text_bytes: int | None, *, most: int) -> int | None:
    """The largest power of two, from 512, of ids that a text of this size is enough for."""
    if text_bytes is None:
        return most
    size = 512
    while size * 2 <= most and size * 2 * BYTES_OF_EACH <= text_bytes:
        size *= 2
    return size if size <= most and size * BYTES_OF_EACH <= text_bytes else None


def estimate_text(names: Sequence[str], options: ReadOptions | None = None) -> TextEstimate:
    """Find the sources that `prepare` would read, and look at some of their text."""
    if STDIN in names:
        raise DataError(
            "standard input can be read only once",
            where=STDIN,
            remedy="prepare it, then give the name of the token set",
        )
    options = options or ReadOptions()
    sources = find_sources(names, options).sources
    some, disk, text = list[_Read](), 0, 0
    for source in _spread(sources):
        read = _read_some(source, options, _SAMPLE // min(len(sources), _FILES))
        some.append(read)
        disk, text = disk + read.disk, text + read.text
        if text >= _SAMPLE:
            break
    if not text:
        raise _no_text(names, some, options)
    texts = tuple(one for read in some for one in read.texts)
    sizes = [source.size for source in sources]
    whole = None if None in sizes else sum(filter(None, sizes))
    known = whole is not None and disk > 0
    total = round((whole or 0) * text / disk) if known else None
    return TextEstimate(len(sources), whole, total, texts)


def _no_text(names: Sequence[str], some: Sequence[_Read], options: ReadOptions) -> DataError:
    """Why a sample of the sources has no text: what a file itself says, or the commonest reason."""
    if failure := next((read.failure for read in some if read.failure), None):
        return failure
    where, what = " ".join(names), "there is no text in it"
    reasons = Counter(reason for read in some for reason in read.reasons)
    (reason, _), *_ = reasons.most_common(1) or [(Reason.EMPTY_TEXT, 0)]
    if reason is Reason.INVALID_UTF8:
        return DataError(f"{what}: it is not UTF-8", where=where, remedy="convert it first")
    if reason not in (Reason.MISSING_KEY, Reason.WRONG_TYPE):
        return DataError(what, where=where)
    keys = next((read.keys for read in some if read.keys), ())
    has = f"; the first row has {', '.join(keys)}" if keys else ""
    what += f" under the key {' or '.join(options.keys)}{has}"
    return DataError(what, where=where, remedy="name the key that holds the text: --json-key KEY")


def _spread(sources: Sequence[Source]) -> Iterator[Source]:
    """First some that are far apart, then those between them, up to a number."""
    step = max(1, len(sources) // _FILES)
    order = (source for first in range(step) for source in sources[first::step])
    return itertools.islice((source for source in order if source.size != 0), _MOST_FILES)


@dataclass
class _Read:
    """Some text of a source; of one without any, why."""

    texts: list[str] = field(default_factory=list)
    text: int = 0
    disk: int = 0
    reasons: list[Reason] = field(default_factory=list)
    keys: Sequence[str] = ()
    """Of the first row, where it could have text under another key."""
    failure: DataError | None = None


def _read_some(source: Source, options: ReadOptions, most: int) -> _Read:
    """Some text of one source, with the bytes on disk that it takes."""
    if is_plain_text(source) and source.path is not None:
        return _read_plain(source, most)
    read = _Read()
    try:
        for row in read_rows(source, replace(options, block_bytes=_BLOCK)):
            if read.text >= most and row.disk != read.disk:
                break
            read.disk = row.disk
            if isinstance(row.value, str):
                read.text += len(row.value.encode())
                read.texts.append(row.value)
            else:
                read.reasons.append(row.value)
    except DataError as error:
        read.failure = error
    if not read.text and source.path is not None:
        read.keys = _keys_of(source)
    return read


def _read_plain(source: Source, most: int) -> _Read:
    """The beginning of a plain text, which `prepare` drops if it is not UTF-8."""
    try:
        with closing(source.open()) as stream:
            content = stream.read(most)
            disk = len(content) if source.can_seek else stream.disk
            check_encoding(content)
    except (ReadError, *DAMAGE) as error:
        cause = error if isinstance(error, ReadError) else damaged(error)
        return _Read(failure=DataError(cause.what, where=source.name, remedy=cause.remedy))
    try:
        # Not final: the piece may end within a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError:
        return _Read(disk=disk, reasons=[Reason.INVALID_UTF8])
    if not text.strip():
        return _Read(disk=disk, reasons=[Reason.EMPTY_TEXT])
    return _Read([text], len(content), disk)


def _keys_of(source: Source) -> Sequence[str]:
    """The keys of the first row of JSON lines."""
    with suppress(OSError, ValueError, *DAMAGE), closing(source.open()) as stream:
        row = json.loads(stream.read(_BLOCK).partition(b"\n")[0])
        return tuple(row) if isinstance(row, dict) else ()
    return ()
