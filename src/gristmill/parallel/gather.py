"""A sharded model, gathered on rank 0: to write samples with, now and then.

Weights travel one piece at a time over the host network, so that no other process needs memory for
it. It takes as long as sending the model once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.tensor_slices import TensorSlice
from gristmill.models.build import build_model, outline_model
from gristmill.models.spec import CausalLM, Kernels
from gristmill.parallel.control import ControlGroup
from gristmill.parallel.sharding import ShardedParameter, ShardedParameters
from gristmill.parallel.world import World

ROOM = 1.25
"""How much more memory than its weights a model takes to write samples with."""


def gather_model(
    shard: CausalLM, parameters: ShardedParameters, world: World, control: ControlGroup
) -> CausalLM | None:
    """The whole model on rank 0, None on the others; all take part."""
    assert control.group is not None, "a model in one place need not be gathered"
    own = [one for one in parameters.values() if one.owned and one.slices]
    told = control.gather(
        [[one.name, [[piece.whole.begin, piece.whole.end] for piece in one.slices]] for one in own]
    )
    if not control.is_rank0:
        for one in own:
            for tensor in _pieces(one):
                dist.send(tensor, 0, group=control.group)
        return None
    whole = _empty_whole(shard, world)
    target = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for rank, names in enumerate(told):
        for name, borders in names:
            local = iter(_pieces(parameters[name])) if rank == 0 else None
            for begin, end in borders:
                box = TensorSlice(tuple(begin), tuple(end))
                tensor = next(local) if local is not None else _received(box, rank, control)
                _put(target[name], box, tensor)
    whole.eval()
    return whole


def _empty_whole(shard: CausalLM, world: World) -> CausalLM:
    """A whole model to fill, in the number format that it computes in; on the host if the device
    has no room for it beside the training state."""
    outline = outline_model(shard.config, vocab=shard.vocab)
    size = shard.compute.itemsize * sum(one.numel() for one in outline.parameters())
    free = world.device.free_memory()
    fits = free is None or ROOM * size < free
    device = world.device.torch_device if fits else torch.device("cpu")
    whole = build_model(shard.config, vocab=shard.vocab, device=device, dtype=shard.compute)
    whole.compute = shard.compute
    whole.kernels = shard.kernels if fits else Kernels()
    return whole


def _pieces(parameter: ShardedParameter) -> list[torch.Tensor]:
    local = parameter.local.detach().cpu()
    return [local[piece.local.slices].contiguous() for piece in parameter.slices]


def _received(box: TensorSlice, rank: int, control: ControlGroup) -> torch.Tensor:
    tensor = torch.empty(box.shape)
    dist.recv(tensor, rank, group=control.group)
    return tensor


def _put(target: torch.Tensor, box: TensorSlice, tensor: Any) -> None:
    """Copy a part; rows that only pad a sharded vocabulary have no place in the whole."""
    common = box.intersect(TensorSlice.whole(target.shape))
    if common is not None:
        target[common.slices] = tensor[common.relative_to(box).slices].to(target.device)
