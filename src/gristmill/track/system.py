"""How busy this host is: CPU, memory, disk, network and GPUs, sampled by a thread at a low rate.

    SystemSampler ── psutil            CPU, memory, disk and network of the whole host
                  ├─ NVML (`pynvml`)   the GPUs that CUDA_VISIBLE_DEVICES leaves this process
                  └─ /sys/…/energy_uj  energy of the CPUs, where it may be read

Energy is the difference of a GPU's own counter, or where it has none, its power over time. Nothing
here can fail a run: what cannot be read is None, and all of it happens in the thread, since a
driver or a file system in trouble may not answer for a long time.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from gristmill.base.units import Progress
from gristmill.track.records import SystemRecord

_FIRST = 1.0
"""Seconds until the first sample, since rates need two readings."""
_SOON = 0.2
"""Seconds after a sample in which no last one is taken: its rates would be noise."""
_LEAVING = 2.0
"""Seconds that the end of the run waits for the last sample."""
_RAPL = Path("/sys/class/powercap")

_TEXTS = ("host", "gpu_throttled")
_COUNTS = ("ram_bytes", "disk_free", "gpus", "gpu_memory_bytes")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemSample:
    """One look at a host; the fields are those of `SystemRecord`."""

    host: str
    cpu_use: float | None = None
    ram_bytes: int | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    disk_free: int | None = None
    net_sent: float | None = None
    net_received: float | None = None
    gpus: int = 0
    gpu_use: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_watts: float | None = None
    gpu_celsius: float | None = None
    gpu_mhz: float | None = None
    gpu_throttled: str | None = None
    joules: float | None = None
    """Energy since the sampler was started; None if nothing tells."""

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold, for other processes; without what is not known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SystemSample | None:
        """The sample of another process; None if this is none."""
        if not isinstance(values, Mapping) or not isinstance(values.get("host"), str):
            return None
        known: dict[str, Any] = {}
        for field in fields(cls):
            value, name = values.get(field.name), field.name
            if name in _TEXTS:
                fits = isinstance(value, str)
            elif name in _COUNTS:
                fits = type(value) is int
            else:
                fits = isinstance(value, int | float) and math.isfinite(value)
            if fits:
                known[name] = value
        return cls(**known)

    def record(self, progress: Progress) -> SystemRecord:
        """As a record of now: records of a run are in the order of their times."""
        names = (field.name for field in fields(self) if field.name != "joules")
        return SystemRecord(
            step=progress.steps,
            samples=progress.samples,
            tokens=progress.tokens,
            time=time.time(),
            **{name: getattr(self, name) for name in names},
        )


class SystemSampler:
    """Samples this host every `interval` seconds in a daemon thread between `start` and `stop`.

    `path` is a folder whose file system matters. `gpus`: how many of the visible GPUs the run uses
    on this host, from the first on; all if None. The others, and their energy, are left out.
    """

    def __init__(
        self, interval: float, path: Path, *, gpus: int | None = None, host: str | None = None
    ) -> None:
        self.interval, self.path, self.gpus = interval, path, gpus
        self.host = socket.gethostname() if host is None else host
        self._latest: SystemSample | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take a last sample, and end the thread; one that hangs in a driver is left behind."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_LEAVING)

    def latest(self) -> SystemSample | None:
        """The newest sample; None before the first."""
        return self._latest

    def joules(self) -> float | None:
        """Energy from the start to the newest sample; None if nothing tells."""
        return None if self._latest is None else self._latest.joules

    def _run(self) -> None:
        gpus = Gpus(most=self.gpus)
        host, energy = _Host(self.path), _CpuEnergy()
        for begin in (host.read, energy.read, gpus.read):
            _ask(begin)
        pause, then = min(_FIRST, self.interval), time.monotonic()
        while not self._stopping.is_set():
            self._stopping.wait(pause)
            pause, passed = self.interval, time.monotonic() - then
            if self._latest is None or passed >= _SOON:
                then = time.monotonic()
                self._latest = _ask(self._sample, host, energy, gpus) or self._latest
        gpus.close()

    def _sample(self, host: _Host, energy: _CpuEnergy, gpus: Gpus) -> SystemSample:
        values = host.read() | gpus.read()
        known = [one for one in (values.pop("joules", None), energy.read()) if one is not None]
        return SystemSample(host=self.host, joules=sum(known) if known else None, **values)


def _ask(question: Callable[..., T], *given: Any) -> T | None:
    """The answer of a library; None if the machine has none, for whatever reason."""
    try:
        return question(*given)
    # NVML and psutil have errors of their own, and a broken installation raises anything.
    except Exception:
        return None


# ------------------------------------------------------------------ the host


class _Host:
    """Readings of the operating system; rates are those since the reading before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._psutil = _ask(importlib.import_module, "psutil")
        self._before: dict[str, float] = {}
        self._then = time.monotonic()

    def read(self) -> dict[str, Any]:
        now, psutil = time.monotonic(), self._psutil
        seconds, self._then = now - self._then, now
        values: dict[str, Any] = {}
        usage = _ask(shutil.disk_usage, self._path)
        values["disk_free"] = None if usage is None else usage.free
        if psutil is None:
            return values
        percent = _ask(psutil.cpu_percent)
        values["cpu_use"] = None if percent is None else round(percent / 100, 4)
        memory = _ask(psutil.virtual_memory)
        values["ram_bytes"] = None if memory is None else memory.total - memory.available
        counts = dict(_ask(self._counts) or {})
        for name, count in counts.items():
            passed = count - self._before.get(name, count)
            # A counter begins anew when a device goes away.
            known = name in self._before and seconds > 0 and passed >= 0
            values[name] = round(passed / seconds, 1) if known else None
        self._before = counts
        return values

    def _counts(self) -> Iterator[tuple[str, float]]:
        """Bytes since the host was started."""
        assert self._psutil is not None
        disk = _ask(self._psutil.disk_io_counters)
        if disk is not None:
            yield from (("disk_read", disk.read_bytes), ("disk_write", disk.write_bytes))
        by_interface = _ask(lambda psutil: psutil.net_io_counters(pernic=True), self._psutil) or {}
        wires = [count for name, count in by_interface.items() if not name.startswith("lo")]
        if wires:
            yield "net_sent", sum(wire.bytes_sent for wire in wires)
            yield "net_received", sum(wire.bytes_recv for wire in wires)


