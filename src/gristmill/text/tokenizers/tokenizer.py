"""Tokenizers: text to ids and back.

    "bytes"                                 the 256 bytes and an end-of-text token
    "gpt2"                                  GPT-2's, from this machine or the network
    "cl100k_base", "tiktoken:cl100k_base"   an encoding of tiktoken
    tokenizer.json, or its folder           a tokenizer of the `tokenizers` library
    a folder with vocab.json, merges.txt    the same as GPT-2's files
    a folder with encoder.json, vocab.bpe   the same by OpenAI's names
    "google-t5/t5-small"                    a tokenizer on Hugging Face
    "google-t5/t5-small@REVISION"           the same at a branch, a tag or a commit

A file, or a folder that holds a tokenizer, takes precedence over a name. Text that looks like a
control token ("<|endoftext|>" in a web page) is encoded as plain text: only the program ends a
document. The fingerprint covers exactly what decides ids, so the same tokenizer from other files
has the same fingerprint.

In the layout of Hugging Face, four files may state the end-of-text token, read in this order:
tokenizer_config.json and special_tokens_map.json name it, generation_config.json and config.json
give its id. A tokenizer.json is read as it is; spiece.model, tokenizer.model and vocab.txt are read
through transformers. Code in a repository is never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import tokenizers
from tokenizers import models

from gristmill.base.errors import DataError, optional
from gristmill.base.files import read_json, sha256_text, storage_errors, write_json
from gristmill.hub.client import first_line, quiet_library
from gristmill.text.tokenizers import library, vocabularies
from gristmill.text.tokenizers.library import BYTE_OF, byte_level, works_on_bytes
from gristmill.text.tokenizers.tokenizer_json import library_errors, read_definition
from gristmill.text.tokenizers.vocabularies import (
    ENCODINGS,
    Vocabulary,
    gpt2_vocabulary,
    open_encoding,
    read_vocabulary,
)

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILES = (library.BYTES_FILE, library.TOKENIZER_FILE, library.CONFIG_FILE)
"""Every file that a tokenizer's `save` may write."""
_TIKTOKEN = "tiktoken:"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Text to ids and back."""

    size: int
    """Ids go from 0 to size - 1."""
    end_of_text: int
    """The id of the control token that ends a document."""
    fingerprint: str
    """SHA-256 over all that decides which ids a text gets."""
    lossless: bool
    """Whether decode(encode(text)) is the text, for every text."""
    prefix: tuple[int, ...]
    """Control tokens that the tokenizer's files put before every text, such as Llama's <s>; the
    caller adds them where they are wanted."""

    @property
    def definition(self) -> str | None:
        """The tokenizer.json, without control tokens, of a byte-level BPE in which GPT-2's pattern
        and the merges alone decide ids; None for other tokenizers."""
        ...

    @property
    def spec(self) -> dict[str, Any]:
        """Type, size, end-of-text id and fingerprint, for a manifest."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The ids of all control tokens by their text, which `encode` never gives."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The control tokens by the names that `transformers` gives them, such as eos_token."""
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


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a text."""

    size = 257
    end_of_text = 256
    fingerprint = sha256_text("gristmill bytes, end of text 256")
    spec: ClassVar[dict[str, Any]] = {
        "type": "bytes", "size": 257, "end_of_text": 256, "fingerprint": fingerprint,
    }  # fmt: skip
    lossless = True
    prefix: tuple[int, ...] = ()
    definition = None
    control_tokens: ClassVar[Mapping[str, int]] = {END_OF_TEXT: end_of_text}
    named_tokens: ClassVar[Mapping[str, str]] = {"eos_token": END_OF_TEXT}

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
        write_json(folder / library.BYTES_FILE, self.spec)


def open_tokenizer(
    spec: str | Path, *, merges: str | None = None, end_of_text: str | None = None
) -> Tokenizer:
    """Open a tokenizer by one of the names above, or from its file or folder.

    With `merges`, both are the two files of a BPE. `end_of_text` names the token that ends a
    document, if the files do not state it.
    """
    name, path = str(spec), Path(spec)
    if merges is not None:
        return open_tokenizer_files(path, Path(merges), end_of_text=end_of_text)
    encoding = name.removeprefix(_TIKTOKEN)
    if name == "bytes":
        return ByteTokenizer()
    if path.is_file():
        return _open_file(path, end_of_text=end_of_text)
    if path.is_dir() and vocabularies.holds_tokenizer(path):
        return _open_folder(path, end_of_text=end_of_text)
    if encoding == "gpt2":
        return _from_vocabulary(gpt2_vocabulary(), where=name, end_of_text=end_of_text)
    if encoding in ENCODINGS:
        return _finished(open_encoding(encoding), where=name, end_of_text=end_of_text)
    if path.is_dir() or name.startswith(_TIKTOKEN) or not vocabularies.is_hub_name(name):
        raise _no_tokenizer(name)
    return _open_folder(vocabularies.tokenizer_folder(name), end_of_text=end_of_text)


def open_tokenizer_files(vocab: Path, merges: Path, *, end_of_text: str | None = None) -> Tokenizer:
    """Open GPT-2's two files, whatever their names."""
    vocabulary = read_vocabulary(vocab, merges=merges)
    return _from_vocabulary(vocabulary, where=str(vocab), end_of_text=end_of_text)


