"""The CUDA context of a process, created while Python imports.

The driver needs a third of a second to find the GPUs of a node and to create a context on one.
CUDA's libraries share that context, so torch finds it done.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from pathlib import Path

DRIVER = "libcuda.so.1"


def start_cuda(device: str, *, local_rank: int) -> threading.Thread | None:
    """Begin to create the context of this process's GPU, if a run on this device will use one.
    Whatever is wrong with it, torch says later."""
    wanted = device == "cuda" or (device == "auto" and _torch_has_cuda())
    if not wanted:
        return None
    thread = threading.Thread(target=_create_context, args=(local_rank,), name="cuda", daemon=True)
    thread.start()
    return thread


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
