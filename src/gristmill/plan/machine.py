"""What a machine trains on and how fast that is, found without torch and in less than a second.

    NVIDIA GPU         the table's figures of its kind, or those of `plan --calibrate`
    another GPU        an l4 with its memory, which is slower than most
    processor          what numpy reaches now in products of large and of narrow matrices, and in
                       copying memory; or the figures of `plan --calibrate`

Processors differ by a factor of a hundred, so a guess would choose models of the wrong size. Each
is timed many times and the fastest counts, since other programs only make it slower. Products use
the cores that numpy uses, which are all unless OMP_NUM_THREADS says otherwise.
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

_LARGE = 768
"""Rows and columns of matrices that are large for a processor."""
_ROWS, _INNER, _OUTER = 2048, 128, 512
"""A product of the smallest preset."""
_COPIED = 2**26
"""Bytes that are copied, more than caches hold."""
_MOMENT = 0.3
"""Seconds for each,"""
_TIMES, _LONGEST = 20, 1.5
"""but more on a machine that is so busy that there would be few times, up to a limit."""
_REACHED = 0.55
"""What training gets of that: modern-nano read 11k tokens/s on two x86 cores and 5.1k on one, where
16 to 18k and 9.4k would follow from numpy's figures alone."""
_UNKNOWN = "l4"


@dataclass(frozen=True)
class Machine:
    """The devices that a run would train on."""

    hardware: Hardware
    count: int
    described: str
    """In words: how many, which, how much memory."""
    source: str
    """Where the figures of its speed come from, in a sentence."""

    @property
    def is_gpu(self) -> bool:
        return self.hardware.device == "cuda"


def find_machine(*, gpu: str | None = None, gpus: int | None = None) -> Machine:
    """What is here, or so many devices of a kind that is elsewhere."""
    if gpu is not None:
        kind = open_hardware(gpu)
        return Machine(kind, gpus or 1, _described(gpus or 1, kind.name), _by_figures(kind))
    if gpus is not None:
        what, remedy = (
            "of which kind these devices are is not said",
            "give --gpu, such as h100-80gb",
        )
        raise UserError(what, where="--gpus", remedy=remedy, exit=Exit.USAGE)
    return _found()


def _by_figures(hardware: Hardware) -> str:
    return f"The speed is planned from the published figures of {hardware.name}."


def _found() -> Machine:
    hardware, count = this_machine()
    names = nvidia_devices()
    calibration = read_calibrations().get(hardware.name)
    if names and hardware.device == "cpu":
        name, memory = names[0]
        hardware = replace(open_hardware(_UNKNOWN), memory=memory)
        source = f"The speed is that of an {_UNKNOWN}, since nothing is known of this kind."
        return Machine(hardware, len(names), _described(len(names), name), source)
    if calibration is not None:
        when = calibration.when[:10]
        source = f"The speed is what `gristmill plan --calibrate` measured on {when}."
    elif hardware.device == "cuda":
        source = _by_figures(hardware)
    else:
        calibration = _timed_processor(hardware)
        source = "The speed is estimated with numpy; `gristmill plan --calibrate` measures it."
    if calibration is not None:
        hardware = calibrated(hardware, calibration)
    if hardware.device == "cuda":
        return Machine(hardware, count, _described(count, names[0][0]), source)
    if platform.system() == "Darwin":
        source += " Apple's GPU, which `train` takes, is faster."
    cores = usable_cores()
    return Machine(hardware, 1, f"{cores} {'core' if cores == 1 else 'cores'}", source)


def _described(count: int, name: str) -> str:
    return f"{count} x {name}" if count > 1 else f"one {name}"


def _timed_processor(hardware: Hardware) -> Calibration:
    """What products of large and of narrow matrices reach, and a copy."""
    draw, peak = np.random.default_rng(0), hardware.peak("fp32")
    large = draw.standard_normal((_LARGE, _LARGE), dtype=np.float32)
    tall = draw.standard_normal((_ROWS, _INNER), dtype=np.float32)
    wide = draw.standard_normal((_INNER, _OUTER), dtype=np.float32)
    share = 2 * _LARGE**3 / _fastest(lambda: large @ large) / peak
    slower = _fastest(lambda: tall @ wide) * peak * share / (2 * _ROWS * _INNER * _OUTER)
    target = np.empty(_COPIED, dtype=np.uint8)
    source = np.ones_like(target)
    moved = 2 * _COPIED / _fastest(lambda: np.copyto(target, source))
    rates = {"product_share": _REACHED * share, "half_features": _half_features(slower)}
    return Calibration(hardware.name, "processor", "", rates, memory_bandwidth=_REACHED * moved)


def _half_features(slower: float) -> float:
    """The inner and outer size at which a product needs twice the time of its part in a large one,
    if one of _INNER by _OUTER is so much slower: (1 + h / inner) (1 + h / outer) = slower."""
    middle = (_INNER + _OUTER) / 2
    inside = middle**2 + _INNER * _OUTER * (slower - 1)
    return max(0.0, math.sqrt(max(inside, 0.0)) - middle)


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of many times, after one that starts the threads."""
    work()
    best, times, start = math.inf, 0, time.perf_counter()
    while (begin := time.perf_counter()) < start + (_MOMENT if times >= _TIMES else _LONGEST):
        work()
        best, times = min(best, time.perf_counter() - begin), times + 1
    return best
