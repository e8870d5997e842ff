"""Process groups whose tensors go through host memory, for processes that share a GPU.

    tensor on the GPU ──copy──> host ──gloo──> host ──copy──> tensor on the GPU
      when the call begins                       in `wait`, on the stream that is current there

NCCL refuses two processes on one GPU, and gloo knows some collectives for tensors on the host only.
So all of them go the same way, and add up as they do on the CPU. This is the one place that knows
of it: strategies, torch's FSDP and its pipelines call the group as they call any other. Tensors on
the host are passed on as they are.

A call waits for what the GPU computes before it, and returns with the exchange under way: what was
sent may change from then on, and what is received is there after `wait`, as with NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gristmill.distributed.device import STAGED


class _Tensors(NamedTuple):
    """Which arguments of a collective hold tensors, or lists of them."""

    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


_IN_PLACE = _Tensors((0,), (0,))
_INTO = _Tensors((1,), (0,))
_COLLECTIVES = {
    **dict.fromkeys(("broadcast", "allreduce", "allreduce_coalesced", "reduce"), _IN_PLACE),
    **dict.fromkeys(("allgather", "allgather_coalesced", "gather"), _INTO),
    **dict.fromkeys(("scatter", "reduce_scatter", "alltoall"), _INTO),
    # Torch 2.13 gave these other names.
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _INTO),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), _INTO),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _INTO),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _INTO),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _INTO),
    "send": _Tensors(read=(0,)),
    **dict.fromkeys(("recv", "recv_anysource"), _Tensors(written=(0,))),
    **dict.fromkeys(("barrier", "monitored_barrier"), _Tensors()),
}


_GLOO: Any = dist.ProcessGroup.BackendType.GLOO


class StagedGroup(dist.ProcessGroup):
    """A process group over gloo, also for tensors on a GPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.host = dist.ProcessGroup(store, rank, size)
        gloo, kind = dist.ProcessGroupGloo(store, rank, size, timeout), _GLOO
        # A group has the name of its backends.
        for group in (self, self.host):
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, gloo)

    def getBackendName(self) -> str:
        return STAGED

    def goes_through_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is copied; those on the host are not."""
        return tensor.device.type != "cpu"

    def collective(
        self, name: str, tensors: _Tensors, args: Sequence[Any], more: dict[str, Any]
    ) -> dist.Work:
        """Begin a collective of gloo with copies of those tensors that are not on the host."""
        here, received = list(args), list[tuple[torch.Tensor, torch.Tensor]]()
        for place in dict.fromkeys((*tensors.read, *tensors.written)):
            pairs = list[tuple[torch.Tensor, torch.Tensor]]()
            here[place] = self._on_host(args[place], pairs, filled=place in tensors.read)
            received += pairs if place in tensors.written else ()
        work = getattr(self.host, name)(*here, **more)
        return _StagedWork(work, received) if received else work

    def _on_host(
        self, given: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]], *, filled: bool
    ) -> Any:
        """The same tensors on the host, with their content if it is sent. Adds what was copied to
        the pairs."""
        if isinstance(given, (list, tuple)):
            return [self._on_host(each, pairs, filled=filled) for each in given]
        if not isinstance(given, torch.Tensor) or not self.goes_through_host(given):
            return given
        host = torch.empty(given.shape, dtype=given.dtype, device="cpu")
        if filled:
            host.copy_(given.detach())
        pairs.append((given, host))
        return host


class _StagedWork(dist.Work):
    """A collective whose result is copied back when it is waited for."""

    def __init__(self, work: dist.Work, received: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._received = work, received

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work.wait(timeout)
        with torch.no_grad():
            for tensor, host in self._received:
                # Not a change that autograd should know of, as with every other backend.
                tensor.data.copy_(host)
        self._received = []
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self.wait()


def _named(name: str, tensors: _Tensors) -> Callable[..., dist.Work]:
    def collective(self: StagedGroup, *args: Any, **more: Any) -> dist.Work:
        return self.collective(name, tensors, args, more)

    return collective


def _known() -> Iterator[tuple[str, _Tensors]]:
    """The collectives that this version of torch has."""
    return (pair for pair in _COLLECTIVES.items() if hasattr(dist.ProcessGroup, pair[0]))


for _name, _tensors in _known():
    setattr(StagedGroup, _name, _named(_name, _tensors))


def register_staged() -> None:
    """Let torch know this backend."""
    if not hasattr(dist.Backend, STAGED.upper()):
        dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])
