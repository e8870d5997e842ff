"""Token sets in a bucket: put there from a local set, and brought from anywhere.

    up      files, then what lies beside the set, then the manifest: each is read back and compared
            with its SHA-256 before the next one follows
    down    files go to .NAME.download/ and are compared with the SHA-256 of the manifest; when all
            are there they get their names, the manifest last

So there is no manifest, here or there, of which any file is missing or different. A copy that was
killed is continued by the same call: what is there and right is not sent again, which is known by
reading it, since stores state their checksums in different ways or not at all. A set that is
replaced loses its manifest first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import make_folder, sha256_file, storage_errors, sync_file, sync_folder
from gristmill.base.locks import OutputLock
from gristmill.hub.objects import OnSent, RemoteObject, shown
from gristmill.hub.remote_file import open_remote
from gristmill.hub.retry import with_retries
from gristmill.hub.stores import look_for, writable_store_of
from gristmill.tokens.format import (
    LEDGER_FILE,
    SIGNATURES_FILE,
    FileFacts,
    Manifest,
    NewSet,
    file_of,
    read_manifest,
)
from gristmill.tokens.store import find_manifest
from gristmill.tokens.writer import refuse_existing

OnCopied: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done, and with all of them."""
TOKENIZER_FOLDER = ".tokenizer"
_MANIFEST = ".json"
_PIECE = 1 << 22
_ATTEMPTS = 3
_NAME = "set"
"""What the names of files begin with while they arrive."""


class _Content(NamedTuple):
    """One file of a set or beside it, by what follows the name of the set."""

    suffix: str
    facts: FileFacts


def _contents(prefix: Path, manifest: Manifest) -> list[_Content]:
    """All files of a local set, its manifest last."""
    beside = [
        suffix for suffix in (LEDGER_FILE, SIGNATURES_FILE) if file_of(prefix, suffix).is_file()
    ]
    folder = file_of(prefix, TOKENIZER_FOLDER)
    if folder.is_dir():
        beside += [f"{TOKENIZER_FOLDER}/{file.name}" for file in sorted(folder.iterdir())]
    result = [_Content(*item) for item in manifest.files.items()]
    for suffix in [*beside, _MANIFEST]:
        path = file_of(prefix, suffix)
        result.append(_Content(suffix, FileFacts(path.stat().st_size, sha256_file(path))))
    return result


def check_target(url: str, *, overwrite: bool) -> None:
    """Refuse, before any work is done, an address that cannot be written to or holds a set."""
    store, mark = writable_store_of(url), f"{url}.writable"
    if look_for(f"{url}{_MANIFEST}") and not overwrite:
        raise _existing(url)
    # Only writing tells whether it is allowed.
    with_retries(lambda: store.write(Path(os.devnull), mark), shown(url))
    with_retries(lambda: store.remove(mark), shown(url))


def _existing(url: str) -> UserError:
    return UserError(
        "there is already a token set here",
        where=shown(url),
        remedy="give the new set another name, or replace this one with --overwrite",
        exit=Exit.REFUSED,
    )


def upload_set(
    prefix: Path,
    url: str,
    *,
    overwrite: bool = False,
    progress: OnCopied = lambda done, total: None,
) -> None:
    """Put a finished set of this machine into a bucket."""
    manifest = find_manifest(prefix)
    if manifest is None:
        raise DataError(
            "only sets with a manifest are put into a bucket",
            where=prefix,
            remedy="convert this one first: gristmill tokens convert",
        )
    store, contents = writable_store_of(url), _contents(prefix, manifest)
    there = look_for(f"{url}{_MANIFEST}")
    if there and _digest(there) != contents[-1].facts.sha256:
        if not overwrite:
            raise _existing(url)
        with_retries(lambda: store.remove(f"{url}{_MANIFEST}"), shown(url))
    # Every byte is sent, and read back.
    done, total = 0, 2 * sum(content.facts.bytes for content in contents)
    for suffix, facts in contents:
        before = done

        def show(count: int, before: int = before) -> None:
            progress(before + count, total)

        _put(file_of(prefix, suffix), f"{url}{suffix}", facts, show)
        done += 2 * facts.bytes
        progress(done, total)


def upload_file(file: Path, url: str) -> None:
    """Put one file into a bucket, and read it back."""
    _put(file, url, FileFacts(file.stat().st_size, sha256_file(file)))


