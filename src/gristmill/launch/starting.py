"""Starting the processes of a run: all of them on this machine, or those of one node of several.

A supervisor (`processes.py`) asks a `Starter` for processes and does not know where they run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gristmill.base.errors import UserError
from gristmill.base.exits import SUPERVISOR
from gristmill.base.process import Address, usable_cores


class Process(Protocol):
    """A process that was started, here or on another machine."""

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""

    def kill(self) -> None:
        """Kill it, with the processes that it has started."""

    def wait(self) -> object:
        """Wait until it is gone."""


class Starter(Protocol):
    """Starts the processes that one supervisor looks after."""

    @property
    def ranks(self) -> Sequence[int]:
        """Which processes of the run these are."""

    def prepare(self, interrupted: Callable[[], bool]) -> None:
        """Find a rendezvous for all of them, before each attempt; if that takes long, `interrupted`
        says whether to give up."""

    def start(self, rank: int, command: Sequence[str], log: Path) -> Process:
        """Start one process, whose output goes to the log; that of rank 0 to the terminal."""


@dataclass
class LocalStarter:
    """Starts processes on this machine."""

    processes: int
    """How many the whole run has."""
    nodes: int = 1
    node: int = 0
    address: Address | None = None
    """The rendezvous; a free port of this machine if not given."""

    @property
    def ranks(self) -> range:
        each = self.processes // self.nodes
        return range(self.node * each, (self.node + 1) * each)

    def prepare(self, interrupted: Callable[[], bool]) -> None:
        if self.nodes == 1:
            self.address = Address("127.0.0.1", free_port("127.0.0.1"))

    def start(self, rank: int, command: Sequence[str], log: Path) -> LocalProcess:
        assert self.address is not None
        host, port = self.address
        environment = process_environment(
            rank, processes=self.processes, port=port, host=host, nodes=self.nodes
        )
        return LocalProcess(command, environment, log if rank else None)


class LocalProcess:
    """A process on this machine, in a process group of its own."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None
    ) -> None:
        """Without a log, its output goes where that of this process goes."""
        with contextlib.ExitStack() as files:
            output = None if log is None else files.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        return self._process.wait()


def free_port(host: str) -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def process_environment(
    rank: int,
    *,
    processes: int,
    port: int,
    host: str = "127.0.0.1",
    nodes: int = 1,
    around: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment variables of one process; every node has the same number of them."""
    around = os.environ if around is None else around
    values = {name: text for name, text in around.items() if not name.startswith("TORCHELASTIC_")}
    each = processes // nodes
    values |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % each),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(each),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        SUPERVISOR: str(os.getpid()),
    }
    if each > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // each)))
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and nodes == 1:
        # Gloo accepts every connection to its ports; on one machine no other host needs them.
        values.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    if rank:
        # The log should hold everything that a killed process has printed.
        values.setdefault("PYTHONUNBUFFERED", "1")
    return values


# ------------------------------------------------------------------ GPUs

MANAGEMENT = "libnvidia-ml.so.1"
"""Knows how many GPUs there are without a context on any, within milliseconds."""


def require_gpus(device: str, *, processes: int) -> None:
    """Refuse more processes on this machine than it has GPUs, if they will run on GPUs and not
    share them: NCCL, which they exchange tensors with, does not let two of them share one."""
    count = visible_gpus() if _wants_cuda(device) else None
    if count is None or not 0 < count < processes:
        return
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
    raise UserError(
        f"{processes} processes need a GPU each, and this machine has {count}{seen}",
        where="--processes",
        remedy=f"give --processes {count}; let them share a GPU with parallel.share_gpu=true, to "
        "try a layout; or train on the CPU with runtime.device=cpu",
    )


def visible_gpus() -> int | None:
    """How many GPUs a process of this machine may use, at most; None if that is not known."""
    count = _installed_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count is None or chosen is None:
        return count
    names: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        # CUDA ignores all that follow one that does not exist.
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < count):
            break
        names.append(name)
    return len(set(names))


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


def _torch_has_cuda() -> bool:
    """Whether the installed torch has been built for CUDA; without importing it."""
    spec = importlib.util.find_spec("torch")
    return (
        spec is not None
        and spec.origin is not None
        and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()
    )
