"""What all tokenizers of the `tokenizers` library have in common.

Text that looks like a control token is encoded as text, nothing is added around it, and the token
that ends a document is a control token even if the files define it as an ordinary one.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from gristmill.base.files import storage_errors, write_atomic, write_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
BYTES_FILE = "gristmill_tokenizer.json"


class LibraryTokenizer(abc.ABC):
    """A tokenizer of the library; each kind has its own fingerprint and bytes of tokens."""

    kind: str
    fingerprint: str
    lossless: bool

    def __init__(self, inner: tokenizers.Tokenizer, *, end_of_text: str) -> None:
        # These are left from the last use, and would truncate, pad or vary what is encoded.
        inner.no_truncation()
        inner.no_padding()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None
        # Some files hold the end-of-text token as an ordinary one.
        inner.add_special_tokens(
            [tokenizers.AddedToken(end_of_text, special=True, normalized=False)]
        )
        inner.encode_special_tokens = True
        ids = inner.get_vocab(with_added_tokens=True)
        self.size = max(ids.values()) + 1
        self.end_of_text = ids[end_of_text]
        self._inner = inner
        self._text = ""
        """The text of the tokenizer.json, if `_inner` no longer gives it."""
        self._end_text = end_of_text

    @property
    def definition(self) -> str | None:
        return None

    @property
    def spec(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "size": self.size,
            "end_of_text": self.end_of_text,
            "fingerprint": self.fingerprint,
        }

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, id: int) -> bytes:
        assert 0 <= id < self.size, f"the id {id} is outside the vocabulary"
        return self._table[id]

    @cached_property
    @abc.abstractmethod
    def _table(self) -> list[bytes]:
        """The bytes that every id stands for."""

    @property
    def _named(self) -> dict[str, str]:
        """The control tokens by the names that `transformers` gives them."""
        return {"eos_token": self._end_text}

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its settings, which `transformers` reads too."""
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._named,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / CONFIG_FILE, settings)
        write_atomic(folder / TOKENIZER_FILE, self._text or self._inner.to_str(pretty=True))
