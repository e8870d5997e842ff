"""Files from the network: folders from the Hugging Face Hub, and single files by their URL.

huggingface_hub keeps a cache, resumes downloads, and needs no network for what it already has. Only
safetensors, settings and tokenizer files are downloaded, nothing that could run; `hub` says how its
errors are told. Single files go to
`gristmill` in $XDG_CACHE_HOME or ~/.cache; each gets its name after its size and SHA-256 were
checked. An interrupted download is resumed unless the file has changed at its source.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError
from gristmill.base.files import (
    require_utf8,
    sha256_file,
    storage_errors,
    sync_file,
    sync_folder,
)
from gristmill.base.hub import (
    OnDownload,
    RepositoryKind,
    ask_hub,
    parse_repository,
    shown_download,
)
from gristmill.base.locks import FolderLock
from gristmill.base.units import format_bytes

LARGER_CACHE = "set XDG_CACHE_HOME to a folder on a larger disk"
"""What to do if the cache's disk is too small."""
_SETTINGS_FILES = ("*.json", "*.txt", "*.model", "chat_template.jinja")
"""The settings and the tokenizer of a model."""
_WEIGHT_FILES = ("*.safetensors",)
_IGNORED_FILES = ("*/*", "consolidated*")
"""Files in subfolders, and weights that some repositories hold twice, in their author's layout."""
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 30
_ATTEMPTS = 5
_NOTHING_LEFT = 416
"""The HTTP status if all bytes had been received, or too many."""


def model_folder(name: str, *, where: str = "model.start", weights: bool = True) -> Path:
    """The folder of a model: a local one, or that of a Hugging Face name.

    Without `weights`, only its settings and its tokenizer are downloaded.
    """
    if Path(name).exists():
        return require_utf8(Path(name))
    files = (*_SETTINGS_FILES, *_WEIGHT_FILES) if weights else _SETTINGS_FILES
    remedy = "give a run folder, a Hugging Face folder, or a Hugging Face name such as gpt2"
    folder = hub_folder(name, files=files, where=where, remedy=remedy)
    if weights and not any(folder.glob(_WEIGHT_FILES[0])):
        raise _no_weights(name, where=where)
    return folder


def _no_weights(name: str, *, where: str) -> DataError:
    """The error for a model of which there are only settings: if its files are listed, the Hub has
    no others that are read here; else another program has put a part of them into the cache."""
    import huggingface_hub

    repository = parse_repository(name)
    assert repository is not None, f"{name} is in the cache, so it is a name"
    try:
        library: Any = huggingface_hub
        library.get_cached_repo_tree(repository.name, revision=repository.revision)
    except Exception:  # nothing is listed, or the library is too old to keep lists
        return DataError(
            f"the cache holds only the settings of {name!r}, and no .safetensors file",
            where=where,
            remedy=f"run the same command with network; without one, {repository.copy_remedy}",
        )
    return DataError(
        f"the model {name!r} has no .safetensors file; pickled weights are not read, since they "
        "can run code",
        where=where,
        remedy=f"give a model or a revision (NAME@REVISION) that has one; {repository.page}"
        "/discussions may have a converted copy",
    )


def settings_folder(name: str, *, where: str) -> Path:
    """The folder of a model, of which only settings and tokenizer are downloaded."""
    return model_folder(name, where=where, weights=False)


def hub_folder(
    name: str,
    *,
    files: Sequence[str],
    where: str,
    remedy: str,
    offline: bool = False,
    kind: RepositoryKind = "model",
) -> Path:
    """The folder of a repository's files, by NAME or NAME@REVISION; downloads missing ones unless
    `offline`."""
    repository = parse_repository(name, kind=kind)
    if repository is None:
        what = f"there is no folder {name!r}, and this is no Hugging Face name"
        raise DataError(what, where=where, remedy=remedy)
    # Imported here: only a Hub name needs it, and it is slow to import.
    from huggingface_hub import snapshot_download

    with shown_download(name) as progress:
        folder = ask_hub(
            lambda: snapshot_download(
                repository.name,
                repo_type=kind,
                revision=repository.revision,
                allow_patterns=list(files),
                ignore_patterns=list(_IGNORED_FILES),
                local_files_only=offline,
                tqdm_class=_bar_class(progress),
            ),
            repository,
            where=where,
            remedy=remedy,
        )
    return Path(folder)


