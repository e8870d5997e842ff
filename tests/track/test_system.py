"""System metrics: the host as it is, and GPUs as a stand-in for NVML tells of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gristmill.base.units import Progress
from gristmill.track import system
from gristmill.track.metrics import from_json, to_json
from gristmill.track.records import SystemRecord
from gristmill.track.system import Gpus, SystemSample, SystemSampler

LONG = 60.0


@dataclass
class Gpu:
    """What the stand-in tells of one GPU."""

    uuid: str
    use: int = 50
    used: int = 2**30
    milliwatts: int = 100_000
    millijoules: int | None = 0
    celsius: int = 40
    mhz: int = 1980
    reasons: int = 0


class StandInNvml(ModuleType):
    """NVML with the GPUs given. What `without` names raises, as on hardware that cannot tell."""

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: Gpu, without: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.gpus, self.without, self.open = gpus, without, 0

    def _check(self, name: str) -> None:
        if name in self.without:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:
        return gpu.uuid.encode()

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:
        self._check("use")
        return SimpleNamespace(gpu=gpu.use, memory=1)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:
        self._check("memory")
        return SimpleNamespace(used=gpu.used, total=2**37)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == 0
        return gpu.celsius

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, kind: int) -> int:
        assert kind == 1
        return gpu.mhz

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        self._check("power")
        return gpu.milliwatts

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:
        if gpu.millijoules is None:
            raise self.NVMLError("Not Supported")
        return gpu.millijoules

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return gpu.reasons


Install = Callable[..., StandInNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*gpus: Gpu, **options: Any) -> StandInNvml:
        nvml = StandInNvml(*gpus, **options)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def two() -> tuple[Gpu, Gpu]:
    return (
        Gpu("GPU-aaaa-1", use=90, used=3 * 2**30, milliwatts=650_000, celsius=60, mhz=1900),
        Gpu("GPU-bbbb-2", use=70, used=5 * 2**30, milliwatts=550_000, celsius=71, mhz=1500),
    )


# ------------------------------------------------------------------ GPUs


def test_gpus_are_summed_up(install: Install) -> None:
    install(*two())
    assert Gpus().read() == {
        "gpus": 2, "gpu_use": 0.8, "gpu_memory_bytes": 5 * 2**30, "gpu_watts": 1200.0,
        "gpu_celsius": 71.0, "gpu_mhz": 1500.0, "gpu_throttled": None, "joules": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["a", "b"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", ["b"]),
        ("1,0", ["b", "a"]),
        ("1,7,0", ["b"]),
        ("GPU-bbbb", ["b"]),
        ("GPU-bbbb-2, GPU-aaaa-1", ["b", "a"]),
        ("GPU-cccc", []),
        ("MIG-1", ["MIG-1"]),
        ("MIG-2", []),
    ],
)
def test_only_visible_gpus_count(
    visible: str | None, seen: list[str], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(*two(), Gpu("MIG-1"))
    if visible is None:
        seen = [*seen, "MIG-1"]  # the stand-in has it in its list
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = Gpus()
    names = {"GPU-aaaa-1": "a", "GPU-bbbb-2": "b"}
    found = [gpu.handle.uuid for gpu in gpus._gpus]
    assert [names.get(uuid, uuid) for uuid in found] == seen
    assert gpus.read().get("gpus", 0) == len(seen)


def test_gpus_of_others_are_left_out(install: Install) -> None:
    install(*two())
    assert Gpus(most=1).read()["gpu_watts"] == 650.0


def test_a_run_on_the_cpu_does_not_ask_nvml(install: Install) -> None:
    nvml = install(*two())
    assert Gpus(most=0).read() == {}
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ((0x1, 0x2), None),  # idle, and clocks that somebody has set
        ((0x20, 0), "thermal"),
        ((0x40 | 0x8, 0), "thermal"),
        ((0, 0x4), "power"),
        ((0x80 | 0x8, 0), "power"),
        ((0x4, 0x20), "thermal, power"),
        ((0x8, 0), "hardware"),
    ],
)
def test_why_a_clock_is_low(reasons: tuple[int, int], said: str | None, install: Install) -> None:
    one, other = two()
    install(replace(one, reasons=reasons[0]), replace(other, reasons=reasons[1]))
    assert Gpus().read()["gpu_throttled"] == said


def test_energy_is_the_difference_of_the_counters(install: Install) -> None:
    one, other = two()
    one.millijoules, other.millijoules = 5_000_000, 7_000_000
    install(one, other)
    gpus = Gpus()
    assert gpus.read()["joules"] == 0.0
    one.millijoules, other.millijoules = 5_700_000, 7_300_000
    assert gpus.read()["joules"] == 1000.0
    one.millijoules = 5_800_000
    assert gpus.read()["joules"] == 1100.0


def test_energy_without_counters_is_power_over_time(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(system, "time", SimpleNamespace(monotonic=lambda: now))
    gpu = Gpu("GPU-a", millijoules=None, milliwatts=200_000)
    install(gpu)
    gpus = Gpus()
    gpus.read()
    now, gpu.milliwatts = 110.0, 400_000
    assert gpus.read()["joules"] == 3000.0


def test_a_counter_that_begins_anew(install: Install) -> None:
    """As after a reset of the driver."""
    gpu = Gpu("GPU-a", millijoules=9_000_000)
    install(gpu)
    gpus = Gpus()
    gpus.read()
    gpu.millijoules = 1_000
    before = gpus.read()["joules"]
    assert 0 <= before < 9000.0
    gpu.millijoules = 6_000
    assert gpus.read()["joules"] == pytest.approx(before + 5.0, abs=0.11)


def test_what_a_gpu_cannot_tell_is_left_out(install: Install) -> None:
    install(Gpu("GPU-a", millijoules=None), without=("use", "memory", "power"))
    values = Gpus().read()
    assert values["gpus"] == 1
    assert {name for name, value in values.items() if value is None} == {
        "gpu_use", "gpu_memory_bytes", "gpu_watts", "gpu_throttled", "joules",
    }  # fmt: skip


def test_a_driver_that_cannot_be_opened(install: Install) -> None:
    install(*two(), without=("nvmlInit",))
    gpus = Gpus()
    assert gpus.read() == {}
    gpus.close()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().read() == {}


# ------------------------------------------------------------------ the sampler


def sampled(sampler: SystemSampler) -> SystemSample:
    """Its first sample."""
    sampler.start()
    deadline = time.monotonic() + LONG
    while (sample := sampler.latest()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return sample


def test_this_host(tmp_path: Path, install: Install) -> None:
    nvml = install(*two())
    sampler = SystemSampler(0.05, tmp_path, host="n7")
    sample = sampled(sampler)
    sampler.stop()
    assert sample.host == "n7"
    assert sample.cpu_use is not None
    assert 0 <= sample.cpu_use <= 1
    assert sample.ram_bytes is not None
    assert sample.ram_bytes > 10 * 2**20
    assert sample.disk_free is not None
    assert sample.disk_free > 0
    for rate in (sample.disk_read, sample.disk_write, sample.net_sent, sample.net_received):
        assert rate is None or rate >= 0
    assert (sample.gpus, sample.gpu_watts) == (2, 1200.0)
    assert nvml.open == 0


def test_the_end_takes_a_last_sample(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_SOON", 0.0)
    monkeypatch.setattr(system, "_LEAVING", LONG)
    gpu = Gpu("GPU-a")
    install(gpu)
    sampler = SystemSampler(LONG * LONG, tmp_path)
    assert sampled(sampler).joules == 0.0
    gpu.millijoules = 5_000
    sampler.stop()
    assert sampler.joules() == 5.0


def test_a_host_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No psutil, no NVML, no file system: the run goes on."""
    for name in ("psutil", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(system, "_RAPL", tmp_path)
    sampler = SystemSampler(0.05, tmp_path / "missing", host="n7")
    assert sampled(sampler) == SystemSample(host="n7")
    sampler.stop()
    assert sampler.joules() is None


def test_a_library_that_breaks_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace()  # it has none of its functions
    monkeypatch.setitem(sys.modules, "psutil", broken)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    sampler = SystemSampler(0.05, tmp_path, host="n7")
    sampler.start()
    sampler.stop()
    latest = sampler.latest()
    assert latest is None or latest.cpu_use is None


def test_an_end_before_the_beginning(tmp_path: Path) -> None:
    sampler = SystemSampler(LONG, tmp_path)
    sampler.stop()
    assert sampler.latest() is None


def test_the_energy_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_RAPL", tmp_path)

    def count(zone: str, value: int) -> None:
        (tmp_path / zone).mkdir(exist_ok=True)
        (tmp_path / zone / "energy_uj").write_text(f"{value}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("10000000\n")

    count("intel-rapl:0", 9_000_000)
    count("intel-rapl:1", 1_000_000)
    count("intel-rapl:0:0", 5)  # the cores of the first, which it counts already
    (tmp_path / "intel-rapl:2").mkdir()  # which this user may not read
    energy = system._CpuEnergy()
    assert energy.read() == 0.0
    count("intel-rapl:0:0", 999)
    count("intel-rapl:1", 3_000_000)
    assert energy.read() == 2.0
    count("intel-rapl:0", 1_000_000)  # it was full
    assert energy.read() == 4.0


# ------------------------------------------------------------------ samples


SAMPLE = SystemSample(
    host="n7", cpu_use=0.25, ram_bytes=2**33, disk_read=0.0, disk_write=1.5, disk_free=2**40,
    net_sent=10.0, net_received=20.5, gpus=8, gpu_use=0.97, gpu_memory_bytes=2**36,
    gpu_watts=5200.5, gpu_celsius=71.0, gpu_mhz=1500.0, gpu_throttled="power", joules=3.6e6,
)  # fmt: skip


@pytest.mark.parametrize("sample", [SAMPLE, SystemSample(host="n8")])
def test_a_sample_travels_as_json(sample: SystemSample) -> None:
    assert SystemSample.from_dict(json.loads(json.dumps(sample.as_dict()))) == sample


def test_a_sample_of_another_version() -> None:
    values = {"host": "n7", "cpu_use": "much", "gpus": 2.5, "disk_free": True, "gpu_mhz": 1500,
              "gpu_watts": float("nan"), "new": 7}  # fmt: skip
    assert SystemSample.from_dict(values) == SystemSample(host="n7", gpu_mhz=1500)


@pytest.mark.parametrize("values", [None, [], "n7", {}, {"host": 7}])
def test_no_sample(values: Any) -> None:
    assert SystemSample.from_dict(values) is None


def test_a_sample_becomes_a_record_of_now() -> None:
    """The time of a run is the sum of the times between its records."""
    before = time.time()
    record = SAMPLE.record(Progress(5, 20, 480))
    assert before <= record.time <= time.time()
    assert isinstance(record, SystemRecord)
    assert (record.step, record.samples, record.tokens) == (5, 20, 480)
    assert (record.host, record.gpus, record.gpu_throttled) == ("n7", 8, "power")
    assert from_json(to_json(record)) == record


def test_importing_it_loads_no_library() -> None:
    code = (
        "import sys; import gristmill.track.system; "
        "print([name for name in ('psutil', 'pynvml', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
