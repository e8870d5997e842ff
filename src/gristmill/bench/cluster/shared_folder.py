"""Whether a folder is shared by all nodes, and behaves as runs require.

    written     rank 0 writes a file atomically; the other ranks wait until they see it
    replaced    rank 0 replaces a file repeatedly; no rank may read a partial or missing file
    listed      rank 0 creates files; the other ranks wait until they are listed
    locked      rank 0 locks the folder; the other ranks must fail to lock it until it is released
    speed       every node writes a file and syncs it to the disk, all at the same time

The check uses a folder of its own, which it removes afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_atomic
from gristmill.base.locks import FolderLock
from gristmill.base.units import format_seconds
from gristmill.bench.cluster.members import CheckContext, Member, join_names, short_time
from gristmill.bench.finding import Finding, problem

VISIBLE_TIMEOUT = 10.0
"""Seconds that a rank waits to see what another one wrote. NFS may take 3 to 60 seconds, depending
on the mount options."""
MAX_DELAY = 3.0
"""Seconds after which a write should be visible: processes of a run read what others just wrote."""
_POLL = 0.005
_VERSIONS, _FILES = 20, 20
_SPEED_BYTES = 64 * 2**20
MIN_SPEED = 50e6
"""Bytes per second on a node; below, checkpoints take long."""


def measure_folder(context: CheckContext, *, size: int = _SPEED_BYTES) -> dict[str, Any]:
    """The observations of each process; on rank 0."""
    control = context.control
    name = control.broadcast(f".gristmill-doctor-{uuid.uuid4().hex[:12]}")
    folder = context.folder / name
    try:
        content, refused = control.on_rank0(lambda: _create(folder))
        if refused is not None:
            return {"folder": str(context.folder.absolute()), "refused": refused}
        written = _wait_for(lambda: _read(folder / "file") == content)
        result: dict[str, Any] = {"written": written}
        shared = not control.any(written is None)
        if shared:
            result["mixtures"] = _replace(context, folder)
            result["listed"] = _list(context, folder)
            result["refused"], result["let_in"] = _lock(context, folder)
            result["speed"] = _speed(context, folder, size)
        return {
            "folder": str(context.folder.absolute()),
            "refused": None,
            "shared": shared,
            "processes": control.gather(result),
        }
    finally:
        if control.is_rank0:
            shutil.rmtree(folder, ignore_errors=True)


def _create(folder: Path) -> tuple[str, str | None]:
    """Create the folder and a file in it; returns the file's content, and the error, if any."""
    content = uuid.uuid4().hex
    try:
        folder.mkdir()
        write_atomic(folder / "file", content)
    except OSError as error:
        return content, error.strerror or str(error)
    except UserError as error:
        return content, error.problems[0].what
    return content, None


