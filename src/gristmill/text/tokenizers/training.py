"""Training a tokenizer on text; every kind works on bytes and is lossless, except for characters.

    bpe         repeatedly merges the most frequent adjacent pair
    wordpiece   trains as BPE does, and splits a word into the longest tokens from its beginning
    unigram     starts with many pieces and drops those that matter least for the likelihood

    characters  has an id for each character of the text, and learns nothing

A pattern splits text into words first: GPT-2's, or a later one. The 256 bytes are always in the
vocabulary, and the end-of-text token has the last id.

BERT's WordPiece marks pieces inside a word with "##" and fails on long words. Here there is no
mark, since a space belongs to the word after it, and words are split at 100 bytes. BPE and
WordPiece give the same tokenizer for the same text. The library's Unigram sums in an order that
changes from run to run: scores are rounded and sorted, so that only equally likely pieces at the
edge of the vocabulary can differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gristmill.base.errors import DataError, UserError
from gristmill.text.tokenizers.kinds import TokenizerKind, WordPattern
from gristmill.text.tokenizers.library import (
    BYTE_OF,
    LONGEST_WORD,
    SHORT_WORDS,
    BpeTokenizer,
    SubwordTokenizer,
    byte_level,
)
from gristmill.text.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from gristmill.text.tokenizers.vocabularies import CL100K_PATTERN, O200K_PATTERN

_UNKNOWN = "<|unknown|>"
_MIN_COUNT = 2
_SCORE_DIGITS = 6
_UNSEEN_STEP = 1e-4
"""The library sets the scores of bytes that the text lacks this far apart."""
_PATTERNS: Mapping[WordPattern, str | None] = {
    WordPattern.GPT2: None,
    WordPattern.GPT4: CL100K_PATTERN,
    WordPattern.GPT4O: O200K_PATTERN,
}


def train_tokenizer(
    texts: Iterator[str],
    *,
    vocab_size: int,
    kind: TokenizerKind = TokenizerKind.BPE,
    pattern: WordPattern = WordPattern.GPT2,
    min_count: int | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tokenizer:
    """Train a tokenizer of `vocab_size` ids, the last of them end-of-text.

    `min_count` is how often a pair must occur to be merged, 2 if not given. Reading stops after
    `limit` bytes of text. `progress` is called with the bytes of text read so far.
    """
    if vocab_size < 257:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small",
            remedy="ask for 257 or more: the 256 bytes and the end-of-text token",
        )
    if min_count is not None and kind is TokenizerKind.UNIGRAM:
        raise UserError(
            "a smallest count has no meaning for unigram, which drops pieces by their likelihood",
            remedy="leave it out, or train a bpe or wordpiece",
        )
    model, trainer = _model_and_trainer(
        kind, vocab_size=vocab_size - 1, min_count=min_count or _MIN_COUNT
    )
    inner = byte_level(model, pattern=_PATTERNS[pattern])
    if kind is TokenizerKind.WORDPIECE:
        inner.pre_tokenizer = pre_tokenizers.Sequence([inner.pre_tokenizer, SHORT_WORDS])
    inner.train_from_iterator(_counted(texts, limit, progress), trainer=trainer)
    reached = inner.get_vocab_size() + 1
    if reached < vocab_size:
        raise DataError(
            f"the text is too short for {vocab_size} tokens: it gives {reached}",
            remedy=f"ask for at most {reached} tokens, or give more text",
        )
    if kind is TokenizerKind.BPE:
        return BpeTokenizer(inner, end_of_text=END_OF_TEXT)
    ordered = _ordered(inner) if kind is TokenizerKind.UNIGRAM else inner
    return SubwordTokenizer(ordered, end_of_text=END_OF_TEXT)


def character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of the characters that occur in some texts, in the order of their code points.

    Behind their ids come one for characters that do not occur, and end-of-text.
    """
    characters = sorted(set[str]().union(*texts))
    if not characters:
        raise DataError("the text has no characters to make a tokenizer of")
    ids = {character: id for id, character in enumerate([*characters, _UNKNOWN])}
    inner = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return SubwordTokenizer(inner, end_of_text=END_OF_TEXT)


def _model_and_trainer(
    kind: TokenizerKind, *, vocab_size: int, min_count: int
) -> tuple[models.Model, trainers.Trainer]:
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "show_progress": False,
    }
    match kind:
        case TokenizerKind.BPE:
            return models.BPE(), trainers.BpeTrainer(min_frequency=min_count, **common)
        case TokenizerKind.UNIGRAM:
            return models.Unigram(), trainers.UnigramTrainer(**common)
        case TokenizerKind.WORDPIECE:
            prefix: dict[str, Any] = {"continuing_subword_prefix": ""}
            model = models.WordPiece(max_input_chars_per_word=LONGEST_WORD, **prefix)
            return model, trainers.WordPieceTrainer(min_frequency=min_count, **prefix, **common)


def _ordered(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A Unigram with its scores rounded and its tokens in one order, the likeliest first."""
    value = json.loads(inner.to_str())
    scores = {token: round(score, _SCORE_DIGITS) for token, score in value["model"]["vocab"]}
    # Bytes that the text lacks get scores a step apart, in no order. They all get the lowest.
    lowest = min(scores.values())
    for token in BYTE_OF:
        if scores[token] <= lowest + _UNSEEN_STEP * len(BYTE_OF):
            scores[token] = lowest
    value["model"]["vocab"] = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
    return tokenizers.Tokenizer.from_str(json.dumps(value))


def _counted(
    texts: Iterator[str], limit: int | None, progress: Callable[[int], None] | None
) -> Iterator[str]:
    done = 0
    for text in texts:
        if limit is not None and done >= limit:
            return
        done += len(text.encode())
        if progress:
            progress(done)
        yield text
