"""Objects of a file system of fsspec: one, those below a folder, or those that match a pattern."""

from __future__ import annotations

import glob
from typing import Any


def list_objects(system: Any, path: str) -> list[dict[str, Any]]:
    """What the file system tells of each object; none if nothing is there."""
    folder = path.rpartition("/")[0] if not path.endswith("/") else path.rstrip("/")
    if glob.has_magic(path):
        folder = path[: path.index(next(sign for sign in path if sign in "*?["))].rpartition("/")[0]
        found = system.glob(path, detail=True)
    else:
        try:
            info = system.info(path.rstrip("/"))
        except FileNotFoundError:
            return []
        if info["type"] == "file" and not path.endswith("/"):
            return [info]
        folder = path.rstrip("/")
        found = system.find(folder, detail=True)
    return [
        info
        for name, info in found.items()
        if info["type"] == "file" and not name.endswith("/") and not _hidden(name, below=folder)
    ]


def _hidden(name: str, *, below: str) -> bool:
    parts = name.removeprefix(f"{below}/").split("/")
    return any(part.startswith(".") for part in parts)
