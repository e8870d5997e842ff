"""What NCCL and Gloo say when an exchange fails, in words that a user can act on.

Such an error is no defect of this program: a process was lost, a device or a link failed, or the
nodes are set up wrongly. The monitor asks first whether another process is to blame
(`liveness/monitor.py`); what is explained here is left when none is known.

Only what the message itself names is explained; any other error stays what it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_seconds

_DOCTOR = "try the links with `gristmill doctor --cluster`, started as the run is"
_DEBUG = f"NCCL_DEBUG=INFO makes NCCL say more; {_DOCTOR}"


@dataclass(frozen=True)
class _Known:
    """A kind of failure, found by its words."""

    pattern: str
    what: str
    remedy: str
    exit: Exit = Exit.PEER


_NCCL = (
    _Known(
        r"Duplicate GPU detected",
        "two processes use the same GPU",
        "start one process for each GPU, or let every process see all GPUs of its node; to try a "
        "layout, let processes share a GPU with parallel.share_gpu = true",
        Exit.CONFIG,
    ),
    _Known(
        r"uncorrectable ECC|fallen off the bus|GPU is lost|hardware error|Xid",
        "a GPU failed",
        "leave its node out, and have the GPU tested; `doctor --cluster` shows its errors",
        Exit.DEVICE,
    ),
    _Known(
        r"/dev/shm|shared memory segment",
        "NCCL found too little shared memory, or cannot use it",
        "give the container more: --shm-size 8g, or launch.shared_memory on Kubernetes",
        Exit.CONFIG,
    ),
    _Known(
        r"ibv_\w+ failed.*(Cannot allocate memory|ENOMEM)",
        "NCCL may not lock the memory that InfiniBand sends from",
        "set `ulimit -l unlimited` where the processes start, also on the other nodes",
        Exit.CONFIG,
    ),
    _Known(
        r"no socket interface found|No socket interface",
        "NCCL found no network interface to use",
        "set NCCL_SOCKET_IFNAME to one that all nodes have, or unset it",
        Exit.CONFIG,
    ),
    _Known(
        r"Cuda failure.*out of memory",
        "NCCL found too little memory on the GPU for its buffers",
        "leave it more: a smaller train.micro_batch, or train.recompute; see `gristmill plan`",
        Exit.CONFIG,
    ),
    _Known(
        r"driver version is insufficient",
        "the driver of this node is too old for the CUDA that torch was built with",
        "update the driver, or install torch built for an older CUDA",
        Exit.CONFIG,
    ),
    _Known(
        r"remote process exited|ncclRemoteError",
        "NCCL lost another process, or the network to it",
        f"see what the other processes printed; {_DOCTOR}",
    ),
    _Known(
        r"ncclSystemError|unhandled system error",
        "NCCL was refused by the system or the network",
        _DEBUG,
    ),
    _Known(
        r"ncclInternalError|internal error",
        "NCCL failed in itself, as it does when a link or another process fails",
        _DEBUG,
    ),
    _Known(
        r"NCCL communicator was aborted|communicator.*abort",
        "NCCL gave up an exchange",
        f"see what the other processes printed; {_DOCTOR}",
    ),
)
_GLOO = _Known(
    r"gloo.*(Connection (closed|reset|refused)|Broken pipe|Timed? ?out|No route|unreachable)",
    "an exchange over Gloo failed",
    f"see what the other processes printed; {_DOCTOR}",
)
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
    r".*?ran for (\d+) milliseconds"
)
_LAST = re.compile(r"Last error:\s*(.*?)\s*(?:Exception raised from|$)", re.DOTALL)
_WIDTH = 200


def explained_failure(error: BaseException) -> UserError | None:
    """The error of an exchange between processes, in words; None if this is another error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and (found := _explained(str(seen))):
            return found
        seen = seen.__cause__ or seen.__context__
    return None


def _explained(message: str) -> UserError | None:
    text = " ".join(message.split())
    late = _TIMEOUT.search(text)
    if late is not None:
        number, kind, milliseconds = late.groups()
        spent = format_seconds(int(milliseconds) / 1000)
        return UserError(
            f"an exchange did not end within {spent}: number {number} of its group, {kind.lower()}",
            where="parallel.timeout",
            remedy="a process did not take part, or a link is broken: see what the others printed; "
            + _DOCTOR,
            exit=Exit.PEER,
        )
    if "nccl" in text.lower():
        # That it comes from NCCL is certain only from its own words.
        known = next((one for one in _NCCL if re.search(one.pattern, text)), None)
    else:
        known = _GLOO if re.search(_GLOO.pattern, text, re.IGNORECASE) else None
    if known is None:
        return None
    last = _LAST.search(message)
    said = " ".join((last[1] if last and last[1] else "").split()) or text
    said = said if len(said) <= _WIDTH else f"{said[:_WIDTH]}…"
    return UserError(f"{known.what}: {said}", remedy=known.remedy, exit=known.exit)
