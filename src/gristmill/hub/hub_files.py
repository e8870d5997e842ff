"""Files of repositories on the Hugging Face Hub, by hf://datasets/owner/name@revision/path.

They are listed by huggingface_hub's HfFileSystem at one commit, whose content cannot change, and
read as files of the web at that commit. What is unchanged between two commits has the same version:
the checksum of its content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gristmill.base.errors import DataError
from gristmill.hub.client import (
    HubRepository,
    RepositoryKind,
    ask_hub,
    hub_endpoint,
    quiet_library,
)
from gristmill.hub.listing import list_objects
from gristmill.hub.objects import RemoteObject
from gristmill.hub.web import read_range

_PATH = re.compile(r"hf://(datasets/)?([^/@]+/[^/@]+)(@[^/]+)?/?(.*)")
_REMEDY = "write hf://datasets/OWNER/NAME/PATH, or hf://OWNER/NAME/PATH for a model"


class HubStore:
    """Files of repositories."""

    def find(self, url: str) -> list[RemoteObject]:
        from huggingface_hub import HfApi, HfFileSystem

        folder, name, revision, path = _split(url)
        kind: RepositoryKind = "dataset" if folder else "model"
        asked = revision[1:].replace("%2F", "/") or None
        repository = HubRepository(name, asked, kind=kind)
        quiet_library("huggingface_hub")

        def list_files() -> tuple[str, list[dict[str, Any]]]:
            info: Any = HfApi().repo_info(name, repo_type=kind, revision=asked)
            system = HfFileSystem(skip_instance_cache=True)
            pinned = f"{folder}{name}@{info.sha}/{path}"
            return info.sha, list_objects(system, pinned)

        commit, files = ask_hub(list_files, repository, where=url, remedy=_REMEDY)
        found = []
        for info in files:
            inside = info["name"].partition(f"@{commit}/")[2]
            facts = info.get("lfs") or {}
            version = facts.get("sha256") or info.get("blob_id")
            found.append(
                RemoteObject(
                    f"hf://{folder}{name}@{commit}/{inside}",
                    f"hf://{folder}{name}{revision}/{inside}",
                    int(info["size"]),
                    str(version),
                )
            )
        return found

    def read(self, item: RemoteObject, begin: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import get_token, hf_hub_url

        folder, name, commit, path = _split(item.address)
        kind = "dataset" if folder else "model"
        url = hf_hub_url(name, path, repo_type=kind, revision=commit[1:], endpoint=hub_endpoint())
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return read_range(url, item, begin, end, headers=headers, compare=False)


def _split(url: str) -> tuple[str, str, str, str]:
    """The folder of the kind of repository, its name, @revision and the path inside it."""
    match = _PATH.fullmatch(url)
    if match is None or match[2].split("/")[0] in ("datasets", "spaces", "buckets"):
        raise DataError("this is no file of a repository", where=url, remedy=_REMEDY)
    return match[1] or "", match[2], match[3] or "", match[4]