class _CpuEnergy:
    """The energy that the processors have counted, where the kernel lets this user read it."""

    def __init__(self) -> None:
        # A zone with one colon is a whole processor; others are parts of one.
        self._zones = [
            zone for zone in (_ask(lambda: sorted(_RAPL.glob("intel-rapl:*"))) or ())
            if zone.name.count(":") == 1
        ]  # fmt: skip
        self._before: dict[Path, int] = {}
        self._joules = 0.0

    def read(self) -> float | None:
        """Joules since the first reading."""
        for zone in self._zones:
            count = _ask(_number, zone / "energy_uj")
            if count is None:
                continue
            passed = count - self._before.get(zone, count)
            if passed < 0:  # the counter is full and began anew
                passed += _ask(_number, zone / "max_energy_range_uj") or -passed
            self._before[zone] = count
            self._joules += passed / 1e6
        return self._joules if self._before else None


def _number(path: Path) -> int:
    return int(path.read_text())


# ------------------------------------------------------------------ GPUs

_THROTTLED = (
    ("thermal", 0x20 | 0x40),  # software and hardware thermal slowdown
    ("power", 0x04 | 0x80),  # software power cap, and power brake
)
_HARDWARE = 0x08
"""A slowdown for either reason, of which older GPUs do not say more."""


@dataclass(slots=True)
class _Gpu:
    handle: Any
    millijoules: int | None = None
    """Its counter at the reading before."""
    watts: float | None = None
    """Its power at the reading before."""
    joules: float = 0.0
    """Energy since the first reading."""
    counted: bool = False
    """Whether anything tells its energy."""


