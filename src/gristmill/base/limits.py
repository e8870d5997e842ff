"""How much memory this process may still allocate, how much it could ever have, and on how many
cores it may compute.

    the machine    MemAvailable of /proc/meminfo; without it, all physical memory
    cgroups        the limit of a container or a job, minus what is used and cannot be reclaimed
    ulimit -v      minus the address space in use

The answer is the smallest of these: login nodes and batch jobs often allow far less than the
machine has. Cached file pages do not count as used, since the system drops them when needed.

Control groups hold the limits of a container or a job. `root` is where `proc` and `sys` are.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's groups in which limits of a kind may be, of cgroups v2 and v1:
    its own and those around it."""
    mounts = {"": "sys/fs/cgroup", controller: f"sys/fs/cgroup/{controller}"}
    for line in lines_of(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name not in mounts:
                continue
            own = root / mounts[name] / path.lstrip("/")
            # A container may see the path of its host: then only the mount is there.
            yield from (own, *own.parents[: len(Path(path).parts) - 1])


def core_limit(root: Path = Path("/")) -> int | None:
    """How many cores' worth of time this process may use; None without a limit."""
    limits = []
    for folder in group_folders("cpu", root):
        words = " ".join(lines_of(folder / "cpu.max"))
        for kind in ("quota", "period"):
            words += " " + " ".join(lines_of(folder / f"cpu.cfs_{kind}_us"))
        match words.split():
            case [quota, period] if quota.isdigit() and int(period) > 0:
                limits.append(max(1, math.ceil(int(quota) / int(period))))
    return min(limits, default=None)


def lines_of(file: Path) -> list[str]:
    """The lines of a system file; none if it does not exist."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


_FILE_PAGES = ("active_file", "inactive_file")
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of limit and usage in cgroups v2 and v1."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still allocate; `root` is where `proc` and `sys` are."""
    in_groups = (group.limit - group.used for group in _cgroups(root))
    return max(0, min([_of_machine(root), *in_groups, *_of_addresses(root)]))


def memory_limit(root: Path = Path("/"), *, processes: int = 1) -> int | None:
    """Bytes that this process can certainly not exceed, even if nothing else ran: of the machine's
    memory and swap it has an equal part with the `processes` like it. None if not known."""
    facts = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines_of(root / "proc/meminfo"))
        if name in ("MemTotal", "SwapTotal")
    }
    swap = facts.get("SwapTotal", 0)
    limits = [(facts["MemTotal"] + swap) // processes] if "MemTotal" in facts else []
    limits += [group.limit + swap for group in _cgroups(root)]
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits += [addresses] if addresses != resource.RLIM_INFINITY else []
    return min(limits, default=None)


def _of_machine(root: Path) -> int:
    for line in lines_of(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Cgroup(NamedTuple):
    """Bytes that a control group may use and does use, without file pages."""

    limit: int
    used: int


def _cgroups(root: Path) -> Iterator[_Cgroup]:
    for folder in group_folders("memory", root):
        for limit_file, used_file in _LIMITS:
            limit, used = lines_of(folder / limit_file), lines_of(folder / used_file)
            if limit and used and limit[0].isdigit():
                facts = dict(line.split() for line in lines_of(folder / "memory.stat"))
                # In v1, numbers with `total_` include the groups below.
                kept = (facts.get(f"total_{name}", facts.get(name, "0")) for name in _FILE_PAGES)
                yield _Cgroup(int(limit[0]), int(used[0]) - sum(map(int, kept)))


def _of_addresses(root: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = lines_of(root / "proc/self/statm")
    if limit != resource.RLIM_INFINITY and used:
        yield limit - int(used[0].split()[0]) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory for a second, unless the user has set this otherwise.

    On ARM torch uses mimalloc, which would return it to the system within a training step: to clear
    the pages again takes a twelfth of the next step's time. It is read when torch is imported.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
