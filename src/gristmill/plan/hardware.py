"""Peak speed of known devices, from `hardware.toml`."""

from __future__ import annotations

import re
import tomllib
from importlib import resources


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations per second of the device of that name, None if it is not in the
    table."""
    table = tomllib.loads((resources.files("gristmill.plan") / "hardware.toml").read_text())
    name = device_name.lower()
    for row in table["device"]:
        if re.search(rf"\b{re.escape(row['match'])}\b", name):
            return float(row["bf16_tflops"]) * 1e12
    return None
