"""What a token set consists of, for somebody who wants to see it before training on it.

    all documents       lengths, sources, exact copies
    2,000 of them       spread evenly over the set: scripts, languages, repeated phrases, texts
    the ledger          what was dropped, and why

Languages are guessed from the script, and for Latin letters from the commonest words of a few
languages: enough to see that a corpus holds something that nobody meant to have.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import read_json
from gristmill.text.languages import language_of
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.tokens.format import LEDGER_FILE, TokenReader, file_of
from gristmill.tokens.origins import OriginIndex, open_origins, source_numbers
from gristmill.tokens.store import open_tokens

SAMPLE = 2000
"""Documents whose text is looked at."""
_SHOWN = 12
"""Documents whose text is shown."""
_MOST_TOKENS = 8192
"""Tokens of a document that are looked at."""
_EXCERPT = 1200
"""Characters of a text that is shown."""
_MOST_SOURCES = 40
_PHRASES = (1, 2, 3, 5)
"""Words of the phrases that are counted."""
_MOST_PHRASES = 20
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class _Text:
    """A document of the sample."""

    document: int
    tokens: int
    text: str


def token_statistics(
    prefix: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Everything about a set that its page shows, as JSON can hold it."""
    reader, folder = open_tokens(prefix), Path(f"{prefix}.tokenizer")
    if not folder.is_dir():
        raise UserError(
            "the tokenizer of this set is not beside it, so its text is not known",
            where=folder,
            remedy="put its tokenizer there: gristmill tokens convert --tokenizer does",
            exit=Exit.DATA,
        )
    tokenizer, origins = open_tokenizer(folder), open_origins(prefix)
    info, lengths = reader.info, np.diff(reader.document_starts, append=len(reader))
    sample = list(_sample(reader, tokenizer))
    return {
        "name": str(prefix),
        "tokens": info.tokens,
        "documents": info.documents,
        "text_bytes": info.text_bytes,
        "vocabulary": info.vocab_size,
        "format": f"{info.format}, {info.dtype}",
        "lengths": _lengths(lengths),
        "sources": None if origins is None else _sources(origins, lengths),
        "copies": _copies(reader, lengths, progress),
        "sampled": len(sample),
        "languages": _shares(map(language_of, (one.text for one in sample))),
        "phrases": {str(words): _phrases(sample, words) for words in _PHRASES},
        "texts": _shown(sample, origins),
        "dropped": _dropped(prefix),
    }


def _lengths(lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Documents and tokens in powers of two, and quantiles."""
    classes = np.frexp(lengths.astype(np.float64))[1] - 1
    documents = np.bincount(classes)
    tokens = np.bincount(classes, weights=lengths)
    quantiles = (0.01, 0.1, 0.5, 0.9, 0.99)
    return {
        "mean": float(lengths.mean()),
        "quantiles": [
            [q, int(v)] for q, v in zip(quantiles, np.quantile(lengths, quantiles), strict=True)
        ],
        "classes": [
            {"from": 2**power, "documents": int(documents[power]), "tokens": int(tokens[power])}
            for power in range(int(classes.min()), len(documents))
        ],
    }


def _sources(origins: OriginIndex, lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Documents and tokens of each source, those with most tokens first."""
    numbers = source_numbers(origins.between(0, origins.documents))
    count = len(origins.sources)
    documents = np.bincount(numbers, minlength=count)
    tokens = np.bincount(numbers, weights=lengths, minlength=count)
    order = np.argsort(-tokens, kind="stable")
    rows = [
        {"name": origins.sources[n], "documents": int(documents[n]), "tokens": int(tokens[n])}
        for n in order[:_MOST_SOURCES].tolist()
    ]
    rest = order[_MOST_SOURCES:]
    return {
        "count": count,
        "rows": rows,
        "others": {"documents": int(documents[rest].sum()), "tokens": int(tokens[rest].sum())},
    }


def _copies(
    reader: TokenReader,
    lengths: npt.NDArray[np.int64],
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """How many documents are exact copies of an earlier one."""
    hashes = np.empty(len(lengths), np.uint64)
    begin = 0
    for document, length in enumerate(lengths.tolist()):
        content = np.ascontiguousarray(reader.read(begin, length))
        digest = hashlib.blake2b(content.view(np.uint8).data, digest_size=8).digest()
        hashes[document] = int.from_bytes(digest, "little")
        begin += length
        if document % 1024 == 0:
            progress(begin, len(reader))
    progress(len(reader), len(reader))
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    again = np.ones(len(hashes), bool)
    again[first] = False
    most = np.argsort(-counts, kind="stable")[:5]
    return {
        "documents": int(again.sum()),
        "tokens": int(lengths[again].sum()),
        "most": [[int(first[n]), int(counts[n])] for n in most.tolist() if counts[n] > 1],
    }


# ------------------------------------------------------------------ a sample of texts


def _sample(reader: TokenReader, tokenizer: Tokenizer) -> Iterator[_Text]:
    """Documents spread evenly over the set."""
    starts, count = reader.document_starts, reader.info.documents
    for document in np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).astype(int)).tolist():
        begin = int(starts[document])
        end = int(starts[document + 1]) if document + 1 < count else len(reader)
        ids = reader.read(begin, min(end - begin, _MOST_TOKENS))
        text = tokenizer.decode(ids[ids != tokenizer.end_of_text].tolist())
        yield _Text(document, end - begin, text)


def _shares(values: Iterator[str]) -> list[list[Any]]:
    return [[value, count] for value, count in Counter(values).most_common()]


def _phrases(sample: Sequence[_Text], words: int) -> list[list[Any]]:
    """The commonest phrases of so many words: how often they stand, and in how many documents."""
    counts, documents = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for document in sample:
        document_words = _WORD.findall(document.text.lower())
        phrases = Counter(zip(*(document_words[place:] for place in range(words)), strict=False))
        counts.update(phrases)
        documents.update(phrases.keys())
    return [
        [" ".join(phrase), count, documents[phrase]]
        for phrase, count in counts.most_common(_MOST_PHRASES)
        if count > 1
    ]


def _shown(sample: Sequence[_Text], origins: OriginIndex | None) -> list[dict[str, Any]]:
    places = np.unique(np.linspace(0, len(sample) - 1, min(_SHOWN, len(sample))).astype(int))
    return [
        {
            "document": one.document,
            "origin": None if origins is None else str(origins.of(one.document)),
            "tokens": one.tokens,
            "text": one.text[:_EXCERPT] + ("…" if len(one.text) > _EXCERPT else ""),
        }
        for one in (sample[place] for place in places.tolist())
    ]


# ------------------------------------------------------------------ what was dropped


def _dropped(prefix: Path) -> dict[str, Any] | None:
    """What the ledger says; None without one."""
    path = file_of(prefix, LEDGER_FILE)
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        return {
            "lines": int(value["lines"]),
            "kept": int(value["kept"]),
            "reasons": [[str(why), int(count)] for why, count in value["dropped"].items()],
            "examples": [
                {
                    "origin": str(example["origin"]),
                    "reason": str(example["reason"]),
                    "text": str(example.get("text", "")),
                }
                for example in value["first_dropped"]
            ],
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the ledger is damaged: {error}", where=path) from error
