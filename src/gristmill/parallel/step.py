"""What every strategy does in a step, however it trains: dividing batches, counting tokens, seeding
dropout, and deciding whether and how far to move.

The global norm n, the clipping limit c and the loss scale s meet in one divisor, s max(1, n / c),
which the optimizer's kernel applies; it also leaves everything as it is when the norm is not
finite. No step waits for the host.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gristmill.data.loader import Batch
from gristmill.parallel.context import shard_positions, shard_sequence


class Decision(NamedTuple):
    """What becomes of a step; tensors are scalars on the device."""

    norm: torch.Tensor
    """Of the gradient, without the loss scale."""
    divisor: torch.Tensor
    """What gradients are divided by."""
    skip: torch.Tensor
    """1 if loss or gradient is not finite, else 0."""


def decide(
    loss: torch.Tensor, squares: torch.Tensor, *, scale: torch.Tensor | None, clip: float
) -> Decision:
    """Unscale and clip, as a divisor, from the squared norm of the scaled gradient."""
    scale = torch.ones_like(loss) if scale is None else scale
    norm = squares.sqrt() / scale
    bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
    excess = (norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
    return Decision(norm, scale * torch.where(bad, 1.0, excess), bad.float())


def count_tokens(
    batches: Sequence[Batch], *, parts: int, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Tokens that count in a step, over all of its data-parallel parts."""
    counted = sum(batch.counted for batch in batches)
    if all(batch.weights_BT is None for batch in batches):
        counted, group = counted * parts, None
    tensor = torch.full((), counted, device=device)
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def step_seed(seed: int, step: int, place: Sequence[int]) -> int:
    """The seed of a step's dropout on a process with this place in the mesh: a function of numbers
    that are known, so that there is no random state to save."""
    own = f":{list(place)}" if any(place) else ""
    digest = hashlib.sha256(f"{seed}:step:{step}{own}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def divide_batches(batches: Iterable[Batch], *, rank: int, ranks: int) -> Iterator[Batch]:
    """Every n-th batch is this process's. Where one is missing or smaller than the others of its
    turn, samples that do not count fill it up, so that all processes do the same work together."""
    source = iter(batches)
    while turn := list(islice(source, ranks)):
        sizes = [batch.samples for batch in turn] + [0] * (ranks - len(turn))
        mine = turn[min(rank, len(turn) - 1)]
        yield mine if len(set(sizes)) == 1 else _filled(mine, sizes[rank], max(sizes))


def _filled(batch: Batch, count: int, size: int) -> Batch:
    """The first `count` samples of a batch, filled up to `size` with samples that do not count."""
    which = [min(number, max(count, 1) - 1) for number in range(size)]

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[which]

    weights = batch.weights_BT
    if weights is None:
        weights = torch.ones(batch.tokens_BT.shape)
    weights = weights[which].clone()
    weights[count:] = 0.0
    return Batch(
        batch.tokens_BT[which],
        batch.targets_BT[which],
        weights,
        batch.counted if count else 0.0,
        rows(batch.positions_BT),
        rows(batch.documents_BT),
    )


def shard_sequences(batch: Batch, *, rank: int, ranks: int) -> Batch:
    """A context-parallel process's part of the sequences of a batch."""
    if ranks == 1:
        return batch
    length, positions = batch.tokens_BT.shape[1], batch.positions_BT
    own: dict[str, Any] = {
        field: shard_sequence(getattr(batch, field), 1, rank=rank, ranks=ranks)
        for field in ("tokens_BT", "targets_BT", "weights_BT", "documents_BT")
        if getattr(batch, field) is not None
    }
    own["positions_BT"] = (
        shard_positions(rank, ranks, length).expand(batch.samples, -1)
        if positions is None
        else shard_sequence(positions, 1, rank=rank, ranks=ranks)
    )
    return dataclasses.replace(batch, **own)
