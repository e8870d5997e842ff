"""Files from the network: folders from the Hugging Face Hub, and single files by their URL.

huggingface_hub keeps a cache, resumes downloads, and needs no network for what it already has. Only
safetensors, settings and tokenizer files are downloaded, nothing that could run; `client` says how
its errors are told. Single files go to `gristmill` in $XDG_CACHE_HOME or ~/.cache: the library
receives FILE.VERSION.part, and the file gets its name after its size and SHA-256 were checked. An
interrupted download is resumed unless the version, the server's ETag, is another now.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import (
    require_utf8,
    sha256_file,
    storage_errors,
    sync_file,
    sync_folder,
)
from gristmill.base.locks import FolderLock
from gristmill.base.units import format_bytes
from gristmill.hub.client import (
    OnDownload,
    ask_hub,
    downloads_shown,
    parse_repository,
    quiet_library,
    shown_download,
)

_SETTINGS_FILES = ("*.json", "*.txt", "*.model", "chat_template.jinja")
"""The settings and the tokenizer of a model."""
_WEIGHT_FILES = ("*.safetensors",)
_IGNORED_FILES = ("*/*", "consolidated*")
"""Files in subfolders, and weights that some repositories hold twice, in their author's layout."""


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
    name: str, *, files: Sequence[str], where: str, remedy: str, offline: bool = False
) -> Path:
    """The folder of a model's files, by NAME or NAME@REVISION; downloads missing ones unless
    `offline`."""
    repository = parse_repository(name)
    if repository is None:
        what = f"there is no folder {name!r}, and this is no Hugging Face name"
        raise DataError(what, where=where, remedy=remedy)
    # Imported here: only a Hub name needs it, and it is slow to import.
    from huggingface_hub import snapshot_download

    with shown_download(name) as progress:
        folder = ask_hub(
            lambda: snapshot_download(
                repository.name,
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
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
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
            part = _receive(url, to, shown)
        try:
            _check(part, url=url, sha256=sha256, size=size)
            sync_file(part)
            os.replace(part, to)
            sync_folder(to.parent)
        finally:
            part.unlink(missing_ok=True)
    return to


def _receive(url: str, to: Path, progress: OnDownload) -> Path:
    """Download into FILE.VERSION.part, which the library resumes."""
    from huggingface_hub import get_hf_file_metadata, utils
    from huggingface_hub.file_download import http_get

    library: Any = utils

    class ShownFile(io.BufferedWriter):
        def write(self, data: Any) -> int:
            count = super().write(data)
            progress(self.tell(), total)
            return count

    quiet_library("huggingface_hub")
    library.disable_progress_bars("huggingface_hub.http_get")
    part, received = to, 0
    try:
        # The server may be any, so it gets no token, and its waits are not told as the Hub's.
        with downloads_shown(None):
            version = get_hf_file_metadata(url, token=False)
            total, tag = version.size, version.etag or ""
            part = to.with_name(f"{to.name}.{crc32(tag.encode()):08x}.part")
            for other in to.parent.glob(f"{to.name}.*part*"):
                # Without a tag nothing says whether this is the beginning of the same file.
                if other != part or not tag:
                    other.unlink()
            with storage_errors(part), ShownFile(io.FileIO(part, "ab")) as file:
                received = file.tell()
                # Compressed content could not be resumed.
                headers = {"Accept-Encoding": "identity"}
                http_get(url, file, resume_size=received, headers=headers, expected_size=total)
    except UserError:
        raise
    except Exception as error:  # the library's errors and those of its HTTP client differ
        received = part.stat().st_size if part.is_file() else 0
        kept = f"; {format_bytes(received)} are kept" if received else ""
        raise DataError(
            f"cannot download this file: {error}{kept}",
            where=url,
            remedy="check the network, then run the same command again: it resumes",
        ) from error
    return part


def _check(part: Path, *, url: str, sha256: str | None, size: int | None) -> None:
    actual, wrong = part.stat().st_size, None
    if size is not None and actual != size:
        wrong = f"it has {actual:,} bytes, not {size:,}"
    elif sha256 is not None and (digest := sha256_file(part)) != sha256:
        wrong = f"its SHA-256 is {digest}, not {sha256}"
    if wrong is not None:
        what = f"the downloaded file is not the expected one: {wrong}"
        remedy = "try again; if the message stays, the file was changed at its source"
        raise DataError(what, where=url, remedy=remedy)
