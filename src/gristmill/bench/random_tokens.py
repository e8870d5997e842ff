"""Random token ids, to measure speed where there is no text.

    PREFIX.bin, PREFIX.json     documents of random ids
    PREFIX.tokenizer/           a tokenizer with that many made-up words

It is an ordinary token set, read by the ordinary loader: a step's time does not depend on its ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models

from gristmill.base.errors import UserError
from gristmill.base.files import storage_errors
from gristmill.text.tokenizers.library import TOKENIZER_FILE
from gristmill.text.tokenizers.tokenizer import END_OF_TEXT, open_tokenizer
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens

GPT2_VOCABULARY = 50257
DOCUMENT = 1000
"""Tokens in one document."""


def write_random_tokens(prefix: Path, *, vocabulary: int, tokens: int = 2_000_000) -> Path:
    """Write a token set of random ids below `vocabulary`, with its tokenizer; returns `prefix`."""
    if vocabulary < 2:
        what = f"random tokens need two ids or more, a word and the end of a text, not {vocabulary}"
        raise UserError(what, where="model.vocab", remedy="raise it, or leave it out")
    folder = Path(f"{prefix}.tokenizer")
    with storage_errors(folder):
        folder.mkdir(parents=True)
        words = {f"word{number}": number for number in range(vocabulary - 1)}
        words[END_OF_TEXT] = vocabulary - 1
        made_up = tokenizers.Tokenizer(models.WordLevel(words, unk_token="word0"))
        made_up.save(str(folder / TOKENIZER_FILE))
    tokenizer = open_tokenizer(folder)
    end = tokenizer.end_of_text
    writer = create_tokens(
        NewSet(prefix, vocab_size=tokenizer.size, end_of_text=end, tokenizer=tokenizer.spec)
    )
    ids = np.random.default_rng(0).integers(0, end, tokens)
    ids[DOCUMENT - 1 :: DOCUMENT] = end
    writer.append(ids, starts=np.arange(0, tokens, DOCUMENT))
    writer.finish()
    return prefix
