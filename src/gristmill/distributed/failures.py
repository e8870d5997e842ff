"""Turns errors of NCCL and Gloo into user errors with a remedy.

Such an error is not a bug: a process was lost, a device or a link failed, or the nodes are not
configured correctly. The monitor first looks for another process that caused the error
(`liveness/monitor.py`); errors without such a cause are explained here.

Only errors whose message matches a known pattern are explained; others are left unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_seconds

_DOCTOR = "check the links with `gristmill doctor --cluster`, started like the run"
_DEBUG = f"NCCL_DEBUG=INFO makes NCCL log more; {_DOCTOR}"


@dataclass(frozen=True)
class _FailurePattern:
    """A kind of failure, recognized by its error message."""

    pattern: str
    what: str
    remedy: str
    exit: Exit = Exit.PEER


_NCCL = (
    _FailurePattern(
        r"Duplicate GPU detected",
        "two processes use the same GPU",
        "start one process for each GPU, or let every process see all GPUs of its node; to try a "
        "layout, let processes share a GPU with parallel.share_gpu = true",
        Exit.CONFIG,
    ),
    _FailurePattern(
        r"uncorrectable ECC|fallen off the bus|GPU is lost|hardware error|Xid",
        "a GPU failed",
        "exclude its node, and have the GPU tested; `doctor --cluster` shows its errors",
        Exit.DEVICE,
    ),
    _FailurePattern(
        r"/dev/shm|shared memory segment",
        "NCCL found too little shared memory, or cannot use it",
        "give the container more: --shm-size 8g, or launch.shared_memory on Kubernetes",
        Exit.CONFIG,
    ),
    _FailurePattern(
        r"ibv_\w+ failed.*(Cannot allocate memory|ENOMEM)",
        "NCCL is not allowed to lock the memory that InfiniBand sends from",
        "set `ulimit -l unlimited` in the environment that starts the processes, on all nodes",
        Exit.CONFIG,
    ),
    _FailurePattern(
        r"no socket interface found|No socket interface",
        "NCCL found no network interface to use",
        "set NCCL_SOCKET_IFNAME to an interface that all nodes have, or unset it",
        Exit.CONFIG,
    ),
    _FailurePattern(
        r"Cuda failure.*out of memory",
        "NCCL found too little memory on the GPU for its buffers",
        "free some: lower train.micro_batch or set train.recompute; see `gristmill plan`",
        Exit.CONFIG,
    ),
    _FailurePattern(
        r"driver version is insufficient",
        "the driver of this node is too old for the CUDA version of torch",
        "update the driver, or install torch built for an older CUDA",
        Exit.CONFIG,
    ),
    _FailurePattern(
        r"remote process exited|ncclRemoteError",
        "NCCL lost another process, or the network to it",
        f"check what the other processes printed; {_DOCTOR}",
    ),
    _FailurePattern(
        r"ncclSystemError|unhandled system error",
        "a system call or network operation of NCCL failed",
        _DEBUG,
    ),
    _FailurePattern(
        r"ncclInternalError|internal error",
        "NCCL hit an internal error, often because a link or another process failed",
        _DEBUG,
    ),
    _FailurePattern(
        r"NCCL communicator was aborted|communicator.*abort",
        "NCCL aborted a collective",
        f"check what the other processes printed; {_DOCTOR}",
    ),
)
_GLOO = _FailurePattern(
    r"gloo.*(Connection (closed|reset|refused)|Broken pipe|Timed? ?out|No route|unreachable)",
    "a collective over Gloo failed",
    f"check what the other processes printed; {_DOCTOR}",
)
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
    r".*?ran for (\d+) milliseconds"
)
_LAST_ERROR = re.compile(r"Last error:\s*(.*?)\s*(?:Exception raised from|$)", re.DOTALL)
_MAX_MESSAGE = 200


def explain_failure(error: BaseException) -> UserError | None:
    """The user error for an error, or one of its causes, that is a failed collective; None for any
    other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and (explanation := _explain(str(cause))):
            return explanation
        cause = cause.__cause__ or cause.__context__
    return None


def _explain(message: str) -> UserError | None:
    text = " ".join(message.split())
    timeout = _TIMEOUT.search(text)
    if timeout is not None:
        number, kind, milliseconds = timeout.groups()
        duration = format_seconds(int(milliseconds) / 1000)
        return UserError(
            f"a collective did not finish within {duration}: number {number} of its group, "
            f"{kind.lower()}",
            where="parallel.timeout",
            remedy="a process did not join it, or a link is broken: check what the others printed; "
            + _DOCTOR,
            exit=Exit.PEER,
        )
    if "nccl" in text.lower():
        # Only the message shows that the error comes from NCCL.
        failure = next((known for known in _NCCL if re.search(known.pattern, text)), None)
    else:
        failure = _GLOO if re.search(_GLOO.pattern, text, re.IGNORECASE) else None
    if failure is None:
        return None
    last = _LAST_ERROR.search(message)
    detail = " ".join((last[1] if last and last[1] else "").split()) or text
    detail = detail if len(detail) <= _MAX_MESSAGE else f"{detail[:_MAX_MESSAGE]}…"
    return UserError(f"{failure.what}: {detail}", remedy=failure.remedy, exit=failure.exit)
