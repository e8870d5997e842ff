"""Objects of stores elsewhere as sources of text; `gristmill.hub` reads them.

An object is read as a local file of the same name would be: its lines are those of the file, parts
divide it at the same places, and its journal knows it by name, size and version. The first bytes of
objects are asked for only where their names leave it open whether they are compressed, or what a
.json file is; many at a time, since each costs a request.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from gristmill.base.files import decompressed
from gristmill.hub.objects import RemoteObject
from gristmill.hub.remote_file import open_remote
from gristmill.hub.stores import find_objects
from gristmill.text.sources.lines import json_format
from gristmill.text.sources.source import COMPRESSED, Source, extension_of

_TABLES = (".parquet", ".arrow", ".feather")
_AT_ONCE = 16


class RemoteSource(Source):
    """One object."""

    def __init__(self, item: RemoteObject) -> None:
        self.path = None
        self.name = item.name
        self.size = item.size
        self._item = item
        self._stream = None
        file_name = item.name
        if item.name.startswith("http"):
            file_name = urlsplit(item.name).path
        file_name = file_name.rpartition("/")[2]
        self.extension = extension_of(file_name)
        self.can_seek = not file_name.lower().endswith(COMPRESSED)
        if self.can_seek and self.extension not in _TABLES and item.size:
            with self.open_file() as file:
                self.can_seek = decompressed(file) is file
        if self.extension == ".json":
            self.extension = json_format(self)

    @property
    def identity(self) -> tuple[object, ...]:
        return self.name, self.size, self._item.version

    def open_file(self) -> io.BufferedReader:
        return open_remote(self._item)


def remote_sources(url: str) -> Iterator[Source]:
    """The objects that a URL stands for."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(RemoteSource, find_objects(url))
