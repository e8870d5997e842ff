"""Driver version and GPU health from NVIDIA's management library (NVML), where available."""

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
"""Bits of the reasons for a lower clock that the user did not choose."""


def _query(function: Callable[..., T], *args: Any) -> T | None:
    """The result of a function of NVML; None if it is not available."""
    try:
        return function(*args)
    # NVML raises its own errors for whatever a driver or a GPU does not support.
    except Exception:
        return None


def _open() -> Any:
    nvml = _query(importlib.import_module, "pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except Exception:  # no driver, or no permission
        return None
    return nvml


def driver_version() -> str | None:
    """The version of the driver; None if it is not available."""
    nvml = _open()
    if nvml is None:
        return None
    driver = _query(nvml.nvmlSystemGetDriverVersion)
    _query(nvml.nvmlShutdown)
    return driver.decode() if isinstance(driver, bytes) else driver


def gpu_health(uuid: str) -> dict[str, Any]:
    """Clock, power, temperature and errors of a GPU, as far as they are available."""
    nvml = _open()
    if nvml is None:
        return {}
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = _query(nvml.nvmlDeviceGetHandleByUUID, name)
    values: dict[str, Any] = {}
    if handle is not None:
        remapped = _query(nvml.nvmlDeviceGetRemappedRows, handle)
        reasons = _query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        milliwatts = {
            "watts": _query(nvml.nvmlDeviceGetPowerUsage, handle),
            "watts_limit": _query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        }
        values = {
            "mhz": _query(nvml.nvmlDeviceGetClockInfo, handle, 1),
            "mhz_most": _query(nvml.nvmlDeviceGetMaxClockInfo, handle, 1),
            **{key: None if value is None else value / 1000 for key, value in milliwatts.items()},
            "celsius": _query(nvml.nvmlDeviceGetTemperature, handle, 0),
            "throttled": None if reasons is None else _throttle_reasons(int(reasons)),
            # Uncorrected errors since the driver was loaded.
            "ecc_errors": _query(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            "ecc_errors_ever": _query(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 1),
        }
        if remapped is not None:
            corrected, uncorrected, pending, failed = remapped
            values |= {
                "rows_remapped": corrected + uncorrected,
                "rows_pending": bool(pending),
                "rows_failed": bool(failed),
            }
    _query(nvml.nvmlShutdown)
    return {key: value for key, value in values.items() if value is not None}


def _throttle_reasons(reasons: int) -> list[str]:
    return [name for name, bits in _THROTTLED.items() if reasons & bits]
