"""Open, create, inspect and verify token sets without knowing their format.

A format is one module with a reader and a writer, and one row of `FORMATS`. Reading finds the row
by the manifest's "format". Inspection and verification go through the reader in pieces of a few
MiB, so they need little memory however large the set is; only the document starts are taken whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import sha256_file
from gristmill.tokens import flat
from gristmill.tokens.format import (
    Manifest,
    TokenReader,
    TokenSetInfo,
    TokenWriter,
    file_of,
    is_manifest,
    read_manifest,
    size_problems,
)

_PIECE = 1 << 21
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_AGAIN = "copy the set again from where it came, or prepare it again"


class _Create(Protocol):
    def __call__(
        self,
        prefix: Path,
        /,
        *,
        vocab_size: int,
        end_of_text: int | None,
        tokenizer: Mapping[str, Any],
        overwrite: bool,
    ) -> TokenWriter: ...


@dataclass(frozen=True)
class Format:
    """How sets of one format are read and written."""

    read: Callable[[Path, Manifest], TokenReader]
    write: _Create


FORMATS: Mapping[str, Format] = {
    flat.FORMAT: Format(read=flat.FlatReader, write=flat.FlatWriter),
}


@dataclass(frozen=True)
class LengthBin:
    """How many documents have at least `low` and fewer than `high` tokens."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class TokenSetSummary:
    """What a person wants to know about a token set."""

    info: TokenSetInfo
    tokenizer: Mapping[str, Any]
    smallest_id: int
    largest_id: int
    mean_length: float
    length_quantiles: Mapping[float, int]
    """Tokens per document at the quantiles 0, 0.05, 0.25, 0.5, 0.75, 0.95 and 1."""
    length_histogram: tuple[LengthBin, ...]
    """Documents by length, in powers of two from the shortest to the longest."""


def open_tokens(prefix: Path | str) -> TokenReader:
    """Open a finished token set."""
    path = Path(prefix)
    manifest = _find_manifest(path)
    return _format(manifest.info.format, where=path).read(path, manifest)


def create_tokens(
    prefix: Path | str,
    *,
    vocab_size: int,
    end_of_text: int | None,
    tokenizer: Mapping[str, Any],
    format: str = flat.FORMAT,
    overwrite: bool = False,
) -> TokenWriter:
    """Begin a token set; `tokenizer` is a spec whose "fingerprint" names the tokenizer."""
    path = Path(prefix)
    _check_place(path)
    return _format(format, where=path).write(
        path,
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        tokenizer=tokenizer,
        overwrite=overwrite,
    )


def inspect_tokens(prefix: Path | str) -> TokenSetSummary:
    """Count and measure a token set; reads every token once."""
    path = Path(prefix)
    manifest = _find_manifest(path)
    reader = _format(manifest.info.format, where=path).read(path, manifest)
    extremes = [(int(ids.min()), int(ids.max())) for _, ids in _pieces(reader)]
    lengths = np.diff(reader.document_starts, append=len(reader))
    quantiles = np.quantile(lengths, _QUANTILES, method="lower")
    return TokenSetSummary(
        info=reader.info,
        tokenizer=manifest.tokenizer,
        smallest_id=min(low for low, _ in extremes),
        largest_id=max(high for _, high in extremes),
        mean_length=len(reader) / len(lengths),
        length_quantiles={q: int(v) for q, v in zip(_QUANTILES, quantiles, strict=True)},
        length_histogram=_histogram(lengths),
    )


def verify_tokens(prefix: Path | str) -> list[Problem]:
    """Everything that is wrong with a token set; an empty list means that it is intact."""
    path = Path(prefix)
    try:
        manifest = _find_manifest(path)
    except UserError as error:
        return error.problems
    problems = size_problems(path, manifest)
    if problems:
        return problems
    problems = _checksum_problems(path, manifest)
    try:
        reader = _format(manifest.info.format, where=path).read(path, manifest)
    except UserError as error:
        return [*problems, *error.problems]
    return [*problems, *_id_problems(path, reader), *_start_problems(path, reader)]


