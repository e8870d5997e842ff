"""What a process needs before it can use a GPU, begun while Python imports.

The driver needs a third of a second to find the GPUs of a node and to create a context on one.
CUDA's libraries share that context, so torch finds it done. Triton needs as long to hash itself,
half a gigabyte, since the hash is part of the name of every kernel in its cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from pathlib import Path

DRIVER = "libcuda.so.1"


def start_cuda(device: str, *, local_rank: int) -> list[threading.Thread]:
    """Begin to create the context of this process's GPU and to hash Triton, if a run on this device
    will use them. Whatever is wrong with either, torch says later."""
    wanted = device == "cuda" or (device == "auto" and _torch_has_cuda())
    if not wanted:
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
