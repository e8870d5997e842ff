"""Corpora known by name: what they are, how large, under which licence, and where to get them.

The table is `corpora.toml`. A corpus is a Hugging Face dataset, streamed so that only the token
files are kept, or one file that is downloaded into our cache. `describe` tells the cost before
anything is downloaded; numbers that nobody has counted are unknown.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from urllib.parse import urlencode

from gristmill.base.caches import cache_folder
from gristmill.base.errors import DataError
from gristmill.base.files import require_room
from gristmill.base.units import format_bytes
from gristmill.hub.client import OnDownload, hub_endpoint
from gristmill.hub.downloads import download

_LARGER_CACHE = "set XDG_CACHE_HOME to a folder on a larger disk"
_BYTES_PER_TOKEN = 4
"""English gives 4 to 5 bytes of text per GPT-2 token, which takes 2 bytes on disk."""


@dataclass(frozen=True)
class Corpus:
    """One row of the table."""

    name: str
    title: str
    homepage: str
    licence: str
    dataset: str | None = None
    """The name on Hugging Face; if None, there is a `url`."""
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    column: str | None = None
    files: str | None = None
    """The pattern of the files of `config`, where a dataset has several configs."""
    url: str | None = None
    file_sha256: str | None = None
    documents: int | None = None
    text_bytes: int | None = None
    download_bytes: int | None = None
    validation: str | None = None
    """The corpus's own validation split."""
    held_out: float | None = None
    """Or the share of documents to hold out,"""
    seed: int | None = None
    """and the seed that chooses them."""
    split_as_published: bool = False
    """Whether others hold out the same documents with the `datasets` library."""
    note: str | None = None

    def source(self, split: str | None = None) -> str:
        """What `prepare` reads: hf:NAME?… for a dataset, or the path of the file."""
        if self.dataset is None:
            return str(self.file)
        parts = {"config": self.config, "split": split or self.split, "column": self.column}
        query = urlencode({key: value for key, value in parts.items() if value})
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.dataset}{revision}?{query}"

    @property
    def file(self) -> Path:
        """Where the file of a corpus with a `url` is kept."""
        assert self.url is not None, f"{self.name} is not a file"
        return cache_folder() / "corpora" / self.name / self.url.rpartition("/")[2]

    @property
    def file_bytes(self) -> int:
        """The size of the file that is kept, about."""
        return (self.download_bytes or self.text_bytes or 0) if self.url else 0

    @property
    def token_bytes(self) -> int | None:
        """The size of GPT-2's token ids, about."""
        return 2 * self.text_bytes // _BYTES_PER_TOKEN if self.text_bytes is not None else None


@cache
def known_corpora() -> dict[str, Corpus]:
    """All corpora by name, in the order of the table."""
    text = (resources.files("gristmill.text.sources") / "corpora.toml").read_text(encoding="utf-8")
    return {name: Corpus(name=name, **row) for name, row in tomllib.loads(text).items()}


def config_files(dataset: str, config: str | None) -> str | None:
    """The pattern of the files of a dataset's config, if a corpus of the table is made of them."""
    rows = known_corpora().values()
    return next((row.files for row in rows if (row.dataset, row.config) == (dataset, config)), None)


def find_corpus(name: str) -> Corpus | None:
    """The corpus of that NAME or NAME@REVISION, if there is one."""
    name, _, revision = name.partition("@")
    corpus = known_corpora().get(name)
    if corpus is None or not revision:
        return corpus
    if corpus.dataset is None:
        what, remedy = "this corpus is a single file without revisions", f"give {name} alone"
        raise DataError(what, where=f"{name}@{revision}", remedy=remedy)
    return replace(corpus, revision=revision)


def describe(corpus: Corpus) -> str:
    """What a person should know before anything is downloaded."""

    def about(amount: int | None) -> str:
        return f"about {format_bytes(amount)}" if amount else "unknown"

    place = f"one file, kept as {corpus.file}" if corpus.url else "streamed; only tokens are kept"
    held_out = "nothing"
    if corpus.validation:
        held_out = f"its own split {corpus.validation!r}"
    elif corpus.held_out is not None:
        held_out = f"{corpus.held_out:.2%} of the documents, chosen by seed {corpus.seed}"
    disk = corpus.token_bytes and corpus.file_bytes + corpus.token_bytes
    rows = {
        "documents": f"{corpus.documents:,}" if corpus.documents else "unknown",
        "text": about(corpus.text_bytes),
        "download": f"{about(corpus.download_bytes)}; {place}",
        "disk": f"{about(disk)}, including the token ids of GPT-2",
        "held out": held_out,
        "licence": corpus.licence,
        "homepage": corpus.homepage,
        "note": corpus.note,
    }
    lines = [f"  {key:<10} {value}" for key, value in rows.items() if value]
    return "\n".join([f"{corpus.name}: {corpus.title}", *lines])


def check_disk(corpus: Corpus, *, output: Path) -> None:
    """Refuse a corpus that the disks of the cache and of the token files cannot hold."""
    if corpus.token_bytes is None:
        return
    if corpus.url and not corpus.file.is_file():
        purpose = f"the file of {corpus.name}"
        folder, needed = corpus.file.parent, corpus.file_bytes
        require_room(folder, needed=needed, purpose=purpose, remedy=_LARGER_CACHE)
    purpose = f"a token set of {corpus.name}"
    remedy = "choose an output on a larger disk"
    require_room(output, needed=corpus.token_bytes, purpose=purpose, remedy=remedy)


def fetch_corpus(corpus: Corpus, *, progress: OnDownload | None = None) -> str:
    """Download the file of a corpus if it has one; return what `prepare` reads."""
    if corpus.url:
        # Without a checksum, the length that the server states is all that is known.
        size = corpus.download_bytes if corpus.file_sha256 else None
        url = corpus.url.replace("https://huggingface.co", hub_endpoint(), 1)
        download(url, to=corpus.file, sha256=corpus.file_sha256, size=size, progress=progress)
    return corpus.source()
