"""How much memory this process may still take, as far as the system says.

    the machine    MemAvailable of /proc/meminfo; where there is none, all that is built in
    cgroups        a container's or a job's limit, less what is used and cannot be taken back
    ulimit -v      less the addresses in use

The least of these is the answer. Login nodes and batch jobs often have far less to give than the
machine has. Pages of files do not count as used: the system drops them when others need the room.

What a training step gives up, the next takes again: `keep_freed_memory`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FILE_PAGES = ("active_file", "inactive_file")


@dataclass(frozen=True)
class _Generation:
    """Where one of the two generations of cgroups keeps its numbers."""

    controller: str
    """What a line of /proc/self/cgroup calls it."""
    mount: str
    limit: str
    used: str


_GENERATIONS = (
    _Generation("", "sys/fs/cgroup", "memory.max", "memory.current"),
    _Generation("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take; `root` is where `proc` and `sys` are."""
    return max(0, min([_of_machine(root), *_of_cgroups(root), *_of_addresses(root)]))


def _of_machine(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controller, path = line.split(":", 2)
        for generation in _GENERATIONS:
            if generation.controller == controller:
                own = root / generation.mount / path.lstrip("/")
                # What a container sees of its path may be its host's: then only the mount is there.
                for folder in (own, *own.parents[: len(Path(path).parts) - 1]):
                    yield from _of_cgroup(folder, generation)


def _of_cgroup(folder: Path, generation: _Generation) -> Iterator[int]:
    limit, used = _lines(folder / generation.limit), _lines(folder / generation.used)
    if limit and used and limit[0].isdigit():
        facts = dict(line.split() for line in _lines(folder / "memory.stat"))
        # Of the older generation, numbers with `total_` include the groups below.
        kept = (facts.get(f"total_{name}", facts.get(name, "0")) for name in _FILE_PAGES)
        yield int(limit[0]) - int(used[0]) + sum(map(int, kept))


def _of_addresses(root: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _lines(root / "proc/self/statm")
    if limit != resource.RLIM_INFINITY and used:
        yield limit - int(used[0].split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _lines(file: Path) -> list[str]:
    """The lines of a file of the system; none where there is no such file."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def keep_freed_memory() -> None:
    """Let the allocator keep what was freed for a second, unless somebody said otherwise.

    On ARM torch brings mimalloc, which gives freed memory back to the system within a step of
    training on the CPU; the next step then asks for as many pages again, and for the system to
    clear them takes a twelfth of its time. The variable is read when torch is imported, and means
    nothing to other allocators.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
