"""Files from the network into our cache, whole or not at all.

    FILE.part       what has arrived so far; a later attempt goes on from its end
    FILE.part.tag   which version of the remote file that is (its ETag)
    FILE            the file, named so only after its length and SHA-256 were found right

A file that carries its name was checked before it got it, so it is taken as it is. The cache is
the folder `gristmill` in $XDG_CACHE_HOME, or in ~/.cache. Only `open_url` touches the network.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import (
    FolderLock,
    require_room,
    sha256_file,
    storage_errors,
    sync_file,
    sync_folder,
)
from gristmill.base.units import format_bytes

Watch = Callable[[int, int | None], None]
"""Called with the bytes that have arrived, and how many there will be if that is known."""
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 30
_FRUITLESS_ATTEMPTS = 3
_NOTHING_THERE = 416
"""The status that says that no byte follows those we have: all had come, or too many."""
# What urllib raises when a server cannot be reached, refuses, or falls silent half-way.
_NETWORK = (OSError, http.client.HTTPException)


class Response(Protocol):
    """What a server answered."""

    status: int
    headers: http.client.HTTPMessage

    def read(self, amount: int, /) -> bytes: ...

    def close(self) -> None: ...


LARGER_CACHE = "set XDG_CACHE_HOME to a folder on a larger disk"
"""What to do if the cache's disk is too small."""


def cache_folder() -> Path:
    """Where what was fetched is kept, and where files can be put by hand."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gristmill"


def is_offline() -> bool:
    """Whether the user asked to stay off the network, by the variable the field uses for it."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def open_url(url: str, *, headers: dict[str, str]) -> Response:
    """Ask a server for a file: the one function that touches the network."""
    request = urllib.request.Request(url, headers={"User-Agent": "gristmill", **headers})
    response: Response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    return response


def download(
    url: str,
    *,
    to: Path,
    sha256: str | None = None,
    size: int | None = None,
    watch: Watch | None = None,
) -> Path:
    """Fetch a file unless it is there; go on where an earlier attempt ended."""
    if to.is_file():
        return to
    if is_offline():
        raise UserError("the network is switched off by HF_HUB_OFFLINE", where=url, exit=Exit.DATA)
    with storage_errors(to.parent):
        to.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(to.parent)
    lock.acquire()
    try:
        return to if to.is_file() else _Transfer(url, to=to, watch=watch).run(sha256, size)
    finally:
        lock.release()


class _Transfer:
    """One file on its way."""

    def __init__(self, url: str, *, to: Path, watch: Watch | None) -> None:
        self._url = url
        self._to = to
        self._part = to.with_name(f"{to.name}.part")
        self._tag = to.with_name(f"{to.name}.part.tag")
        self._watch = watch

    def run(self, sha256: str | None, size: int | None) -> Path:
        fruitless, furthest = 0, self._arrived
        while True:
            try:
                self._receive(size)
                break
            except _NETWORK as error:
                status = error.code if isinstance(error, urllib.error.HTTPError) else None
                if status == _NOTHING_THERE and self._tag.is_file():
                    self._tag.unlink()
                    continue
                refused = status is not None and status < 500
                # Without a tag a broken transfer begins anew, so less may be here than before.
                fruitless = 0 if self._arrived > furthest else fruitless + 1
                furthest = max(furthest, self._arrived)
                if refused or fruitless == _FRUITLESS_ATTEMPTS:
                    raise self._lost(error) from error
        self._check(sha256, size)
        with storage_errors(self._to):
            sync_file(self._part)
            os.replace(self._part, self._to)
            self._tag.unlink(missing_ok=True)
            sync_folder(self._to.parent)
        return self._to

    @property
    def _arrived(self) -> int:
        return self._part.stat().st_size if self._part.is_file() else 0

    def _receive(self, size: int | None) -> None:
        """Ask for what is missing, and add what comes to what is there."""
        tag = self._tag.read_text() if self._tag.is_file() and self._arrived else None
        if size is not None and tag and self._arrived == size:
            return
        ask = {"Range": f"bytes={self._arrived}-", "If-Range": tag} if tag else {}
        response = open_url(self._url, headers=ask)
        try:
            # 206: the rest of the same version. 200: the whole, since the version changed or the
            # server cannot go on in the middle.
            arrived = self._arrived if response.status == 206 else 0
            length = response.headers.get("Content-Length")
            total = arrived + int(length) if length else size
            self._keep_tag(response.headers.get("ETag"))
            require_room(
                self._to.parent,
                needed=(total or 0) - arrived,
                purpose=self._to.name,
                remedy=LARGER_CACHE,
            )
            self._store(response, arrived=arrived, total=total)
        finally:
            response.close()

    def _keep_tag(self, tag: str | None) -> None:
        # A weak tag does not promise equal bytes, so it is no ground to go on from the middle.
        if tag and not tag.startswith("W/"):
            self._tag.write_text(tag)
        else:
            self._tag.unlink(missing_ok=True)

    def _store(self, response: Response, *, arrived: int, total: int | None) -> None:
        with storage_errors(self._part), self._part.open("ab" if arrived else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                arrived += len(chunk)
                if self._watch:
                    self._watch(arrived, total)
        if total is not None and arrived < total:
            raise http.client.IncompleteRead(b"", total - arrived)

    def _check(self, sha256: str | None, size: int | None) -> None:
        found = self._arrived
        wrong = None
        if size is not None and found != size:
            wrong = f"it has {found:,} bytes, not {size:,}"
        elif sha256 is not None and (digest := sha256_file(self._part)) != sha256:
            wrong = f"its SHA-256 is {digest}, not {sha256}"
        if wrong is None:
            return
        self._part.unlink()
        self._tag.unlink(missing_ok=True)
        raise UserError(
            f"the file that arrived is not the one expected: {wrong}",
            where=self._url,
            remedy="try again; if it stays so, the file was changed at its source",
            exit=Exit.DATA,
        )

    def _lost(self, error: BaseException) -> UserError:
        kept = f"; {format_bytes(self._arrived)} are kept" if self._arrived else ""
        return UserError(
            f"cannot fetch this: {error}{kept}",
            where=self._url,
            remedy="check the network, then start the same command again: it goes on from there",
            exit=Exit.DATA,
        )
