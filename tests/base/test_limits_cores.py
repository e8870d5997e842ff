"""How many cores a container or job may use, by the files of imagined systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.base import process
from gristmill.base.limits import core_limit

NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", f"{NEW}/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/pod\n", f"{NEW}/pod/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/pod\n", f"{NEW}/pod/cpu.max": "1000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{NEW}/job/cpu.max": "200000 100000\n",
                f"{NEW}/job/step/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
                f"{OLD}/job/cpu.cfs_quota_us": "600000\n",
                f"{OLD}/job/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/path/of/the/host\n",
                f"{OLD}/cpu.cfs_quota_us": "-1\n",
                f"{OLD}/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
    ids=["none", "no limit", "pod", "tiny", "limit above", "old cgroups", "old, no limit"],
)
def test_the_least_of_all_limits(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert core_limit(tmp_path) == expected


def test_cores_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: range(64), raising=False)
    for limit, cores in ((None, 64), (4, 4), (100, 64)):
        monkeypatch.setattr(process, "core_limit", lambda limit=limit: limit)
        assert process.usable_cores() == cores
