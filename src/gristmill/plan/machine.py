"""Detects the devices of a machine and their speed, in a few seconds and without torch, which only
a process that times its import loads.

    known NVIDIA GPU      the published figures of its kind, or those of `plan --calibrate`
    unknown NVIDIA GPU    an l4, which is slower than most, with the memory of this GPU
    CPU                   the speed of numpy in products of large and of narrow matrices and in
                          memory copies, or the figures of `plan --calibrate`

CPUs differ by a factor of a hundred, so a fixed estimate would choose models of the wrong size.
Each operation is timed many times and the fastest counts, since other programs only slow it down.
numpy uses all cores unless OMP_NUM_THREADS is set.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import usable_cores
from gristmill.plan.calibration import (
    Calibration,
    calibrated,
    nvidia_devices,
    read_calibrations,
    this_machine,
)
from gristmill.plan.hardware import Hardware, open_hardware
from gristmill.plan.overhead import USUAL_IMPORTS, time_imports

_LARGE = 768
"""Rows and columns of matrices that are large for a CPU."""
_ROWS, _INNER, _OUTER = 2048, 128, 512
"""Size of a matrix product in the smallest preset."""
_COPIED = 2**26
"""Bytes of a copy, more than caches hold."""
_SECONDS = 0.3
"""Time for each operation."""
_MIN_CALLS, _LIMIT = 20, 1.5
"""On a busy machine an operation gets more time for this many calls, up to a limit."""
_TRAINING_SHARE = 0.55
"""Share of numpy's speed that training reaches: modern-nano reached 11k tokens/s on two x86 cores
and 5.1k on one, where numpy's speed alone would give 16 to 18k and 9.4k."""
_UNKNOWN = "l4"


@dataclass(frozen=True)
class Machine:
    """The devices of a machine."""

    hardware: Hardware
    count: int
    described: str
    """Number and name of the devices, as text."""
    source: str
    """A sentence on where the figures of its speed come from."""
    imports: float = USUAL_IMPORTS
    """Seconds that the imports of `train` take."""

    @property
    def is_gpu(self) -> bool:
        return self.hardware.device == "cuda"


def find_machine(*, gpu: str | None = None, gpus: int | None = None) -> Machine:
    """This machine, or one with `gpus` devices of the kind `gpu`."""
    if gpu is not None:
        kind = open_hardware(gpu)
        return Machine(kind, gpus or 1, _device_names(gpus or 1, kind.name), _published(kind))
    if gpus is not None:
        what, remedy = "the kind of GPU is missing", "give --gpu, such as h100-80gb"
        raise UserError(what, where="--gpus", remedy=remedy, exit=Exit.USAGE)
    return replace(_detect(), imports=time_imports())


def _published(hardware: Hardware) -> str:
    return f"The speed is planned from the published figures of {hardware.name}."


def _detect() -> Machine:
    hardware, count = this_machine()
    names = nvidia_devices()
    calibration = read_calibrations().get(hardware.name)
    if names and hardware.device == "cpu":
        name, memory = names[0]
        hardware = replace(open_hardware(_UNKNOWN), memory=memory)
        source = f"The speed is that of an {_UNKNOWN}, since this kind of GPU is unknown."
        return Machine(hardware, len(names), _device_names(len(names), name), source)
    if calibration is not None:
        when = calibration.when[:10]
        source = f"The speed is what `gristmill plan --calibrate` measured on {when}."
    elif hardware.device == "cuda":
        source = _published(hardware)
    else:
        calibration = _time_cpu(hardware)
        source = "The speed is estimated with numpy; `gristmill plan --calibrate` measures it."
    if calibration is not None:
        hardware = calibrated(hardware, calibration)
    if hardware.device == "cuda":
        return Machine(hardware, count, _device_names(count, names[0][0]), source)
    if platform.system() == "Darwin":
        source += " Apple's GPU, which `train` uses, is faster."
    cores = usable_cores()
    return Machine(hardware, 1, f"{cores} {'core' if cores == 1 else 'cores'}", source)


def _device_names(count: int, name: str) -> str:
    return f"{count} x {name}" if count > 1 else f"one {name}"


def _time_cpu(hardware: Hardware) -> Calibration:
    """The speed of products of large and of narrow matrices, and of a memory copy."""
    rng, peak = np.random.default_rng(0), hardware.peak("fp32")
    large = rng.standard_normal((_LARGE, _LARGE), dtype=np.float32)
    tall = rng.standard_normal((_ROWS, _INNER), dtype=np.float32)
    wide = rng.standard_normal((_INNER, _OUTER), dtype=np.float32)
    share = 2 * _LARGE**3 / _fastest(lambda: large @ large) / peak
    slower = _fastest(lambda: tall @ wide) * peak * share / (2 * _ROWS * _INNER * _OUTER)
    target = np.empty(_COPIED, dtype=np.uint8)
    source = np.ones_like(target)
    moved = 2 * _COPIED / _fastest(lambda: np.copyto(target, source))
    rates = {"product_share": _TRAINING_SHARE * share, "half_features": _half_features(slower)}
    return Calibration(hardware.name, "CPU", "", rates, memory_bandwidth=_TRAINING_SHARE * moved)


def _half_features(slower: float) -> float:
    """The size h of a dimension that halves the speed of a product, from how much slower one of
    _INNER by _OUTER is than a large one: (1 + h / inner) (1 + h / outer) = slower."""
    middle = (_INNER + _OUTER) / 2
    inside = middle**2 + _INNER * _OUTER * (slower - 1)
    return max(0.0, math.sqrt(max(inside, 0.0)) - middle)


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of many calls, after one that starts the threads."""
    work()
    best, calls, start = math.inf, 0, time.perf_counter()
    while (begin := time.perf_counter()) < start + (_SECONDS if calls >= _MIN_CALLS else _LIMIT):
        work()
        best, calls = min(best, time.perf_counter() - begin), calls + 1
    return best
