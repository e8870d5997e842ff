"""Tokenizers: text to ids and back, without loss.

    "bytes"                                 the 256 bytes and an end-of-text token
    tokenizer.json, or its folder           a byte-level BPE of the `tokenizers` library
    a folder with vocab.json, merges.txt    the same as GPT-2's files
    a folder with encoder.json, vocab.bpe   the same by OpenAI's names

A byte-level BPE writes each of the 256 bytes as one printable character (`BYTE_OF`), cuts the text
into words by GPT-2's pattern and merges pairs of neighbours in the order they were learnt. With all
256 bytes in the vocabulary no text is out of reach, and decode(encode(x)) == x; a tokenizer without
them is refused, and so are those that are not byte-level, which lose spaces or rare letters.

Text that looks like a control token ("<|endoftext|>" in a web page) is encoded as plain text: only
the program ends a document. The fingerprint covers what decides ids and leaves out what does not,
so the same tokenizer from other files has the same one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, sha256_text, storage_errors, write_atomic, write_json

END_OF_TEXT = "<|endoftext|>"
BYTES_FILE = "gristmill_tokenizer.json"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (BYTES_FILE, TOKENIZER_FILE, CONFIG_FILE)
"""Every file that a tokenizer's `save` may write."""
_GPT2_PAIRS = (
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("gpt2-vocab.json", "gpt2-merges.txt"),
    ("gpt2_vocab.json", "gpt2_merges.txt"),
)
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_MIN_COUNT = 2


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def size(self) -> int:
        """Ids go from 0 to size - 1."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id of the control token that ends a document."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides which ids a text gets."""
        ...

    @property
    def spec(self) -> dict[str, Any]:
        """Type, size, end-of-text id and fingerprint, for a manifest."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text; none of them is a control token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on all cores where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one id stands for; none for a control token."""
        ...

    def save(self, folder: Path) -> None:
        """Write files from which `open_tokenizer(folder)` gives the same tokenizer."""
        ...


def _byte_characters() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte, with that byte.

    Visible Latin-1 characters stand for themselves, all other bytes for the characters from U+0100.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    itself = {chr(byte): byte for byte in visible}
    return itself | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a text."""

    size = 257
    end_of_text = 256
    fingerprint = sha256_text("gristmill bytes, end of text 256")

    @property
    def spec(self) -> dict[str, Any]:
        return _spec(self, type="bytes")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        content = b"".join(
            END_OF_TEXT.encode() if id == self.end_of_text else self.token_bytes(id) for id in ids
        )
        return content.decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        assert 0 <= id < self.size, f"the id {id} is outside the vocabulary"
        return bytes([id]) if id < 256 else b""

    def save(self, folder: Path) -> None:
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / BYTES_FILE, self.spec)


class BpeTokenizer:
    """A byte-level BPE of the `tokenizers` library."""

    def __init__(self, inner: tokenizers.Tokenizer, *, end_of_text: str) -> None:
        # A file may carry settings of its last use that would cut, pad or vary what is encoded.
        inner.no_truncation()
        inner.no_padding()
        inner.model.dropout = None
        # GPT-2's own files hold the end-of-text token as a word like any other.
        inner.add_special_tokens(
            [tokenizers.AddedToken(end_of_text, special=True, normalized=False)]
        )
        inner.encode_special_tokens = True
        self._inner = inner
        self._end_text = end_of_text
        self._end = inner.get_vocab(with_added_tokens=True)[end_of_text]
        self._bytes = _token_table(inner)
        self._fingerprint = sha256_text(_deciding(json.loads(inner.to_str())))

    @property
    def size(self) -> int:
        return len(self._bytes)

    @property
    def end_of_text(self) -> int:
        return self._end

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def spec(self) -> dict[str, Any]:
        return _spec(self, type="byte-level-bpe")

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, id: int) -> bytes:
        assert 0 <= id < self.size, f"the id {id} is outside the vocabulary"
        return self._bytes[id]

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its settings, which `transformers` reads too."""
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._end_text,
            "eos_token": self._end_text,
            "unk_token": self._end_text,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / CONFIG_FILE, settings)
        write_atomic(folder / TOKENIZER_FILE, self._inner.to_str(pretty=True))


