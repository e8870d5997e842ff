"""What token sets contain, so that later ones can leave it out.

    PREFIX.signatures
        header   one line of JSON: {"kind": …, "compared": settings, "content": that of the set,
                 "records": …, "columns": …, "sha256": of what follows}
        rows     8 bytes for each number, little-endian: a row for each record of the set, in order

Beside every set that is deduplicated stands what its documents were compared by. Of other sets, and
for other settings, the ids are turned back into text, which is then signed. The header names the
content of the set, so that signatures are not taken for those of a set that replaced it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import sha256_text, storage_errors, sync_file
from gristmill.text.dedup.drops import sign_column
from gristmill.text.dedup.signatures import SignatureSettings
from gristmill.text.dedup.sorting import Rows, read_rows, write_rows
from gristmill.text.prepare.workers import Workers
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.tokens.format import COPY_AGAIN, SIGNATURES_FILE, TokenReader, file_of
from gristmill.tokens.store import find_manifest, is_empty_part, open_tokens

_KIND = "gristmill signatures"
_TOKENS = 1 << 19
"""Tokens that are turned into text at a time."""
_ROWS = 1 << 16


@dataclass(frozen=True)
class StoredSignatures:
    """Rows of numbers in a file, after some bytes."""

    path: Path
    offset: int
    columns: int
    header: Mapping[str, Any]

    def rows(self, columns: Sequence[int]) -> Iterator[Rows]:
        """Some of the numbers of each record."""
        for rows in read_rows(self.path, columns=self.columns, most=_ROWS, offset=self.offset):
            yield rows[:, list(columns)]


def write_signatures(
    prefix: Path, settings: Mapping[str, Any], pieces: Iterable[Rows], *, columns: int
) -> None:
    """Write the records of a finished set beside it."""
    manifest = find_manifest(prefix)
    assert manifest is not None
    path = file_of(prefix, SIGNATURES_FILE)
    body = path.with_name(f".{path.name}.rows")
    write_rows(body, pieces)
    digest = hashlib.sha256()
    for rows in read_rows(body, columns=columns, most=_ROWS):
        digest.update(rows.tobytes())
    header = {
        "kind": _KIND,
        "compared": settings,
        "content": manifest.info.fingerprint,
        "records": body.stat().st_size // (8 * columns),
        "columns": columns,
        "sha256": digest.hexdigest(),
    }
    whole = path.with_name(f".{path.name}.part")
    with storage_errors(path):
        with whole.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            for rows in read_rows(body, columns=columns, most=_ROWS):
                file.write(rows.tobytes())
        sync_file(whole)
        whole.replace(path)
        body.unlink()


def remove_signatures(prefix: Path) -> None:
    """Remove the records of a set that is replaced."""
    file_of(prefix, SIGNATURES_FILE).unlink(missing_ok=True)


def read_signatures(prefix: Path) -> StoredSignatures | None:
    """The records of a set; None if there are none of it as it is now."""
    path, manifest = file_of(prefix, SIGNATURES_FILE), find_manifest(prefix)
    if manifest is None or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 16)
            header = json.loads(line)
            digest = hashlib.sha256()
            while piece := file.read(1 << 20):
                digest.update(piece)
        if header["kind"] != _KIND or header["sha256"] != digest.hexdigest():
            raise ValueError("its checksum differs")
        if header["content"] != manifest.info.fingerprint:
            return None
        return StoredSignatures(path, len(line), int(header["columns"]), header)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"the signatures of a token set are damaged: {error}"
        remedy = f"{COPY_AGAIN}, or remove this file: then its text is read again"
        raise DataError(what, where=path, remedy=remedy) from error


def merge_signatures(prefixes: Sequence[Path], output: Path) -> None:
    """Write the records of all sets beside the merged one, if each has some of the same kind."""
    remove_signatures(output)
    parts = [read_signatures(prefix) for prefix in prefixes]
    stored = [part for part in parts if part is not None]
    kinds = {json.dumps(part.header["compared"]) for part in stored}
    if len(stored) < len(prefixes) or len(kinds) != 1:
        return
    columns = stored[0].columns
    pieces = (rows for part in stored for rows in part.rows(range(columns)))
    write_signatures(output, stored[0].header["compared"], pieces, columns=columns)


@dataclass(frozen=True)
class OlderSets:
    """Token sets whose content is left out."""

    prefixes: Sequence[Path]
    settings: SignatureSettings
    folder: Path
    """Where to keep what was signed here."""
    workers: Workers | None
    progress: Callable[[Path, int, int], None] = lambda prefix, done, total: None
    """Is told how many tokens of a set are turned into text."""
    note: Callable[[str], None] = lambda message: None

    def sign(self) -> list[StoredSignatures]:
        """The records of all sets that have any."""
        return [self._of(prefix) for prefix in self.prefixes if not is_empty_part(prefix)]

    def _of(self, prefix: Path) -> StoredSignatures:
        stored, wanted = read_signatures(prefix), self.settings.as_json()
        if stored and stored.header["compared"] == wanted:
            return stored
        compared = stored.header["compared"] if stored else {}
        same = all(compared.get(name) == wanted[name] for name in ("version", "unit"))
        if stored and same and (self.settings.method, self.settings.unit) == ("exact", "document"):
            # Every kind of signature begins with the exact one.
            return stored
        return self._signed_here(prefix)

    def _signed_here(self, prefix: Path) -> StoredSignatures:
        reader = open_tokens(prefix)
        facts = [reader.info.fingerprint, self.settings.as_json()]
        path = self.folder / f"older-{sha256_text(json.dumps(facts))[:20]}.rows"
        if not path.exists():
            folder = file_of(prefix, ".tokenizer")
            if not folder.is_dir():
                raise UserError(
                    "this set has neither signatures nor a tokenizer to turn it into text",
                    where=prefix,
                    remedy="copy it with its tokenizer, and name that copy: gristmill tokens "
                    f"convert {prefix} -o NEW --tokenizer NAME",
                )
            if not open_tokenizer(folder).lossless:
                self.note(f"{prefix}: its tokenizer is not lossless, so texts may differ from it")
            self.note(f"{prefix}: reading its text, since no signatures of it fit")
            write_rows(path, self._decoded(prefix, reader))
        return StoredSignatures(path, 0, self.settings.columns, {})

    def _decoded(self, prefix: Path, reader: TokenReader) -> Iterator[Rows]:
        tasks = list(_document_ranges(reader))
        content = reader.info.fingerprint
        task = partial(_sign_range, prefix=str(prefix), content=content, settings=self.settings)
        results = self.workers.map(task, tasks) if self.workers else ((t, task(t)) for t in tasks)
        for number, (_, rows) in enumerate(results, 1):
            self.progress(prefix, number, len(tasks))
            yield rows


def _document_ranges(reader: TokenReader) -> Iterator[tuple[int, int]]:
    """Ranges of documents of about the same number of tokens."""
    starts, begin = reader.document_starts, 0
    while begin < len(starts):
        end = int(np.searchsorted(starts, int(starts[begin]) + _TOKENS))
        end = max(end, begin + 1)
        yield begin, end
        begin = end


@lru_cache(maxsize=1)
def _opened(prefix: str, content: str) -> tuple[TokenReader, Tokenizer]:
    """A set with such content."""
    return open_tokens(prefix), open_tokenizer(Path(f"{prefix}.tokenizer"))


def _sign_range(
    documents: tuple[int, int], *, prefix: str, content: str, settings: SignatureSettings
) -> Rows:
    """The records of some documents of a set."""
    reader, tokenizer = _opened(prefix, content)
    low, high = documents
    starts, end_of_text = reader.document_starts, reader.info.end_of_text
    texts = []
    for number in range(low, high):
        end = int(starts[number + 1]) if number + 1 < len(starts) else len(reader)
        ids = reader.read(int(starts[number]), end - int(starts[number])).tolist()
        if ids[-1] == end_of_text:
            ids.pop()
        texts.append(tokenizer.decode(ids))
    return sign_column(texts, [0] * len(texts), settings).signatures