def _put(file: Path, url: str, facts: FileFacts, progress: OnSent = lambda done: None) -> None:
    """Write one object, unless it is there, and read it back."""
    store = writable_store_of(url)
    for attempt in range(_ATTEMPTS):
        stored = look_for(url)
        if stored and stored.size == facts.bytes:
            digest = _digest(stored, lambda count: progress(facts.bytes + count))
            if digest == facts.sha256:
                return
        if attempt < _ATTEMPTS - 1:
            with_retries(lambda: store.write(file, url, progress), shown(url))
    raise DataError(
        "what arrived there is not what was sent: its checksum differs",
        where=shown(url),
        remedy="start the same command again: it goes on with this file",
    )


def _digest(item: RemoteObject, progress: OnSent = lambda done: None) -> str:
    digest = hashlib.sha256()
    with open_remote(item) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            progress(file.tell())
    return digest.hexdigest()


def download_set(
    url: str,
    prefix: Path,
    *,
    companions: Sequence[str] = (),
    overwrite: bool = False,
    progress: OnCopied = lambda done, total: None,
) -> None:
    """Bring a set to this machine, and of what may lie beside it what is there."""
    stored_manifest = look_for(f"{url}{_MANIFEST}")
    if stored_manifest is None:
        raise DataError(
            "there is no token set at this address: it has no manifest",
            where=shown(f"{url}{_MANIFEST}"),
            remedy="give the address of a set without an ending",
        )
    folder = prefix.with_name(f".{prefix.name}.download")
    make_folder(folder)
    arriving = folder / _NAME
    with OutputLock(prefix, purpose="copying"), storage_errors(prefix):
        with open_remote(stored_manifest) as opened:
            file_of(arriving, _MANIFEST).write_bytes(opened.read())
        manifest = read_manifest(arriving)
        spec, info = manifest.tokenizer, manifest.info
        new = NewSet(prefix, info.vocab_size or 1, info.end_of_text, spec, info.format)
        if not overwrite:
            refuse_existing(new)
        done, total = 0, sum(facts.bytes for facts in manifest.files.values())
        for suffix, facts in manifest.files.items():
            before = done

            def show(count: int, before: int = before) -> None:
                progress(before + count, total)

            _bring(f"{url}{suffix}", file_of(arriving, suffix), facts, show)
            done += facts.bytes
        beside = [name for name in companions if _bring_beside(f"{url}{name}", arriving, name)]
        _publish(arriving, prefix, [*manifest.files, *beside])


def _bring(url: str, file: Path, facts: FileFacts, progress: Callable[[int], None]) -> None:
    """Receive one file, from where an earlier attempt broke off."""
    for _ in range(_ATTEMPTS):
        have = file.stat().st_size if file.is_file() else 0
        if have == facts.bytes and file.is_file() and sha256_file(file) == facts.sha256:
            sync_file(file)
            progress(facts.bytes)
            return
        stored = look_for(url)
        if stored is None or stored.size != facts.bytes:
            size = "is missing" if stored is None else f"has {stored.size} bytes"
            what = f"this file of the set {size}, and the manifest says {facts.bytes} bytes"
            raise DataError(what, where=shown(url), remedy="put the set there again")
        if have >= facts.bytes:
            have = 0  # it is another file, or damaged
        with open_remote(stored) as source, file.open("ab") as target:
            target.truncate(have)
            source.seek(have)
            while piece := source.read(_PIECE):
                target.write(piece)
                have += len(piece)
                progress(have)
    what = "what arrives is not what the manifest says: its checksum differs"
    raise DataError(what, where=shown(url), remedy="put the set there again")


def _bring_beside(url: str, arriving: Path, suffix: str) -> bool:
    found, file = look_for(url), file_of(arriving, suffix)
    if found is None:
        return False
    file.parent.mkdir(exist_ok=True)
    with open_remote(found) as source:
        file.write_bytes(source.read())
    return True


def _publish(arriving: Path, prefix: Path, suffixes: Sequence[str]) -> None:
    """Give all files their names, the manifest last."""
    file_of(prefix, _MANIFEST).unlink(missing_ok=True)
    for suffix in (*suffixes, _MANIFEST):
        target = file_of(prefix, suffix)
        target.parent.mkdir(exist_ok=True)
        os.replace(file_of(arriving, suffix), target)
    sync_folder(prefix.parent)
    for rest in sorted(arriving.parent.rglob("*"), reverse=True):
        rest.rmdir() if rest.is_dir() else rest.unlink()
    arriving.parent.rmdir()