def open_tokenizer(spec: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
    """Open "bytes", a tokenizer.json, or a folder with tokenizer files.

    `end_of_text` names the token that ends a document, where it cannot be found out.
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_file():
        return _open_file(path, end_of_text=end_of_text)
    if not path.is_dir():
        raise UserError(
            "there is no such tokenizer",
            where=str(spec),
            remedy='give "bytes", a tokenizer.json, or a folder that holds tokenizer files',
            exit=Exit.DATA,
        )
    if (path / BYTES_FILE).is_file():
        return _open_bytes(path / BYTES_FILE)
    if (path / TOKENIZER_FILE).is_file():
        return _open_file(path / TOKENIZER_FILE, end_of_text=end_of_text)
    for vocab, merges in _GPT2_PAIRS:
        if (path / vocab).is_file() and (path / merges).is_file():
            return _open_gpt2(path / vocab, merges=path / merges, end_of_text=end_of_text)
    names = [TOKENIZER_FILE, *(" with ".join(pair) for pair in _GPT2_PAIRS[:2])]
    raise UserError(
        f"this folder holds no tokenizer: looked for {', '.join(names)}",
        where=str(path),
        exit=Exit.DATA,
    )


def train_tokenizer(
    texts: Iterator[str], *, vocab_size: int, progress: Callable[[int], None] | None = None
) -> Tokenizer:
    """Learn a byte-level BPE; the 256 bytes come first, end-of-text last, as in GPT-2.

    `progress` is called with the bytes of text read so far. Pairs seen only once are not merged.
    """
    if vocab_size < 257:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small",
            remedy="ask for 257 or more: the 256 bytes and the end-of-text token",
        )
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=_MIN_COUNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_watched(texts, progress), trainer=trainer)
    reached = inner.get_vocab_size() + 1
    if reached < vocab_size:
        raise UserError(
            f"the text is too short to learn {vocab_size} tokens: it gives {reached}",
            remedy=f"ask for at most {reached} tokens, or give more text",
            exit=Exit.DATA,
        )
    return BpeTokenizer(inner, end_of_text=END_OF_TEXT)


def _spec(tokenizer: Tokenizer, *, type: str) -> dict[str, Any]:
    return {
        "type": type,
        "size": tokenizer.size,
        "end_of_text": tokenizer.end_of_text,
        "fingerprint": tokenizer.fingerprint,
    }


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _open_bytes(path: Path) -> Tokenizer:
    tokenizer = ByteTokenizer()
    if read_json(path) != tokenizer.spec:
        raise UserError(
            "this describes a tokenizer that the program does not know",
            where=str(path),
            exit=Exit.DATA,
        )
    return tokenizer


def _open_file(path: Path, *, end_of_text: str | None) -> Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"this is not a tokenizer.json: {error}",
            where=str(path),
            remedy="for GPT-2's two files, give the folder that holds them",
            exit=Exit.DATA,
        ) from error
    value = json.loads(inner.to_str())
    works_on_bytes = all(
        '"ByteLevel"' in json.dumps(value[p]) for p in ("pre_tokenizer", "decoder")
    )
    if value["model"]["type"] != "BPE" or not works_on_bytes:
        raise UserError(
            "this tokenizer does not work on bytes, so it cannot give every text back",
            where=str(path),
            remedy="use a byte-level BPE, such as the tokenizers of GPT-2, Llama 3 or Qwen",
            exit=Exit.DATA,
        )
    settings = path.with_name(CONFIG_FILE)
    stated = read_json(settings).get("eos_token") if settings.is_file() else None
    # The file may hold the token with its flags instead of its text alone.
    stated = stated.get("content") if isinstance(stated, dict) else stated
    return _checked(inner, where=path, ends=(end_of_text,) if end_of_text else (stated, *_ENDS))


def _open_gpt2(vocab: Path, *, merges: Path, end_of_text: str | None) -> Tokenizer:
    read_json(vocab)
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"this vocabulary and {merges.name} do not make a tokenizer: {error}",
            where=str(vocab),
            exit=Exit.DATA,
        ) from error
    ends = (end_of_text,) if end_of_text else _ENDS
    return _checked(_byte_level(model), where=vocab, ends=ends)


def _checked(
    inner: tokenizers.Tokenizer, *, where: Path, ends: Sequence[str | None]
) -> BpeTokenizer:
    """The tokenizer, if it can write every byte and end a document."""
    missing = sum(inner.token_to_id(character) is None for character in BYTE_OF)
    if missing:
        raise UserError(
            f"the vocabulary lacks {missing} of the 256 bytes, so it cannot give every text back",
            where=str(where),
            exit=Exit.DATA,
        )
    for end in ends:
        if end and inner.token_to_id(end) is not None:
            return BpeTokenizer(inner, end_of_text=end)
    added = inner.get_added_tokens_decoder().values()
    special = ", ".join(token.content for token in added if token.special) or "none"
    sought = ", ".join(end for end in ends if end)
    raise UserError(
        f"no end-of-text token: looked for {sought}; the special tokens are: {special}",
        where=str(where),
        remedy="name the token that ends a document",
        exit=Exit.DATA,
    )


def _token_table(inner: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id; control tokens and ids that nothing uses have none."""
    vocabulary = inner.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    added = inner.get_added_tokens_decoder()
    for token, id in vocabulary.items():
        if id not in added:
            # A token with other characters is one that no text can produce.
            table[id] = bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
        elif not added[id].special:
            table[id] = token.encode()
    return table


def _deciding(value: dict[str, Any]) -> str:
    """The parts of a tokenizer.json that decide ids, in one order, whatever version wrote them."""
    model = value["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    parts = {
        "vocab": model["vocab"],
        "merges": merges,
        "ignore_merges": model.get("ignore_merges", False),
        "normalizer": value["normalizer"],
        "pre_tokenizer": _without_offsets(value["pre_tokenizer"]),
        "added_tokens": [
            [token["id"], token["content"]] if token["special"] else token
            for token in value["added_tokens"]
        ],
    }
    return json.dumps(parts, sort_keys=True)


def _without_offsets(value: Any) -> Any:
    """Drop what only moves the offsets that a tokenizer reports."""
    if isinstance(value, dict):
        return {key: _without_offsets(v) for key, v in value.items() if key != "trim_offsets"}
    return [_without_offsets(item) for item in value] if isinstance(value, list) else value


def _watched(texts: Iterator[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    done = 0
    for text in texts:
        done += len(text.encode())
        if progress:
            progress(done)
        yield text
