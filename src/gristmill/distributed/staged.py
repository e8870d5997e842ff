"""Process groups that stage GPU tensors through host memory, for processes that share a GPU.

    tensor on the GPU ──copy──> host ──gloo──> host ──copy──> tensor on the GPU
      when the call begins                       in `wait`, on the current stream

NCCL refuses two processes on one GPU, and gloo supports some collectives only for tensors on the
host. So all collectives of GPU tensors are staged, with the same sums as on the CPU. This is
transparent to callers: strategies, torch's FSDP and its pipelines use the group like any other.
Tensors on the host are passed to gloo directly.

A call waits for earlier work on the GPU and returns while the collective runs. As with NCCL, inputs
may then be overwritten, and outputs are valid after `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gristmill.distributed.device import STAGED


class _TensorArguments(NamedTuple):
    """The positions of the tensor arguments of a collective, or of lists of tensors."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


_IN_PLACE = _TensorArguments((0,), (0,))
_SEPARATE = _TensorArguments((1,), (0,))
_COLLECTIVES = {
    **dict.fromkeys(("broadcast", "allreduce", "allreduce_coalesced", "reduce"), _IN_PLACE),
    **dict.fromkeys(("allgather", "allgather_coalesced", "gather"), _SEPARATE),
    **dict.fromkeys(("scatter", "reduce_scatter", "alltoall"), _SEPARATE),
    # Torch 2.13 renamed these.
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _SEPARATE),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), _SEPARATE),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _SEPARATE),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _SEPARATE
    ),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _SEPARATE),
    "send": _TensorArguments(inputs=(0,)),
    **dict.fromkeys(("recv", "recv_anysource"), _TensorArguments(outputs=(0,))),
    **dict.fromkeys(("barrier", "monitored_barrier"), _TensorArguments()),
}


_GLOO: Any = dist.ProcessGroup.BackendType.GLOO


class StagedGroup(dist.ProcessGroup):
    """A process group over gloo that also accepts tensors on a GPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # Register gloo in both groups: a group is named after its backends.
        for group in (self, self.host):
            group._set_default_backend(_GLOO)
            group._register_backend(torch.device("cpu"), _GLOO, gloo)

    def getBackendName(self) -> str:
        return STAGED

    def goes_through_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is staged; tensors on the host are not."""
        return tensor.device.type != "cpu"

    def collective(
        self, name: str, tensors: _TensorArguments, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dist.Work:
        """Begin a collective of gloo with host copies of the tensors on a GPU."""
        host_args, outputs = list(args), list[tuple[torch.Tensor, torch.Tensor]]()
        for index in dict.fromkeys((*tensors.inputs, *tensors.outputs)):
            copies = list[tuple[torch.Tensor, torch.Tensor]]()
            host_args[index] = self._to_host(args[index], copies, copy=index in tensors.inputs)
            outputs += copies if index in tensors.outputs else ()
        work = getattr(self.host, name)(*host_args, **kwargs)
        return _StagedWork(work, outputs) if outputs else work

    def _to_host(
        self, value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]], *, copy: bool
    ) -> Any:
        """The tensors on the host, uninitialized unless `copy`. Appends pairs of tensor and host
        tensor to `copies`."""
        if isinstance(value, (list, tuple)):
            return [self._to_host(item, copies, copy=copy) for item in value]
        if not isinstance(value, torch.Tensor) or not self.goes_through_host(value):
            return value
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if copy:
            host.copy_(value.detach())
        copies.append((value, host))
        return host


class _StagedWork(dist.Work):
    """A collective whose outputs are copied back to the GPU in `wait`."""

    def __init__(self, work: dist.Work, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._outputs = work, outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work.wait(timeout)
        with torch.no_grad():
            for tensor, host in self._outputs:
                # Hidden from autograd, as with every other backend.
                tensor.data.copy_(host)
        self._outputs = []
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self.wait()


def _method(name: str, tensors: _TensorArguments) -> Callable[..., dist.Work]:
    def collective(self: StagedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self.collective(name, tensors, args, kwargs)

    return collective


def _available() -> Iterator[tuple[str, _TensorArguments]]:
    """The collectives that this version of torch has."""
    return (pair for pair in _COLLECTIVES.items() if hasattr(dist.ProcessGroup, pair[0]))


for _name, _tensors in _available():
    setattr(StagedGroup, _name, _method(_name, _tensors))


def register_staged() -> None:
    """Register this backend with torch."""
    if not hasattr(dist.Backend, STAGED.upper()):
        dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])
