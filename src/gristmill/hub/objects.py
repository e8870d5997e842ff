"""Objects in stores elsewhere, each at one version of its content, and how their URLs are shown.

    https://host/file.jsonl.gz    one file of a web server that sends ranges of it
    s3://bucket/folder/*.jsonl    objects of S3, or of a server that speaks like it
    gs://bucket/folder/           objects of Google Cloud Storage
    hf://datasets/owner/name/…    files of a repository of the Hugging Face Hub

A version is what a store says about the content: an ETag, a generation, a checksum. Every read
names it, so that an object that changes meanwhile is an error and never a mix of two contents.

A URL may hold a password or a signature. The address of an object is used for requests alone; all
that people and files see is its name, which has neither user nor query.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from gristmill.base.errors import DataError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
HIDDEN = "…"
"""Stands for the query of a URL."""


OnSent: TypeAlias = Callable[[int], None]
"""Called with the bytes that were sent."""


@dataclass(frozen=True)
class RemoteObject:
    """One object at one version."""

    address: str = field(repr=False)
    """Its URL for requests; may hold secrets."""
    name: str
    """Its URL for people and records."""
    size: int
    version: str


class Store(Protocol):
    """A kind of store."""

    def find(self, url: str) -> list[RemoteObject]:
        """The objects that a URL stands for, in any order; none if nothing is there."""

    def read(self, item: RemoteObject, begin: int, end: int) -> Iterator[bytes]:
        """The bytes of a range as they arrive; one attempt, which may break off."""


class WritableStore(Store, Protocol):
    """A store that objects can be written to."""

    def write(self, file: Path, url: str, progress: OnSent = lambda done: None) -> None:
        """Put a file in place of an object, at once."""

    def remove(self, url: str) -> None:
        """Remove an object, if it is there."""


class TransientError(Exception):
    """An error that may not occur again if the request is repeated."""

    def __init__(self, what: str, *, wait: float | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.wait = wait
        """Seconds that the server asks to wait for."""


def scheme_of(text: str) -> str | None:
    """The scheme of a URL in small letters; None if this is none."""
    match = _URL.match(text)
    return match[1].lower() if match else None


def shown(url: str) -> str:
    """A URL without user, password and query: all that a message or a record may hold."""
    if scheme_of(url) in ("s3", "gs", "hf"):
        # A query is a part of a name there.
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2] if '@' in rest.split('/')[0] else rest}"
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, HIDDEN if parts.query else "", ""))


def holds_secrets(url: str) -> bool:
    """Whether a URL has a part that may be a password or a signature."""
    return scheme_of(url) is not None and shown(url) != url.partition("#")[0]


def changed(name: str) -> DataError:
    """The error for an object whose version is not the one that reading began with."""
    return DataError(
        "this object changed while it was being read",
        where=name,
        remedy="start the same command again: it reads the new content of this one, and keeps the "
        "work on all others",
    )


class NothingThereError(DataError):
    """There is no object at an address."""


def missing(name: str) -> NothingThereError:
    """The error for an object that is not there."""
    return NothingThereError(
        "there is nothing at this address", where=name, remedy="check the address"
    )


def forbidden(name: str, what: str, remedy: str) -> DataError:
    """The error for an object that this user may not read."""
    return DataError(f"the server refuses: {what}", where=name, remedy=remedy)