def _wait_for(condition: Callable[[], bool]) -> float | None:
    """Seconds until a condition holds; None after `VISIBLE_TIMEOUT`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > VISIBLE_TIMEOUT:
            return None
        time.sleep(_POLL)
    return time.monotonic() - began


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _replace(context: CheckContext, folder: Path) -> int:
    """How often this process read a partial or missing file while rank 0 replaced it."""
    file, last = folder / "version", _version(_VERSIONS)
    # All ranks see the first version before the second replaces it.
    context.control.on_rank0(lambda: write_atomic(file, _version(1)))
    _wait_for(lambda: _read(file) is not None)
    context.control.barrier()
    if context.control.is_rank0:
        for number in range(2, _VERSIONS + 1):
            write_atomic(file, _version(number))
        return 0
    versions = {_version(number) for number in range(1, _VERSIONS + 1)}
    wrong, deadline = 0, time.monotonic() + VISIBLE_TIMEOUT
    while (content := _read(file)) != last and time.monotonic() < deadline:
        wrong += content not in versions
        time.sleep(_POLL)
    return wrong


def _version(number: int) -> str:
    return f"{number} " * 10_000


def _list(context: CheckContext, folder: Path) -> float | None:
    names = {f"listed-{number}" for number in range(_FILES)}
    context.control.on_rank0(lambda: _touch(folder, names))
    return _wait_for(lambda: names <= set(os.listdir(folder)))


def _touch(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).touch()


def _lock(context: CheckContext, folder: Path) -> tuple[bool | None, bool | None]:
    """Whether this rank failed to lock what rank 0 had locked, and could lock it afterwards."""
    control, lock = context.control, FolderLock(folder)
    error = control.on_rank0(lambda: _lock_error(lock))
    if error is not None:
        return None, None
    refused = None if control.is_rank0 else _is_refused(FolderLock(folder))
    control.barrier()
    lock.release()
    control.barrier()
    # Only the last rank, which is on another node than rank 0 if there are several.
    let_in = None
    if control.rank == control.size - 1:
        let_in = not _is_refused(FolderLock(folder))
    control.barrier()
    return refused, let_in


def _lock_error(lock: FolderLock) -> str | None:
    try:
        lock.acquire()
    except (UserError, OSError) as error:
        return str(error)
    return None


def _is_refused(lock: FolderLock) -> bool:
    try:
        lock.acquire()
    except UserError as error:
        return error.exit is Exit.REFUSED
    lock.release()
    return False


def _speed(context: CheckContext, folder: Path, size: int) -> float | None:
    """Bytes per second that the first process of each node writes and syncs to the disk."""
    content = os.urandom(2**20) * (size // 2**20)
    context.control.barrier()
    if not context.is_node_leader:
        return None
    began = time.monotonic()
    with contextlib.suppress(OSError), (folder / f"speed-{context.world.rank}").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.monotonic() - began)
    return None


# ------------------------------------------------------------------ findings


def judge_folder(measured: Mapping[str, Any], members: Sequence[Member]) -> Iterator[Finding]:
    """Whether runs can use the folder from all nodes."""
    folder = measured["folder"]
    if measured["refused"] is not None:
        what = f"rank 0 on {members[0].host} cannot write to {folder}: {measured['refused']}"
        yield problem("folder", what, "choose another folder with --folder", exit=Exit.STORAGE)
        return
    results = measured["processes"]
    if not measured["shared"]:
        pairs = zip(members, results, strict=True)
        hosts = sorted({member.host for member, result in pairs if result["written"] is None})
        what = f"{folder} is not shared: {join_names(hosts)} did not see what rank 0 on "
        what += f"{members[0].host} wrote there within {format_seconds(VISIBLE_TIMEOUT)}"
        remedy = "set `folder` of the run to a folder that all nodes mount; test it with --folder"
        yield problem("folder", what, remedy, exit=Exit.STORAGE)
        return
    yield from _judge_delays(measured, members)
    torn = [
        member.label for member, result in zip(members, results, strict=True) if result["mixtures"]
    ]
    if torn:
        what = f"{join_names(torn)} read a partial or missing file while rank 0 replaced it"
        remedy = "use a file system with atomic renames"
        yield problem("replacing", what, remedy, exit=Exit.STORAGE)
    yield from _judge_locks(results, members)
    speeds = {
        member.host: result["speed"]
        for member, result in zip(members, results, strict=True)
        if result["speed"] is not None
    }
    if speeds:
        slowest = min(speeds, key=lambda host: speeds[host])
        what = f"{speeds[slowest] / 1e6:,.0f} MB/s write speed"
        what += f" on {slowest}, the slowest of {len(speeds)} nodes" if len(speeds) > 1 else ""
        if speeds[slowest] < MIN_SPEED:
            yield problem("disk speed", what, "checkpoints go to this disk: choose a faster one")
        else:
            yield Finding("disk speed", what)


def _judge_delays(measured: Mapping[str, Any], members: Sequence[Member]) -> Iterator[Finding]:
    results = measured["processes"]
    delays = {
        key: [VISIBLE_TIMEOUT if result[key] is None else result[key] for result in results]
        for key in ("written", "listed")
    }
    slowest = max(max(times) for times in delays.values())
    multi_node = len({member.host for member in members}) > 1
    what = f"{measured['folder']}{' is shared' if multi_node else ', on one node'}; all processes "
    what += f"see a write within {short_time(slowest)}"
    if slowest < MAX_DELAY:
        yield Finding("folder", what)
        return
    late = [
        member.label
        for rank, member in enumerate(members)
        if max(times[rank] for times in delays.values()) >= MAX_DELAY
    ]
    remedy = "mount it with a short attribute cache (NFS: actimeo=1), or use another folder"
    what = f"{join_names(late)} saw what rank 0 wrote to {measured['folder']} only after "
    yield problem("folder", what + format_seconds(slowest), remedy, exit=Exit.STORAGE)


def _judge_locks(
    results: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    if len(members) > 1 and all(result["refused"] is None for result in results):
        what = "this file system does not support locks"
        remedy = "use a file system with locks (NFS: without nolock; Lustre: mount with flock)"
        yield problem("locks", what, remedy, exit=Exit.STORAGE)
        return
    pairs = list(zip(members, results, strict=True))
    ignored = [member.label for member, result in pairs if result["refused"] is False]
    stuck = [member.label for member, result in pairs if result["let_in"] is False]
    if ignored:
        what = f"{join_names(ignored)} could lock what rank 0 on {members[0].host} had locked"
        remedy = "two runs could use one folder: mount it with locks between nodes (Lustre: flock, "
        remedy += "not localflock; NFS: without local_lock)"
        yield problem("locks", what, remedy, exit=Exit.STORAGE)
    elif stuck:
        what = f"{join_names(stuck)} could not lock what rank 0 had released"
        yield problem(
            "locks", what, "check that the NFS lock service is running", exit=Exit.STORAGE
        )
    elif len(members) > 1:
        yield Finding("locks", "a lock excludes all other processes")
