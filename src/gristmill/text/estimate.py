"""Estimates the number of tokens of a text before it is prepared, from file sizes and a sample.

    tokens = bytes on disk * (bytes of text / bytes on disk) / (bytes of text / token)

Both ratios come from a sample of about 1 MiB: the beginnings of files spread over the list. A
tokenizer that `prepare` would train on the text is trained on the sample, which it compresses a
little better than the whole text. The estimate is wrong if the sampled files are not typical;
`prepare` counts the tokens. What `prepare` would drop, such as an image in a folder of text, counts
as no text; if there is no text at all, the error says why.
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

_FILES, _MAX_FILES = 16, 512
"""Number of files of a sample, and the limit if files are small."""
_SAMPLE = 1 << 20
_BLOCK = 1 << 16
"""Bytes of a read; small, so that little more than the sample is read."""
BYTES_PER_ID = 400
"""Bytes of text for each id of a vocabulary trained on it; with fewer, a model would see most of
its tokens too rarely."""


@dataclass(frozen=True)
class TextEstimate:
    """Size of a text, estimated from a sample."""

    files: int
    disk: int | None
    """Bytes of all files on disk; None if a source does not report its size."""
    text_bytes: int | None
    """Estimated bytes of all documents."""
    sample: tuple[str, ...]

    @cached_property
    def sample_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.sample)

    def bytes_per_token(self, tokenizer: Tokenizer) -> float:
        """Without end-of-text tokens, since the sample truncates documents."""
        ids = tokenizer.encode_batch(self.sample)
        return self.sample_bytes / max(sum(map(len, ids)), 1)

    def train_bpe(self, vocab: int) -> tuple[int, float] | None:
        """The size of a BPE of at most `vocab` ids that this text suffices for, and its bytes per
        token in the sample; None if the text is too short or too uniform."""
        size = largest_vocabulary(self.text_bytes, limit=vocab)
        if size is None:
            return None
        # The sample may not suffice for the vocabulary of the whole text.
        sample_size = largest_vocabulary(self.sample_bytes, limit=size)
        if sample_size is None:
            return None
        try:
            tokenizer = train_tokenizer(iter(self.sample), vocab_size=sample_size)
        except DataError:
            return None
        return size, self.bytes_per_token(tokenizer)


def largest_vocabulary(text_bytes: int | None, *, limit: int) -> int | None:
    """The largest vocabulary, a power of two from 512, that a text of this size suffices for."""
    if text_bytes is None:
        return limit
    size = 512
    while size * 2 <= limit and size * 2 * BYTES_PER_ID <= text_bytes:
        size *= 2
    return size if size <= limit and size * BYTES_PER_ID <= text_bytes else None


def estimate_text(names: Sequence[str], options: ReadOptions | None = None) -> TextEstimate:
    """Find the sources that `prepare` would read, and sample their text."""
    if STDIN in names:
        raise DataError(
            "standard input can be read only once",
            where=STDIN,
            remedy="prepare it, then give the name of the token set",
        )
    options = options or ReadOptions()
    sources = find_sources(names, options).sources
    samples, disk_bytes, text_bytes = list[_SourceSample](), 0, 0
    for source in _spread(sources):
        sample = _sample(source, options, _SAMPLE // min(len(sources), _FILES))
        samples.append(sample)
        disk_bytes, text_bytes = disk_bytes + sample.disk_bytes, text_bytes + sample.text_bytes
        if text_bytes >= _SAMPLE:
            break
    if not text_bytes:
        raise _no_text(names, samples, options)
    texts = tuple(text for sample in samples for text in sample.texts)
    sizes = [source.size for source in sources]
    disk = None if None in sizes else sum(filter(None, sizes))
    known = disk is not None and disk_bytes > 0
    total = round((disk or 0) * text_bytes / disk_bytes) if known else None
    return TextEstimate(len(sources), disk, total, texts)


def _no_text(
    names: Sequence[str], samples: Sequence[_SourceSample], options: ReadOptions
) -> DataError:
    """Why the sources have no text: the error of a file, or the most frequent reason."""
    if failure := next((sample.failure for sample in samples if sample.failure), None):
        return failure
    where, what = " ".join(names), "there is no text in it"
    reasons = Counter(reason for sample in samples for reason in sample.reasons)
    (reason, _), *_ = reasons.most_common(1) or [(Reason.EMPTY_TEXT, 0)]
    if reason is Reason.INVALID_UTF8:
        return DataError(f"{what}: it is not UTF-8", where=where, remedy="convert it first")
    if reason not in (Reason.MISSING_KEY, Reason.WRONG_TYPE):
        return DataError(what, where=where)
    keys = next((sample.keys for sample in samples if sample.keys), ())
    first_row = f"; the first row has {', '.join(keys)}" if keys else ""
    what += f" under the key {' or '.join(options.keys)}{first_row}"
    return DataError(what, where=where, remedy="name the key that holds the text: --json-key KEY")


def _spread(sources: Sequence[Source]) -> Iterator[Source]:
    """Sources far apart first, then those between them, up to `_MAX_FILES`."""
    step = max(1, len(sources) // _FILES)
    order = (source for first in range(step) for source in sources[first::step])
    return itertools.islice((source for source in order if source.size != 0), _MAX_FILES)


@dataclass
class _SourceSample:
    """Text of a source; without any, the reasons."""

    texts: list[str] = field(default_factory=list)
    text_bytes: int = 0
    disk_bytes: int = 0
    reasons: list[Reason] = field(default_factory=list)
    keys: Sequence[str] = ()
    """Keys of the first row, if its text may be under another key."""
    failure: DataError | None = None


def _sample(source: Source, options: ReadOptions, limit: int) -> _SourceSample:
    """About `limit` bytes of text from a source, with the bytes read from disk."""
    if is_plain_text(source) and source.path is not None:
        return _sample_plain(source, limit)
    sample = _SourceSample()
    try:
        for row in read_rows(source, replace(options, block_bytes=_BLOCK)):
            if sample.text_bytes >= limit and row.disk != sample.disk_bytes:
                break
            sample.disk_bytes = row.disk
            if isinstance(row.value, str):
                sample.text_bytes += len(row.value.encode())
                sample.texts.append(row.value)
            else:
                sample.reasons.append(row.value)
    except DataError as error:
        sample.failure = error
    if not sample.text_bytes and source.path is not None:
        sample.keys = _keys_of(source)
    return sample


def _sample_plain(source: Source, limit: int) -> _SourceSample:
    """The beginning of a plain text, which `prepare` would drop if it is not UTF-8."""
    try:
        with closing(source.open()) as stream:
            content = stream.read(limit)
            disk_bytes = len(content) if source.can_seek else stream.disk
            check_encoding(content)
    except (ReadError, *DAMAGE) as error:
        cause = error if isinstance(error, ReadError) else damaged(error)
        return _SourceSample(failure=DataError(cause.what, where=source.name, remedy=cause.remedy))
    try:
        # Incremental, since the sample may end within a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError:
        return _SourceSample(disk_bytes=disk_bytes, reasons=[Reason.INVALID_UTF8])
    if not text.strip():
        return _SourceSample(disk_bytes=disk_bytes, reasons=[Reason.EMPTY_TEXT])
    return _SourceSample([text], len(content), disk_bytes)


def _keys_of(source: Source) -> Sequence[str]:
    """The keys of the first row of JSON lines."""
    with suppress(OSError, ValueError, *DAMAGE), closing(source.open()) as stream:
        row = json.loads(stream.read(_BLOCK).partition(b"\n")[0])
        return tuple(row) if isinstance(row, dict) else ()
    return ()
