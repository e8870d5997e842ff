"""What NVIDIA's management library (NVML) says of a GPU; nothing where there is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_THROTTLED = {
    "thermal": 0x20 | 0x40,
    "power": 0x04 | 0x80,
    "hardware": 0x08,
}
"""Reasons for a lower clock that are not the user's choice."""


def _ask(question: Callable[..., T], *given: Any) -> T | None:
    """The answer of the library; None if this one has none."""
    try:
        return question(*given)
    # NVML has errors of its own for whatever a driver or a GPU does not support.
    except Exception:
        return None


def _open() -> Any:
    nvml = _ask(importlib.import_module, "pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except Exception:  # no driver, or no permission
        return None
    return nvml


def driver_version() -> str | None:
    """The version of the driver; None if it does not tell."""
    nvml = _open()
    if nvml is None:
        return None
    found = _ask(nvml.nvmlSystemGetDriverVersion)
    _ask(nvml.nvmlShutdown)
    return found.decode() if isinstance(found, bytes) else found


def gpu_health(uuid: str) -> dict[str, Any]:
    """Clock, power, temperature and errors of a GPU; without what it does not tell."""
    nvml = _open()
    if nvml is None:
        return {}
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = _ask(nvml.nvmlDeviceGetHandleByUUID, name)
    values: dict[str, Any] = {}
    if handle is not None:
        remapped = _ask(nvml.nvmlDeviceGetRemappedRows, handle)
        reasons = _ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        milliwatts = {
            "watts": _ask(nvml.nvmlDeviceGetPowerUsage, handle),
            "watts_limit": _ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        }
        values = {
            "mhz": _ask(nvml.nvmlDeviceGetClockInfo, handle, 1),
            "mhz_most": _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, 1),
            **{key: None if value is None else value / 1000 for key, value in milliwatts.items()},
            "celsius": _ask(nvml.nvmlDeviceGetTemperature, handle, 0),
            "throttled": None if reasons is None else _names(int(reasons)),
            # Errors that were not corrected, since the driver was loaded.
            "ecc_errors": _ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            "ecc_errors_ever": _ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 1),
        }
        if remapped is not None:
            corrected, uncorrected, pending, failed = remapped
            values |= {
                "rows_remapped": corrected + uncorrected,
                "rows_pending": bool(pending),
                "rows_failed": bool(failed),
            }
    _ask(nvml.nvmlShutdown)
    return {key: value for key, value in values.items() if value is not None}


def _names(reasons: int) -> list[str]:
    return [name for name, bits in _THROTTLED.items() if reasons & bits]
