"""Peak speed of known devices, from `hardware.toml`."""

from __future__ import annotations

import re
import tomllib
from importlib import resources


def peak_flops(device_name: str, number_format: str = "bf16") -> float | None:
    """Peak dense FLOP/s of a device in a number format (bf16, fp16, tf32 or fp32); None if the
    device is not in the table."""
    table = tomllib.loads((resources.files("gristmill.plan") / "hardware.toml").read_text())
    name = device_name.lower()
    for row in table["device"]:
        if re.search(rf"\b{re.escape(row['match'])}\b", name):
            column = "bf16" if number_format == "fp16" else number_format
            return float(row[f"{column}_tflops"]) * 1e12
    return None
