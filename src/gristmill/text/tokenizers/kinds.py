"""The choices for a tokenizer that is to be learnt, apart from the libraries that learn it."""

from __future__ import annotations

import enum


class TokenizerKind(enum.Enum):
    """The kinds of tokenizers that can be learnt."""

    BPE = "bpe"
    WORDPIECE = "wordpiece"
    UNIGRAM = "unigram"


class WordPattern(enum.Enum):
    """How text is cut into words before any token is learnt."""

    GPT2 = "gpt2"
    GPT4 = "gpt4"
    GPT4O = "gpt4o"
