"""Gathers a sharded model on rank 0, to generate samples.

Weights are sent slice by slice over the host network, so other ranks need no extra memory. It takes
as long as sending the model once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gristmill.base.tensor_slices import TensorSlice
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World
from gristmill.models.build import build_model, outline_model
from gristmill.models.spec import CausalLM, Kernels
from gristmill.strategies.sharding import ShardedParameter, ShardedParameters

ROOM = 1.25
"""Memory needed for generation, relative to the weights."""


def gather_model(
    shard: CausalLM, parameters: ShardedParameters, world: World, control: ControlGroup
) -> CausalLM | None:
    """The whole model on rank 0, None on the others; a collective call."""
    owned = [one for one in parameters.values() if one.owned and one.slices]
    announced = control.gather(
        [[one.name, [[part.whole.begin, part.whole.end] for part in one.slices]] for one in owned]
    )
    if not control.is_rank0:
        for one in owned:
            for tensor in _local_slices(one):
                dist.send(tensor, group_dst=0, group=control.group)
        return None
    whole = _empty_whole(shard, world)
    target = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for rank, names in enumerate(announced):
        for name, bounds in names:
            local = iter(_local_slices(parameters[name])) if rank == 0 else None
            for begin, end in bounds:
                where = TensorSlice(tuple(begin), tuple(end))
                if local is not None:
                    tensor = next(local)
                else:
                    tensor = torch.empty(where.shape)
                    dist.recv(tensor, group_src=rank, group=control.group)
                # Padding rows of a sharded vocabulary are not part of the whole model.
                common = where.intersect(TensorSlice.whole(target[name].shape))
                if common is not None:
                    part = tensor[common.relative_to(where).slices]
                    target[name][common.slices] = part.to(target[name].device)
    whole.eval()
    return whole


def _empty_whole(shard: CausalLM, world: World) -> CausalLM:
    """A whole model to fill, in its compute dtype; on the host if the device has too little free
    memory."""
    outline = outline_model(shard.config, vocab=shard.vocab)
    size = shard.compute.itemsize * sum(one.numel() for one in outline.parameters())
    free = world.device.free_memory()
    fits = free is None or ROOM * size < free
    device = world.device.torch_device if fits else torch.device("cpu")
    whole = build_model(shard.config, vocab=shard.vocab, device=device, dtype=shard.compute)
    whole.compute = shard.compute
    whole.kernels = shard.kernels if fits else Kernels()
    return whole


def _local_slices(parameter: ShardedParameter) -> list[torch.Tensor]:
    local = parameter.local.detach().cpu().float()
    return [local[part.local.slices].contiguous() for part in parameter.slices]