def _no_tokenizer(name: str) -> DataError:
    if Path(name).is_dir():
        pairs = [" with ".join(pair) for pair in vocabularies.PAIRS[:2]]
        names = ", ".join([library.TOKENIZER_FILE, *pairs, *vocabularies.SLOW_FILES])
        what = f"this folder holds no tokenizer: looked for {names}"
        return DataError(what, where=name)
    return DataError(
        "there is no such tokenizer",
        where=name,
        remedy=f'give "bytes", "gpt2", {", ".join(ENCODINGS)}, a tokenizer.json, '
        "a folder with tokenizer files, or a Hugging Face name",
    )


def _open_folder(folder: Path, *, end_of_text: str | None) -> Tokenizer:
    if (file := folder / library.BYTES_FILE).is_file():
        tokenizer = ByteTokenizer()
        if read_json(file) == tokenizer.spec:
            return tokenizer
        raise DataError("this program does not know the tokenizer described here", where=file)
    if (folder / library.TOKENIZER_FILE).is_file():
        return _open_file(folder / library.TOKENIZER_FILE, end_of_text=end_of_text)
    if pair := vocabularies.find_pair(folder):
        return open_tokenizer_files(*pair, end_of_text=end_of_text)
    if not vocabularies.holds_tokenizer(folder):
        raise _no_tokenizer(str(folder))
    return _finished(_convert(folder), where=str(folder), end_of_text=end_of_text, folder=folder)


def _open_file(path: Path, *, end_of_text: str | None) -> Tokenizer:
    content = read_definition(path)
    remedy = (
        "for the two files of a BPE, give the folder that holds them, or in a run file the "
        "vocabulary as data.tokenizer and the merges as data.merges"
    )
    with library_errors(path, "this is not a tokenizer.json", remedy=remedy):
        inner = tokenizers.Tokenizer.from_buffer(content)
    return _finished(inner, where=str(path), end_of_text=end_of_text, folder=path.parent)


def _from_vocabulary(vocabulary: Vocabulary, *, where: str, end_of_text: str | None) -> Tokenizer:
    if missing := len(BYTE_OF.keys() - vocabulary.ids.keys()):
        what = f"the vocabulary lacks {missing} of the 256 bytes, so it is not a byte-level BPE"
        raise DataError(what, where=where)
    inner = byte_level(models.BPE(dict(vocabulary.ids), list(vocabulary.merges)))
    return _finished(inner, where=where, end_of_text=end_of_text)


def _finished(
    inner: tokenizers.Tokenizer, *, where: str, end_of_text: str | None, folder: Path | None = None
) -> Tokenizer:
    """The tokenizer with its end-of-text token: the given, the one stated in the folder, or a
    common one."""
    stated = _stated_ends(folder, inner) if folder else ()
    ends = [end_of_text] if end_of_text else [*stated, *_ENDS]
    for end in ends:
        if inner.token_to_id(end) is not None:
            is_bpe = isinstance(inner.model, models.BPE) and works_on_bytes(inner)
            kind = library.BpeTokenizer if is_bpe else library.SubwordTokenizer
            begin = _stated_begin(folder, inner) if folder else None
            with library_errors(where, "this tokenizer cannot be used"):
                return kind(inner, end_of_text=end, begin_of_text=begin)
    added = inner.get_added_tokens_decoder().values()
    special = ", ".join(token.content for token in added if token.special) or "none"
    raise DataError(
        f"no end-of-text token: looked for {', '.join(dict.fromkeys(ends))}; "
        f"the special tokens are: {special}",
        where=where,
        remedy="name the token that ends a document (--end-of-text)",
    )


# ------------------------------------------------------------------ layouts of Hugging Face


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """A folder without tokenizer.json as a tokenizer of the library, by way of `transformers`."""
    transformers = optional(
        "transformers", extra="hf", purpose=f"reading a tokenizer without {library.TOKENIZER_FILE}"
    )
    quiet_library("transformers")
    try:
        opened = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        inner: tokenizers.Tokenizer = opened.backend_tokenizer
    except Exception as error:  # the library raises nothing more precise
        raise DataError(
            f"transformers cannot convert this tokenizer: {first_line(error)}",
            where=folder,
            remedy="it may need the packages sentencepiece and protobuf; or use a model "
            f"that comes with {library.TOKENIZER_FILE}",
        ) from error
    return inner


def _stated_ends(folder: Path, inner: tokenizers.Tokenizer) -> Iterator[str]:
    """The tokens that the files in a folder say end a text."""
    yield from _stated_names(folder, "eos_token")
    for name in vocabularies.NUMBERING:
        for end in _values(folder / name, "eos_token_id"):
            token = inner.id_to_token(end) if type(end) is int and end >= 0 else None
            if token is not None:
                yield token


def _stated_begin(folder: Path, inner: tokenizers.Tokenizer) -> str | None:
    """The control token that the files in a folder say begins a text, if it is one."""
    added = inner.get_added_tokens_decoder().values()
    control = {token.content for token in added if token.special}
    return next((text for text in _stated_names(folder, "bos_token") if text in control), None)


def _stated_names(folder: Path, key: str) -> Iterator[str]:
    for name in vocabularies.NAMING:
        for token in _values(folder / name, key):
            # The file may hold the token with its flags instead of its text alone.
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                yield text


def _values(path: Path, key: str) -> list[Any]:
    content = read_json(path) if path.is_file() else {}
    value = content.get(key) if isinstance(content, dict) else None
    return value if isinstance(value, list) else [value]
