"""What a process needs before it can use a GPU, begun while Python imports.

The driver needs a third of a second to find the GPUs of a node and to create a context on one.
CUDA's libraries share that context, so torch finds it done. Triton needs as long to hash itself,
half a gigabyte, since the hash is part of the name of every kernel in its cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from pathlib import Path

from gristmill.base.errors import UserError

DRIVER = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"
"""Knows how many GPUs there are without a context on any, within milliseconds."""


def require_gpus(device: str, *, processes: int) -> None:
    """Refuse more processes on this machine than it has GPUs, if they will run on GPUs: NCCL, which
    they exchange tensors with, does not let two of them share one."""
    count = visible_gpus() if _wants_cuda(device) else None
    if count is None or not 0 < count < processes:
        return
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
    raise UserError(
        f"{processes} processes need a GPU each, and this machine has {count}{seen}",
        where="--processes",
        remedy=f"give --processes {count}, or train on the CPU with runtime.device=cpu",
    )


def visible_gpus() -> int | None:
    """How many GPUs a process of this machine may use, at most; None if that is not known."""
    count = _installed_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count is None or chosen is None:
        return count
    found: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        # CUDA ignores all that follow one that does not exist.
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < count):
            break
        found.append(name)
    return len(set(found))


def _installed_gpus() -> int | None:
    try:
        library = ctypes.CDLL(MANAGEMENT)
        count = ctypes.c_uint()
        if library.nvmlInit_v2() != 0:
            return None
        known = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return count.value if known else None


def _wants_cuda(device: str) -> bool:
    return device == "cuda" or (device == "auto" and _torch_has_cuda())


def start_cuda(device: str, *, local_rank: int) -> list[threading.Thread]:
    """Begin to create the context of this process's GPU and to hash Triton, if a run on this device
    will use them. Whatever is wrong with either, torch says later."""
    if not _wants_cuda(device):
        return []
    threads = [
        threading.Thread(target=_create_context, args=(local_rank,), name="cuda", daemon=True),
        threading.Thread(target=_hash_triton, name="triton", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _torch_has_cuda() -> bool:
    """Whether the installed torch has been built for CUDA; without importing it."""
    spec = importlib.util.find_spec("torch")
    return (
        spec is not None
        and spec.origin is not None
        and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()
    )


def _create_context(local_rank: int) -> None:
    try:
        driver = ctypes.CDLL(DRIVER)  # whose calls let other threads run
    except OSError:
        return
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return
    number = local_rank if count.value > 1 else 0
    if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _hash_triton() -> None:
    # Nothing that it imports is torch's, so the main thread can import torch meanwhile.
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()
