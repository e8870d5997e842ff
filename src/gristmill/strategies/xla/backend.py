"""Starts JAX in this process, once: its devices, its compilation cache, other hosts.

This is the only module that checks whether JAX is installed; the others of this folder import it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import time
from typing import Any

from gristmill.base.caches import cache_folder
from gristmill.base.errors import Exit, UserError, optional
from gristmill.base.process import ProcessInfo
from gristmill.base.units import parse_seconds
from gristmill.config.parallel import ParallelConfig
from gristmill.config.schema import RuntimeConfig

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
VERSIONS = ("0.10.2", "0.12")
"""The first release of JAX that was tested, and the first that was not."""
ABORT_SECONDS = 60.0
"""How long the monitor may take to name a lost host, before JAX ends the process."""

_joined: list[ProcessInfo] = []
"""How this process has joined the others, if it has."""


def version_fits(installed: str) -> bool:
    """Whether a release of JAX is one of those in `VERSIONS`."""
    first, end = map(_numbers, VERSIONS)
    return first <= _numbers(installed) < end


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def start_xla(
    runtime: RuntimeConfig, parallel: ParallelConfig, place: ProcessInfo, *, tf32: bool
) -> int:
    """The number of devices of all processes."""
    if runtime.deterministic:
        # Read when the first device is requested.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC}".strip()
    jax: Any = optional("jax", extra="xla", purpose='runtime.device = "xla"')
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    # On a TPU "high" is three products in bf16, on NVIDIA GPUs it is TF32.
    jax.config.update("jax_default_matmul_precision", "high" if tf32 else "highest")
    if place.world > 1 and not _joined:
        _join(jax, parallel, place)
    try:
        return len(jax.devices())
    except RuntimeError as error:
        raise UserError(
            f"JAX finds no device: {(str(error).splitlines() or ['no reason given'])[0]}",
            where="runtime.device",
            remedy="check JAX_PLATFORMS and the drivers, or choose another device",
        ) from error


def _join(jax: Any, parallel: ParallelConfig, place: ProcessInfo) -> None:
    """Connect to the other processes, at a port next to the one of torch."""
    if place.address is None:
        raise UserError(
            f"started as one of {place.world} processes without a rendezvous address",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="set both, or start with torchrun or `gristmill launch`",
        )
    host, port = place.address
    # JAX has a handler of TERM of its own; here TERM means to save and stop.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            f"{host}:{port + 1}",
            num_processes=place.world,
            process_id=place.rank,
            initialization_timeout=int(parse_seconds(parallel.start_timeout)),
        )
    except RuntimeError as error:
        raise UserError(
            f"rank {place.rank} on {place.host} did not find all {place.world} processes at "
            f"{host}:{port + 1}: {str(error).splitlines()[0]}",
            where="parallel.start_timeout",
            remedy="check that all processes were started and can reach this address",
            exit=Exit.PEER,
        ) from error
    _joined.append(place)
    _survive_lost_hosts()


def _survive_lost_hosts() -> None:
    """Let the monitor end this process when another one is lost, with a line that names it.

    JAX would abort the process as soon as the connection to rank 0 breaks, and on exit it would
    wait for lost hosts. Its callback for the former fails with std::bad_cast in JAX 0.10.2, and
    Python's signal handlers run in the main thread only. So a handler in C makes the aborting
    thread, one of JAX's, wait until the monitor has reported. Any other abort is delayed too.
    """
    from jax._src.api import clean_up

    atexit.unregister(clean_up)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(_WAIT_BEFORE_ABORT, ctypes.c_void_p))


_WAIT_BEFORE_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: time.sleep(ABORT_SECONDS))


def leave_xla() -> None:
    """Disconnect from the other processes. Not after an error, since they may never answer."""
    if _joined:
        jax: Any = optional("jax", extra="xla", purpose='runtime.device = "xla"')
        jax.distributed.shutdown()
        _joined.clear()
