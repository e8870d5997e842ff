"""A divided model, brought together on the first process: to write samples with, now and then.

Weights travel one piece at a time over the host network, so that no other process needs more
memory for it. It takes as long as sending the model once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.boxes import Box
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.parallel.council import Council
from gristmill.parallel.replicas import Replicas
from gristmill.parallel.world import World


def gather_model(replicas: Replicas, world: World, council: Council) -> GPT | None:
    """The whole model on the first process, None on the others; all take part."""
    assert council.group is not None, "a model in one place need not be gathered"
    own: list[Any] = [
        [held.name, [[piece.whole.begin, piece.whole.end] for piece in held.pieces]]
        for held in replicas.held.values()
        if held.owned and held.pieces
    ]
    told = council.gather(own)
    if not council.leads:
        for name, _ in own:
            for tensor in _pieces(replicas, name):
                dist.send(tensor, 0, group=council.group)
        return None
    part = replicas.model
    whole = build_model(part.config, vocab=part.vocab, device=world.device)
    whole.compute, whole.kernels = part.compute, part.kernels
    target = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for rank, names in enumerate(told):
        for name, boxes in names:
            local = iter(_pieces(replicas, name)) if rank == 0 else None
            for begin, end in boxes:
                box = Box(tuple(begin), tuple(end))
                tensor = next(local) if local is not None else _received(box, rank, council)
                _put(target[name], box, tensor)
    whole.eval()
    return whole


def _pieces(replicas: Replicas, name: str) -> list[torch.Tensor]:
    held = replicas.held[name]
    local = held.local.detach().cpu()
    return [local[piece.local.slices].contiguous() for piece in held.pieces]


def _received(box: Box, rank: int, council: Council) -> torch.Tensor:
    tensor = torch.empty(box.shape)
    dist.recv(tensor, rank, group=council.group)
    return tensor


def _put(target: torch.Tensor, box: Box, tensor: Any) -> None:
    """Copy a part; rows that only pad a divided vocabulary have no place in the whole."""
    common = box.meet(Box.whole(target.shape))
    if common is not None:
        target[common.slices] = tensor[common.seen_from(box).slices].to(target.device)
