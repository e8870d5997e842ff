"""How much memory there is, by the files of imagined systems."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from gristmill.base.limits import free_memory, keep_freed_memory, memory_limit

MACHINE = "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"


def put(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


NEW = "sys/fs/cgroup"
OLD = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8000 * 1024),
        ({"proc/self/cgroup": "0::/user\n", f"{NEW}/user/memory.max": "max\n"}, 8000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/user/me\n",
                f"{NEW}/user/memory.max": "5000\n",
                f"{NEW}/user/memory.current": "4000\n",
                f"{NEW}/user/memory.stat": "anon 1\nactive_file 200\ninactive_file 300\n",
                f"{NEW}/user/me/memory.max": "max\n",
                f"{NEW}/user/me/memory.current": "4000\n",
            },
            1500,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu:/\n0::/\n",
                f"{OLD}/job/memory.limit_in_bytes": "7000\n",
                f"{OLD}/job/memory.usage_in_bytes": "6000\n",
                f"{OLD}/job/memory.stat": "active_file 1\ntotal_active_file 50\n",
            },
            1050,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/path/of/the/host\n",
                f"{OLD}/memory.limit_in_bytes": "300\n",
                f"{OLD}/memory.usage_in_bytes": "400\n",
            },
            0,
        ),
    ],
    ids=["machine", "no limit", "limit above", "old cgroups", "container, over its limit"],
)
def test_the_least_of_all_limits(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    put(tmp_path, {"proc/meminfo": MACHINE, **files})
    assert free_memory(tmp_path) == expected


def test_a_limit_of_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"proc/meminfo": MACHINE, "proc/self/statm": "2 1 1 1 0 1 0\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100_000, 200_000))
    assert free_memory(tmp_path) == 100_000 - 2 * resource.getpagesize()


@pytest.mark.parametrize(
    ("files", "processes", "expected"),
    [
        ({}, 1, 10_240_000),
        ({}, 4, 2_560_000),
        ({"proc/meminfo": "MemTotal: 100 kB\nSwapTotal: 50 kB\n"}, 1, 153_600),
        (
            {
                "proc/meminfo": "MemTotal: 100 kB\nSwapTotal: 50 kB\n",
                "proc/self/cgroup": "0::/\n",
                f"{NEW}/memory.max": "7000\n",
                f"{NEW}/memory.current": "6000\n",
            },
            1,
            7000 + 51_200,
        ),
    ],
    ids=["machine", "shared by four", "with swap", "container"],
)
def test_what_a_process_could_have_at_most(
    tmp_path: Path, files: dict[str, str], processes: int, expected: int
) -> None:
    put(tmp_path, {"proc/meminfo": "MemTotal: 10000 kB\nSwapTotal: 0 kB\n", **files})
    assert memory_limit(tmp_path, processes=processes) == expected


def test_addresses_limit_every_process_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {"proc/meminfo": "MemTotal: 10000 kB\nSwapTotal: 0 kB\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100_000, 200_000))
    assert memory_limit(tmp_path, processes=4) == 100_000


def test_a_system_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert (memory_limit() or free_memory()) >= free_memory()


def test_this_machine_has_memory(tmp_path: Path) -> None:
    assert free_memory() > 0
    assert free_memory(tmp_path) > 0  # a system that has none of these files


def test_freed_memory_is_kept_unless_somebody_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "10")
    keep_freed_memory()
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "10"
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY")
    keep_freed_memory()
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "1000"
