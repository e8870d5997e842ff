"""Corpora by name: what they are, how large, under which licence, and where their text comes from.

The table is `corpora.toml`. A corpus is a dataset on Hugging Face, read as a stream so that nothing
but the token files is kept, or one file that is fetched into our cache. Before anything travels,
`describe` says what it will cost; what nobody has counted is said to be unknown.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from urllib.parse import urlencode

from gristmill.base.downloads import LARGER_CACHE, OnDownload, cache_folder, download
from gristmill.base.files import require_room
from gristmill.base.units import format_bytes

_BYTES_PER_TOKEN = 4
"""English gives 4 to 5 bytes of text for a token of GPT-2, which takes 2 bytes on the disk."""


@dataclass(frozen=True)
class Corpus:
    """One row of the table."""

    name: str
    title: str
    homepage: str
    licence: str
    dataset: str | None = None
    """The name on Hugging Face; or else there is a `url`."""
    config: str | None = None
    split: str | None = None
    column: str | None = None
    url: str | None = None
    file_sha256: str | None = None
    documents: int | None = None
    text_bytes: int | None = None
    download_bytes: int | None = None
    validation: str | None = None
    """The corpus's own split for validation."""
    held_out: float | None = None
    """Or the share of documents to hold out,"""
    seed: int | None = None
    """and the seed that chooses them."""
    split_as_published: bool = False
    """Whether others hold out the same documents with the `datasets` library."""
    note: str | None = None

    def source(self, split: str | None = None) -> str:
        """What `prepare` reads: a dataset in the spelling of `datasets`, or the file's path."""
        if self.dataset is None:
            return str(self.file)
        parts = {"config": self.config, "split": split or self.split, "column": self.column}
        query = urlencode({key: value for key, value in parts.items() if value})
        return f"hf:{self.dataset}?{query}"

    @property
    def permuted_rows(self) -> int | None:
        """From how many rows documents are held out in the way of the `datasets` library."""
        return self.documents if self.split_as_published else None

    @property
    def file(self) -> Path:
        """Where the file of a corpus with a `url` is kept."""
        assert self.url is not None, f"{self.name} is not a file"
        return cache_folder() / "corpora" / self.name / self.url.rpartition("/")[2]

    @property
    def disk_bytes(self) -> int | None:
        """What the disk must hold, about: the file if one is kept, and GPT-2's token ids."""
        if self.text_bytes is None:
            return None
        kept = (self.download_bytes or self.text_bytes) if self.url else 0
        return kept + 2 * self.text_bytes // _BYTES_PER_TOKEN


def corpus_names() -> list[str]:
    """All names, in the order of the table."""
    return list(_table())


def find_corpus(name: str) -> Corpus | None:
    """The corpus of that name, if there is one."""
    return _table().get(name)


def describe(corpus: Corpus) -> str:
    """What a person should know before anything is fetched."""
    documents = f"{corpus.documents:,}" if corpus.documents else "unknown"
    place = (
        f"one file, kept as {corpus.file}"
        if corpus.url
        else "read as a stream, only token files are kept"
    )
    rows = {
        "documents": documents,
        "text": _about(corpus.text_bytes),
        "download": f"{_about(corpus.download_bytes)}; {place}",
        "disk": f"{_about(corpus.disk_bytes)}, with the token ids of GPT-2",
        "held out": _held_out(corpus),
        "licence": corpus.licence,
        "homepage": corpus.homepage,
        "note": corpus.note,
    }
    lines = [f"  {key:<10} {value}" for key, value in rows.items() if value]
    return "\n".join([f"{corpus.name}: {corpus.title}", *lines])


def check_disk(corpus: Corpus, *, output: Path) -> None:
    """Refuse a corpus that the disks of the cache and of the token files cannot hold."""
    if corpus.disk_bytes is None:
        return
    kept = corpus.disk_bytes - 2 * (corpus.text_bytes or 0) // _BYTES_PER_TOKEN
    if corpus.url and not corpus.file.is_file():
        require_room(
            corpus.file.parent,
            needed=kept,
            purpose=f"the file of {corpus.name}",
            remedy=LARGER_CACHE,
        )
    require_room(
        output,
        needed=corpus.disk_bytes - kept,
        purpose=f"a token set of {corpus.name}",
        remedy="give an output on a larger disk",
    )


def fetch_corpus(corpus: Corpus, *, progress: OnDownload | None = None) -> str:
    """Bring the file of a corpus here if it has one; what `prepare` reads is the answer."""
    if corpus.url:
        download(
            corpus.url,
            to=corpus.file,
            sha256=corpus.file_sha256,
            # Without a checksum the length that the server states is what is known.
            size=corpus.download_bytes if corpus.file_sha256 else None,
            progress=progress,
        )
    return corpus.source()


@cache
def _table() -> dict[str, Corpus]:
    text = (resources.files("gristmill.text.sources") / "corpora.toml").read_text(encoding="utf-8")
    return {name: Corpus(name=name, **row) for name, row in tomllib.loads(text).items()}


def _about(amount: int | None) -> str:
    return f"about {format_bytes(amount)}" if amount else "unknown"


def _held_out(corpus: Corpus) -> str:
    if corpus.validation:
        return f"its own split {corpus.validation!r}"
    if corpus.held_out is None:
        return "nothing"
    return f"{corpus.held_out:.2%} of the documents, chosen by seed {corpus.seed}"
