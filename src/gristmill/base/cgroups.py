"""Control groups: the limits of a container or a job. `root` is where `proc` and `sys` are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


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
