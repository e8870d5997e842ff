"""Real error messages of NCCL and Gloo, and how they are explained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.cli import main
from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.config.schema import RuntimeConfig
from gristmill.distributed.failures import explain_failure
from gristmill.distributed.liveness.monitor import Monitor
from gristmill.distributed.liveness.verdict import Limits
from gristmill.distributed.world import MARGIN, open_world

AT = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
TRACE = (
    "\nException raised from create at /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268 "
    "(most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96"
)
DUPLICATE = (
    f"{AT}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.7\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    f"Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10{TRACE}"
)
SYSTEM = (
    f"{AT}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.7\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error. \nLast error:\n"
)
REFUSED = (
    f"{SYSTEM}socketPollConnect: connect to 10.1.0.7<51225> returned Connection refused{TRACE}"
)
SHARED = (
    f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-H1dBqY (size 9637888){TRACE}"
)
LOCKED = f"{SYSTEM}Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory{TRACE}"
REMOTE = (
    f"{AT}remote process exited or there was a network error, NCCL version 2.27.7\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    f"prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer n03<51225>{TRACE}"
)
CUDA = (
    f"{AT}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.7\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
)
LATE = (
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96117, "
    "OpType=_ALLGATHER_BASE, NumelIn=19008, NumelOut=152064, Timeout(ms)=600000) ran for 600020 "
    "milliseconds before timing out."
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1]"


@pytest.mark.parametrize(
    ("message", "exit", "says", "remedy"),
    [
        (DUPLICATE, Exit.CONFIG, "rank 1 and rank 0 both on CUDA device 10", "one process for"),
        (REFUSED, Exit.PEER, "connect to 10.1.0.7<51225> returned Connection refused", "doctor"),
        (SHARED, Exit.CONFIG, "too little shared memory", "launch.shared_memory"),
        (LOCKED, Exit.CONFIG, "lock the memory that InfiniBand sends from", "ulimit -l"),
        (REMOTE, Exit.PEER, "Connection closed by remote peer n03<51225>", "other processes"),
        (f"{CUDA}'uncorrectable ECC error encountered'", Exit.DEVICE, "a GPU failed", "tested"),
        (f"{CUDA}2 'out of memory'", Exit.CONFIG, "too little memory on the GPU", "micro_batch"),
        (LATE, Exit.PEER, "did not finish within 10m00s: number 96117 of its group, _all", "link"),
        (GLOO, Exit.PEER, "over Gloo failed", "doctor --cluster"),
    ],
)
def test_a_failed_collective_has_a_remedy(message: str, exit: Exit, says: str, remedy: str) -> None:
    kinds = [dist.DistBackendError, RuntimeError] if message != GLOO else [RuntimeError]
    for kind in kinds:
        found = explain_failure(kind(message))
        assert found is not None and found.exit is exit
        (problem,) = found.problems
        assert says in problem.what and remedy in (problem.remedy or "")
        assert len(problem.what.splitlines()) == 1 and "frame #0" not in problem.what


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError(f"{CUDA}700 'an illegal memory access was encountered'"),
        dist.DistBackendError(f"{AT}invalid argument, NCCL version 2.27.7"),
        ValueError("NCCL: remote process exited"),
        KeyboardInterrupt(),
    ],
)
def test_a_defect_stays_one(error: BaseException) -> None:
    assert explain_failure(error) is None


def test_the_cause_is_found_below_what_it_led_to() -> None:
    try:
        try:
            raise dist.DistBackendError(REMOTE)
        except RuntimeError as error:
            raise KeyError("gradients") from error
    except KeyError as error:
        found = explain_failure(error)
    assert found is not None and found.exit is Exit.PEER


def test_the_monitor_explains_what_no_other_process_is_to_blame_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = ProcessInfo(1, 1, 2, address=Address("127.0.0.1", 1))
    for error, exit in ((REFUSED, Exit.PEER), (DUPLICATE, Exit.CONFIG)):
        monitor = Monitor(place, limits=Limits(start=600, phase=600, beat=0.01, read=0.01))
        told: list[tuple[object, ...]] = []
        monkeypatch.setattr(monitor, "_find_cause", lambda error: None)
        monkeypatch.setattr(monitor, "_report", lambda *what, told=told, **when: told.append(what))
        found = monitor.explain(dist.DistBackendError(error))
        assert isinstance(found, UserError) and found.exit is exit
        # The others hear the same, in one line and without the remedy.
        assert told == [("failed", found.problems[0].what)]


def test_the_command_line_does_not_call_it_a_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**options: object) -> None:
        raise dist.DistBackendError(REMOTE)

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(sys, "argv", ["gristmill", "bench", "run.toml"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr().err
    assert ended.value.code == Exit.PEER
    assert printed.startswith("error: NCCL lost another process") and "defect" not in printed


def limits_of_groups() -> list[float]:
    """Seconds that the groups of a run wait, of tensors and of control messages."""
    place = ProcessInfo(dist.get_rank(), dist.get_rank(), 3)
    world = open_world(
        RuntimeConfig(device="cpu"),
        mesh=Mesh(dp_replicate=3),
        parallel=ParallelConfig(timeout="45s"),
        place=place,
    )
    made = [
        world.groups.of([0, 1, 2], purpose="others", backend="gloo"),
        world.control_group("quick").group,
        world.control_group("slow", timeout=300).group,
    ]
    limits = []
    for group in made:
        assert group is not None
        backend: Any = group._get_backend(torch.device("cpu"))
        limits.append(backend.options._timeout.total_seconds())
    return limits


def test_the_limit_of_a_run_reaches_its_groups(crowd: Callable[..., list[Any]]) -> None:
    assert crowd(3, limits_of_groups) == [[45 + MARGIN, 45 + MARGIN, 300 + MARGIN]] * 3