class Gpus:
    """The GPUs of this process, as NVML knows them; none where there is no NVML."""

    def __init__(self, *, most: int | None = None) -> None:
        """`most`: how many of the visible ones are meant; all if None."""
        self._nvml: Any = _ask(importlib.import_module, "pynvml") if most != 0 else None
        self._gpus: list[_Gpu] = []
        self._then = time.monotonic()
        if self._nvml is not None:
            try:
                self._nvml.nvmlInit()
            # No driver, no library, no permission: there is nothing to read.
            except Exception:
                self._nvml = None
            else:
                given = os.environ.get("CUDA_VISIBLE_DEVICES")
                self._gpus = [_Gpu(handle) for handle in (_ask(self._visible, given) or ())[:most]]

    def close(self) -> None:
        """Release the library."""
        if self._nvml is not None:
            _ask(self._nvml.nvmlShutdown)

    def read(self) -> dict[str, Any]:
        """The fields of a sample that are about GPUs, and `joules`."""
        now = time.monotonic()
        seconds, self._then = now - self._then, now
        if not self._gpus:
            return {}
        nvml, handles = self._nvml, [gpu.handle for gpu in self._gpus]

        def ask(name: str, *given: Any) -> list[Any]:
            answers = (_ask(getattr(nvml, name, _missing), one, *given) for one in handles)
            return [answer for answer in answers if answer is not None]

        watts = [self._count_energy(gpu, seconds) for gpu in self._gpus]
        use = [rates.gpu / 100 for rates in ask("nvmlDeviceGetUtilizationRates")]
        memory = [int(memory.used) for memory in ask("nvmlDeviceGetMemoryInfo")]
        celsius = ask("nvmlDeviceGetTemperature", 0)  # of the GPU itself
        clocks = ask("nvmlDeviceGetClockInfo", 1)  # of its multiprocessors
        known = [power for power in watts if power is not None]
        counted = [gpu.joules for gpu in self._gpus if gpu.counted]
        return {
            "gpus": len(handles),
            "gpu_use": round(sum(use) / len(use), 4) if use else None,
            "gpu_memory_bytes": max(memory, default=None),
            "gpu_watts": round(sum(known), 1) if known else None,
            "gpu_celsius": max(map(float, celsius), default=None),
            "gpu_mhz": min(map(float, clocks), default=None),
            "gpu_throttled": self._throttled(ask),
            "joules": round(sum(counted), 1) if counted else None,
        }

    def _visible(self, given: str | None) -> list[Any]:
        nvml = self._nvml
        handles = [
            _ask(nvml.nvmlDeviceGetHandleByIndex, number)
            for number in range(nvml.nvmlDeviceGetCount())
        ]
        if given is None:
            return [handle for handle in handles if handle is not None]
        chosen = []
        for name in (part.strip() for part in given.split(",")):
            handle = self._named(name, handles)
            if handle is None:
                break  # as CUDA does: what follows a wrong name is not visible
            chosen.append(handle)
        return chosen

    def _named(self, name: str, handles: list[Any]) -> Any:
        """The GPU with a number, or with an identifier that begins so; None if there is none."""
        if name.isdecimal():
            return handles[int(name)] if int(name) < len(handles) else None
        if name.startswith("MIG-"):
            return _ask(self._nvml.nvmlDeviceGetHandleByUUID, name)
        for handle in handles:
            uuid = _ask(self._nvml.nvmlDeviceGetUUID, handle)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            if name.startswith("GPU-") and uuid is not None and uuid.startswith(name):
                return handle
        return None

    def _count_energy(self, gpu: _Gpu, seconds: float) -> float | None:
        """Add the energy since the reading before; returns the power in watts."""
        milliwatts = _ask(self._nvml.nvmlDeviceGetPowerUsage, gpu.handle)
        watts = None if milliwatts is None else milliwatts / 1000
        count = _ask(
            getattr(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", _missing), gpu.handle
        )
        gpu.counted = gpu.counted or count is not None or watts is not None
        if count is not None and gpu.millijoules is not None and count >= gpu.millijoules:
            gpu.joules += (count - gpu.millijoules) / 1000
        elif watts is not None and gpu.watts is not None:
            gpu.joules += (watts + gpu.watts) / 2 * seconds
        gpu.millijoules, gpu.watts = count, watts
        return watts

    def _throttled(self, ask: Callable[[str], list[Any]]) -> str | None:
        # The second name is that of older drivers.
        masks = ask("nvmlDeviceGetCurrentClocksEventReasons")
        masks = masks or ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        reasons = 0
        for mask in masks:
            reasons |= int(mask)
        names = [name for name, bits in _THROTTLED if reasons & bits]
        if not names and reasons & _HARDWARE:
            names = ["hardware"]
        return ", ".join(names) or None


def _missing(*given: Any) -> None:
    """What a function answers that this version of the library does not have."""
