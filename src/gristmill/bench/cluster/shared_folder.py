"""Whether a folder is the same on all nodes, and behaves as runs need it.

    written     rank 0 writes a file in one piece; the others wait until they see it
    replaced    rank 0 replaces it again and again; nobody may ever read a mixture, or nothing
    listed      rank 0 makes files; the others wait until they are listed
    locked      rank 0 locks the folder; all others must be refused, and let in afterwards
    speed       every node writes a file to the disk itself, all at once

All of it happens in a folder of its own, which is removed afterwards.
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
from gristmill.bench.cluster.members import Member, Team, named, short_time
from gristmill.bench.finding import Finding, problem

PATIENCE = 10.0
"""Seconds that a process waits to see what another has written. NFS shows some of it after 3 to 60
seconds, depending on how it is mounted."""
LATE = 3.0
"""Seconds after which it is late: processes of a run ask for what others have just written."""
_POLL = 0.005
_VERSIONS, _FILES = 20, 20
_WRITTEN = 64 * 2**20
SLOW = 50e6
"""Bytes a second on a node below which checkpoints take long."""


def measure_folder(team: Team, *, size: int = _WRITTEN) -> dict[str, Any]:
    """What each process saw; on rank 0."""
    control = team.control
    name = control.broadcast(f".gristmill-doctor-{uuid.uuid4().hex[:12]}")
    folder = team.folder / name
    try:
        began, refused = control.on_rank0(lambda: _begin(folder))
        if refused is not None:
            return {"folder": str(team.folder.absolute()), "refused": refused}
        seen: dict[str, Any] = {"written": _wait_for(lambda: _read(folder / "file") == began)}
        shared = not control.any(seen["written"] is None)
        if shared:
            seen["mixtures"] = _replace(team, folder)
            seen["listed"] = _list(team, folder)
            seen["refused"], seen["let_in"] = _lock(team, folder)
            seen["speed"] = _speed(team, folder, size)
        told = control.gather(seen)
        return {
            "folder": str(team.folder.absolute()),
            "refused": None,
            "shared": shared,
            "processes": told,
        }
    finally:
        if control.is_rank0:
            shutil.rmtree(folder, ignore_errors=True)


def _begin(folder: Path) -> tuple[str, str | None]:
    """Write the first file: its content, and why that was not possible."""
    content = uuid.uuid4().hex
    try:
        folder.mkdir()
        write_atomic(folder / "file", content)
    except OSError as error:
        return content, error.strerror or str(error)
    except UserError as error:
        return content, error.problems[0].what
    return content, None


def _wait_for(seen: Callable[[], bool]) -> float | None:
    """Seconds until something is seen; None if it is not in a reasonable time."""
    began = time.monotonic()
    while not seen():
        if time.monotonic() - began > PATIENCE:
            return None
        time.sleep(_POLL)
    return time.monotonic() - began


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _replace(team: Team, folder: Path) -> int:
    """How often this process read something else than a whole version, while there was one."""
    file, last = folder / "version", _version(_VERSIONS)
    # Everybody sees the first version before the second replaces it.
    team.control.on_rank0(lambda: write_atomic(file, _version(1)))
    _wait_for(lambda: _read(file) is not None)
    team.control.barrier()
    if team.control.is_rank0:
        for number in range(2, _VERSIONS + 1):
            write_atomic(file, _version(number))
        return 0
    whole = {_version(number) for number in range(1, _VERSIONS + 1)}
    wrong, until = 0, time.monotonic() + PATIENCE
    while (found := _read(file)) != last and time.monotonic() < until:
        wrong += found not in whole
        time.sleep(_POLL)
    return wrong


def _version(number: int) -> str:
    return f"{number} " * 10_000


def _list(team: Team, folder: Path) -> float | None:
    names = {f"listed-{number}" for number in range(_FILES)}
    team.control.on_rank0(lambda: _make(folder, names))
    return _wait_for(lambda: names <= set(os.listdir(folder)))


def _make(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).touch()


def _lock(team: Team, folder: Path) -> tuple[bool | None, bool | None]:
    """Whether this process was refused what rank 0 has locked, and let in afterwards."""
    control, lock = team.control, FolderLock(folder)
    problem = control.on_rank0(lambda: _tried(lock))
    if problem is not None:
        return None, None
    refused = None if control.is_rank0 else _is_refused(FolderLock(folder))
    control.barrier()
    lock.release()
    control.barrier()
    # The last process, on another node than rank 0 if there are several.
    let_in = None
    if control.rank == control.size - 1:
        let_in = not _is_refused(FolderLock(folder))
    control.barrier()
    return refused, let_in


def _tried(lock: FolderLock) -> str | None:
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


def _speed(team: Team, folder: Path, size: int) -> float | None:
    """Bytes a second that the first process of each node writes and makes durable."""
    content = os.urandom(2**20) * (size // 2**20)
    team.control.barrier()
    if not team.leads_node:
        return None
    began = time.monotonic()
    with contextlib.suppress(OSError), (folder / f"speed-{team.world.rank}").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.monotonic() - began)
    return None


# ------------------------------------------------------------------ findings


def judge_folder(found: Mapping[str, Any], members: Sequence[Member]) -> Iterator[Finding]:
    """Whether runs can use the folder from all nodes."""
    folder = found["folder"]
    if found["refused"] is not None:
        what = f"rank 0 on {members[0].host} cannot write in {folder}: {found['refused']}"
        yield problem("folder", what, "name another with --folder", exit=Exit.STORAGE)
        return
    seen = found["processes"]
    if not found["shared"]:
        without = sorted(
            {
                member.host
                for member, one in zip(members, seen, strict=True)
                if one["written"] is None
            }
        )
        what = f"{folder} is not shared: {named(without)} did not see what rank 0 on "
        what += f"{members[0].host} wrote there, within {format_seconds(PATIENCE)}"
        remedy = "set `folder` of the run to a place that all nodes mount; try one with --folder"
        yield problem("folder", what, remedy, exit=Exit.STORAGE)
        return
    yield from _judge_freshness(found, members)
    mixed = [member.who for member, one in zip(members, seen, strict=True) if one["mixtures"]]
    if mixed:
        what = f"{named(mixed)} read a file that was not whole while rank 0 replaced it"
        remedy = "use a file system on which a rename is atomic"
        yield problem("replacing", what, remedy, exit=Exit.STORAGE)
    yield from _judge_locks(seen, members)
    speeds = {
        member.host: one["speed"]
        for member, one in zip(members, seen, strict=True)
        if one["speed"] is not None
    }
    if speeds:
        slowest = min(speeds, key=lambda host: speeds[host])
        what = f"{speeds[slowest] / 1e6:,.0f} MB/s written at least"
        what += f", all nodes at once; slowest on {slowest}" if len(speeds) > 1 else ""
        if speeds[slowest] < SLOW:
            yield problem("disk speed", what, "checkpoints go to this disk: choose a faster one")
        else:
            yield Finding("disk speed", what)


def _judge_freshness(found: Mapping[str, Any], members: Sequence[Member]) -> Iterator[Finding]:
    seen = found["processes"]
    waits = {
        what: [PATIENCE if one[what] is None else one[what] for one in seen]
        for what in ("written", "listed")
    }
    slowest = max(max(times) for times in waits.values())
    what = f"{found['folder']} is shared" if len({member.host for member in members}) > 1 else "one"
    what = what if what != "one" else f"{found['folder']}, on one node"
    what += f"; what one process writes, all see within {short_time(slowest)}"
    if slowest < LATE:
        yield Finding("folder", what)
        return
    late = [
        member.who
        for rank, member in enumerate(members)
        if max(times[rank] for times in waits.values()) >= LATE
    ]
    remedy = "mount it with a short cache of attributes (NFS: actimeo=1), or use another place"
    what = f"{named(late)} saw what rank 0 wrote in {found['folder']} only after "
    yield problem("folder", what + format_seconds(slowest), remedy, exit=Exit.STORAGE)


def _judge_locks(seen: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> Iterator[Finding]:
    if len(members) > 1 and all(one["refused"] is None for one in seen):
        what = "files cannot be locked here"
        remedy = "use a file system with locks (NFS: without nolock; Lustre: mount with flock)"
        yield problem("locks", what, remedy, exit=Exit.STORAGE)
        return
    ignored = [
        member.who for member, one in zip(members, seen, strict=True) if one["refused"] is False
    ]
    stuck = [
        member.who for member, one in zip(members, seen, strict=True) if one["let_in"] is False
    ]
    if ignored:
        what = f"{named(ignored)} could lock what rank 0 on {members[0].host} had locked"
        remedy = "two runs could use one folder: mount with locks between nodes (Lustre: flock, "
        remedy += "not localflock; NFS: without local_lock)"
        yield problem("locks", what, remedy, exit=Exit.STORAGE)
    elif stuck:
        what = f"{named(stuck)} could not lock what rank 0 had released"
        yield problem("locks", what, "see whether the lock service of NFS runs", exit=Exit.STORAGE)
    elif len(members) > 1:
        yield Finding("locks", "whoever comes second is refused, from all processes")
