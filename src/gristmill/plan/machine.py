"""What a machine trains on and how fast that is, found without torch and in less than a second.

    NVIDIA GPU         the table's figures of its kind, or those of `plan --calibrate`
    another GPU        an l4 with its memory, which is slower than most
    processor          its share of the table's peak, from a product of matrices that numpy times
                       now, or from `plan --calibrate`

Processors differ by a factor of a hundred, so a guess would choose models of the wrong size. The
product is timed several times and the fastest counts, since other programs only make it slower. It
uses the cores that numpy uses, which are all unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import platform
import time
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

_SIZE = 768
"""Rows and columns of the matrices that are multiplied."""
_MOMENT = 0.3
"""Seconds for all products."""
_UNKNOWN = "l4"


@dataclass(frozen=True)
class Machine:
    """The devices that a run would train on."""

    hardware: Hardware
    count: int
    described: str
    """In words: how many, which, how much memory."""
    source: str
    """Where the figures of its speed come from."""

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
    return f"by the figures of {hardware.name}"


def _found() -> Machine:
    hardware, count = this_machine()
    names = nvidia_devices()
    calibration = read_calibrations().get(hardware.name)
    if names and hardware.device == "cpu":
        name, memory = names[0]
        hardware = replace(open_hardware(_UNKNOWN), memory=memory)
        source = f"by the figures of an {_UNKNOWN}, since there are none of this kind"
        return Machine(hardware, len(names), _described(len(names), name), source)
    if calibration is not None:
        source = f"as `gristmill plan --calibrate` measured on {calibration.when[:10]}"
    elif hardware.device == "cuda":
        source = _by_figures(hardware)
    else:
        calibration = _timed_processor(hardware)
        source = "by one product of matrices; `gristmill plan --calibrate` measures more"
    if calibration is not None:
        hardware = calibrated(hardware, calibration)
    if hardware.device == "cuda":
        return Machine(hardware, count, _described(count, names[0][0]), source)
    if platform.system() == "Darwin":
        source += "; Apple's GPU, which `train` takes, is faster"
    cores = usable_cores()
    return Machine(hardware, 1, f"{cores} {'core' if cores == 1 else 'cores'}", source)


def _described(count: int, name: str) -> str:
    return f"{count} x {name}" if count > 1 else f"one {name}"


def _timed_processor(hardware: Hardware) -> Calibration:
    """The share of the table's peak that a large product reaches."""
    matrix = np.random.default_rng(0).standard_normal((_SIZE, _SIZE), dtype=np.float32)
    matrix @ matrix  # the first one starts the threads
    best, end = float("inf"), time.perf_counter() + _MOMENT
    while (begin := time.perf_counter()) < end:
        matrix @ matrix
        best = min(best, time.perf_counter() - begin)
    share = 2 * _SIZE**3 / best / hardware.peak("fp32")
    return Calibration(hardware.name, "processor", "", {"product_share": share})