def _format(name: str, *, where: Path) -> Format:
    if name not in FORMATS:
        raise UserError(
            f"the token format {name!r} is not known; known are {', '.join(sorted(FORMATS))}",
            where=str(where),
            exit=Exit.DATA,
        )
    return FORMATS[name]


def _check_place(prefix: Path) -> None:
    if prefix.name in ("", ".."):
        raise UserError(
            "a token set needs a name",
            where=str(prefix),
            remedy="give a folder and a name, such as tokens/books",
        )
    nearest = next(folder for folder in prefix.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise UserError("this is a file, not a folder", where=str(nearest), exit=Exit.STORAGE)


def _find_manifest(prefix: Path) -> Manifest:
    path = file_of(prefix, ".json")
    if path.is_file():
        return read_manifest(prefix)
    if file_of(prefix, ".bin").exists():
        raise UserError(
            f"the token set is unfinished: it has no manifest {path.name}",
            where=str(prefix),
            remedy="prepare it again",
            exit=Exit.DATA,
        )
    raise UserError(
        f"there is no token set here: looked for {path}",
        where=str(prefix),
        remedy=_suggestion(prefix),
        exit=Exit.DATA,
    )


def _suggestion(prefix: Path) -> str:
    if prefix.suffix and is_manifest(file_of(prefix.with_suffix(""), ".json")):
        return f"leave out the ending: {prefix.with_suffix('')}"
    folder = prefix if prefix.is_dir() else prefix.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    present = sorted(path.stem for path in folder.glob("*.json") if is_manifest(path))
    if not present:
        return f"the folder {folder} holds no token sets; make one with: gristmill prepare"
    return f"the folder {folder} holds these token sets: {', '.join(present)}"


def _pieces(reader: TokenReader) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for start in range(0, len(reader), _PIECE):
        yield start, reader.read(start, min(_PIECE, len(reader) - start))


def _histogram(lengths: npt.NDArray[np.int64]) -> tuple[LengthBin, ...]:
    # frexp gives the exponent e with 2^(e-1) <= length < 2^e, exactly for lengths below 2^53.
    exponents = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return tuple(
        LengthBin(low=2 ** (exponent - 1), high=2**exponent, documents=int(counts[exponent]))
        for exponent in range(first, len(counts))
    )


def _checksum_problems(prefix: Path, manifest: Manifest) -> list[Problem]:
    return [
        Problem(
            "the content changed since it was written: the checksum differs from the manifest's",
            where=str(file_of(prefix, suffix)),
            remedy=_AGAIN,
        )
        for suffix, facts in manifest.files.items()
        if sha256_file(file_of(prefix, suffix)) != facts.sha256
    ]


def _id_problems(prefix: Path, reader: TokenReader) -> list[Problem]:
    vocab_size = reader.info.vocab_size
    for start, ids in _pieces(reader):
        outside = np.flatnonzero(ids >= vocab_size)
        if len(outside):
            first = int(outside[0])
            return [
                Problem(
                    f"the id {int(ids[first])} at position {start + first} is outside the "
                    f"vocabulary of {vocab_size}",
                    where=str(prefix),
                    remedy=_AGAIN,
                )
            ]
    return []


def _start_problems(prefix: Path, reader: TokenReader) -> list[Problem]:
    starts = reader.document_starts
    gaps = np.diff(starts, append=len(reader))
    if int(starts[0]) != 0:
        what = f"the first document begins at position {int(starts[0])} instead of 0"
    elif (gaps <= 0).any():
        document = int(np.flatnonzero(gaps <= 0)[0])
        what = f"document {document} does not end after it begins, at {int(starts[document])}"
    else:
        return []
    return [Problem(what, where=str(prefix), remedy=_AGAIN)]