def _bar_class(progress: OnDownload) -> Any:
    """A progress bar for the library that shows nothing itself and reports bytes."""
    import huggingface_hub.utils

    library: Any = huggingface_hub.utils
    library_bar: Any = library.tqdm
    most = 0

    class Bar(library_bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            # The library has one bar for files, and others for bytes.
            self.counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self.n += n or 0
            # One bar counts bytes that arrive, another those that are written.
            if self.counts_bytes and self.n > most:
                most = int(self.n)
                progress(most, int(self.total) if self.total else None)

    return Bar


def download(
    url: str,
    *,
    to: Path,
    sha256: str | None = None,
    size: int | None = None,
    progress: OnDownload | None = None,
) -> Path:
    """Download a file unless it is there; resume where an earlier attempt broke off."""
    if to.is_file():
        return to
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DataError(
            "the network is switched off by HF_HUB_OFFLINE",
            where=url,
            remedy=f"unset HF_HUB_OFFLINE, or download this file elsewhere and copy it to {to}",
        )
    with storage_errors(to.parent):
        to.parent.mkdir(parents=True, exist_ok=True)
    with FolderLock(to.parent), storage_errors(to):
        if to.is_file():
            return to
        with nullcontext(progress) if progress else shown_download(to.name) as shown:
            part, tag = _receive(url, to, shown)
        try:
            _check(part, url=url, sha256=sha256, size=size)
            sync_file(part)
            os.replace(part, to)
            sync_folder(to.parent)
        finally:
            part.unlink(missing_ok=True)
            tag.unlink(missing_ok=True)
    return to


def open_url(url: str, *, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Ask a server for a file: the one function here that opens a connection itself."""
    request = urllib.request.Request(url, headers={"User-Agent": "gristmill", **headers})
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    return response


def _receive(url: str, to: Path, progress: OnDownload) -> tuple[Path, Path]:
    """Download into FILE.part, and keep the file's version, its ETag, in FILE.part.tag."""
    part, tag = to.with_name(f"{to.name}.part"), to.with_name(f"{to.name}.part.tag")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _append(url, part, tag, progress)
            break
        except (OSError, http.client.HTTPException) as error:
            status = error.code if isinstance(error, urllib.error.HTTPError) else 500
            if status == _NOTHING_LEFT:
                tag.unlink(missing_ok=True)
            elif status < 500 or attempt == _ATTEMPTS:
                size = part.stat().st_size if tag.is_file() else 0
                kept = f"; {format_bytes(size)} are kept" if size else ""
                raise DataError(
                    f"cannot download this file: {error}{kept}",
                    where=url,
                    remedy="check the network, then run the same command again: it resumes",
                ) from error
    return part, tag


def _append(url: str, part: Path, tag: Path, progress: OnDownload) -> None:
    """Ask for the bytes that are missing, and append them."""
    received = part.stat().st_size if part.is_file() and tag.is_file() else 0
    resume = {"Range": f"bytes={received}-", "If-Range": tag.read_text()} if received else {}
    with open_url(url, headers=resume) as response:
        if response.status != 206:
            # The whole file: the version changed, or the server cannot send the rest alone.
            received = 0
        length = response.headers.get("Content-Length")
        total = received + int(length) if length else None
        etag = response.headers.get("ETag")
        with storage_errors(part), part.open("ab" if received else "wb") as file:
            # Equal weak tags do not promise equal bytes.
            if etag and not etag.startswith("W/"):
                tag.write_text(etag)
            else:
                tag.unlink(missing_ok=True)
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                received += len(chunk)
                progress(received, total)
    if total is not None and received < total:
        raise http.client.IncompleteRead(b"", total - received)


def _check(part: Path, *, url: str, sha256: str | None, size: int | None) -> None:
    found, wrong = part.stat().st_size, None
    if size is not None and found != size:
        wrong = f"it has {found:,} bytes, not {size:,}"
    elif sha256 is not None and (digest := sha256_file(part)) != sha256:
        wrong = f"its SHA-256 is {digest}, not {sha256}"
    if wrong is not None:
        what = f"the downloaded file is not the expected one: {wrong}"
        remedy = "try again; if the message stays, the file was changed at its source"
        raise DataError(what, where=url, remedy=remedy)
