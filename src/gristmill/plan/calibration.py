"""Constants that were measured on a machine, used for it in place of the table's.

    ~/.cache/gristmill/calibration.json
    {"format": 1, "machines": {"a100-80gb": {"device": "NVIDIA A100-SXM4-80GB", "when": "…",
                                             "rates": {"product_share": 0.79, …},
                                             "memory_bandwidth": 1.7e12, "inside": 2.3e11}}}

`rates` has some of the fields of `Rates`. Measured bandwidths are what programs get, so the shares
that stand before them become 1. A file that is damaged or of another format counts as none.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gristmill.base.caches import cache_folder
from gristmill.base.files import write_json
from gristmill.plan.hardware import Hardware, Rates, known_hardware, match_hardware, open_hardware

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """What was measured on one kind of device."""

    kind: str
    """Its name in the table."""
    device: str
    """What it calls itself."""
    when: str
    rates: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float | None = None
    inside: float | None = None
    """Bytes a second of a collective between devices of the machine, each in one direction."""


def calibration_file() -> Path:
    """Where calibrations are kept."""
    return cache_folder() / "calibration.json"


def read_calibrations(file: Path | None = None) -> dict[str, Calibration]:
    """All calibrations of this machine, by kind of device."""
    try:
        values = json.loads((file or calibration_file()).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            return {}
        rows = values["machines"].items()
        known = known_hardware()
        return {kind: _calibration(kind, row) for kind, row in rows if kind in known}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _calibration(kind: str, row: Mapping[str, Any]) -> Calibration:
    known = {item.name for item in fields(Rates)}
    rates = {name: float(value) for name, value in row["rates"].items() if name in known}
    numbers = {name: float(row[name]) for name in ("memory_bandwidth", "inside") if row.get(name)}
    if not all(value >= 0 for value in (*rates.values(), *numbers.values())):
        raise ValueError("negative figures")
    return Calibration(kind, str(row["device"]), str(row["when"]), rates, **numbers)


def write_calibration(calibration: Calibration, file: Path | None = None) -> Path:
    """Keep a calibration beside those of other kinds."""
    file = file or calibration_file()
    machines = {**read_calibrations(file), calibration.kind: calibration}
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        kind: {
            "device": one.device,
            "when": one.when,
            "rates": dict(one.rates),
            "memory_bandwidth": one.memory_bandwidth,
            "inside": one.inside,
        }
        for kind, one in machines.items()
    }
    write_json(file, {"format": FORMAT, "machines": rows})
    return file


def calibrated(hardware: Hardware, calibration: Calibration) -> Hardware:
    """Hardware with what was measured."""
    changes = dict(calibration.rates)
    if calibration.memory_bandwidth:
        changes["memory_share"] = 1.0
    if calibration.inside:
        changes["link_share"] = 1.0
    inside = hardware.inside
    return replace(
        hardware,
        memory_bandwidth=calibration.memory_bandwidth or hardware.memory_bandwidth,
        inside=replace(inside, bandwidth=calibration.inside or inside.bandwidth),
        rates=replace(hardware.rates, **changes),
    )


def this_machine() -> tuple[Hardware, int]:
    """The kind of device that this machine has, and how many; its processor without a GPU."""
    names = nvidia_devices()
    if names:
        name, memory = names[0]
        found = match_hardware(name, memory=memory)
        if found is not None:
            return replace(found, memory=memory), len(names)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return replace(open_hardware("cpu"), memory=pages * size), 1


def nvidia_devices() -> list[tuple[str, int]]:
    """Names and bytes of memory of the NVIDIA devices that programs here may use."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if line.strip()]
        found = [(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(found: list[tuple[str, int]], chosen: str | None) -> list[tuple[str, int]]:
    """Those that CUDA_VISIBLE_DEVICES leaves; names such as GPU-1234 stand for one of the first's
    kind each, since all of a node are usually alike."""
    if chosen is None:
        return found
    left: list[tuple[str, int]] = []
    for one in map(str.strip, chosen.split(",")):
        number = int(one) if one.isdigit() else 0 if one.startswith(("GPU-", "MIG-")) else -1
        if not 0 <= number < len(found):
            break  # as CUDA does, which ignores what follows
        left.append(found[number])
    return left
