"""The parts of a step that all strategies share: dividing batches, counting tokens, seeding
dropout, clipping and skipping.

The global norm n, the clipping limit c and the loss scale s give one divisor, s max(1, n / c),
which the optimizer's kernel applies; it also skips the update if the norm is not finite. No step
waits for the host.
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
from gristmill.strategies.context import shard_positions, shard_sequence
from gristmill.strategies.strategy import StepLimits


class Decision(NamedTuple):
    """The decision how a step is applied, as scalars on the device."""

    norm: torch.Tensor
    """The gradient norm, without the loss scale."""
    divisor: torch.Tensor
    """Gradients are divided by this."""
    skip: torch.Tensor
    """1 if loss or gradient is not finite, or above its limit, else 0."""
    overflow: torch.Tensor
    """Whether one of them is not finite."""


def decide(
    loss: torch.Tensor,
    squares: torch.Tensor,
    *,
    scale: torch.Tensor | None,
    clip: float,
    limits: StepLimits | None = None,
) -> Decision:
    """Combine unscaling and clipping, given the squared norm of the scaled gradient."""
    scale = torch.ones_like(loss) if scale is None else scale
    norm = squares.sqrt() / scale
    overflow = ~(torch.isfinite(norm) & torch.isfinite(loss))
    excess = (norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
    skip = overflow
    if limits is not None:
        skip = overflow | (loss > limits.loss) | (norm > limits.norm)
    divisor = scale * torch.where(overflow, 1.0, excess)
    return Decision(norm, divisor, skip.float(), overflow)


def clip_preconditioned(decision: Decision, squares: torch.Tensor, *, clip: float) -> Decision:
    """The decision updated after its gradients were unscaled and preconditioned, given their new
    squared norm. The reported norm stays that of the plain gradient."""
    norm = squares.sqrt()
    finite = torch.isfinite(norm)
    excess = (norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
    skip = torch.maximum(decision.skip, (~finite).float())
    return decision._replace(divisor=torch.where(finite, excess, 1.0), skip=skip)


def count_tokens(
    batches: Sequence[Batch], *, ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """The counted tokens of a step, over all data-parallel ranks."""
    loss_tokens = sum(batch.loss_tokens for batch in batches)
    if all(batch.loss_weights_BT is None for batch in batches):
        loss_tokens, group = loss_tokens * ranks, None
    tensor = torch.full((), loss_tokens, device=device)
    if group is not None:
        dist.all_reduce(tensor, group=group)
    # With no counted tokens, loss and gradient are 0, not 0 / 0.
    return tensor.clamp_(min=1.0)


def step_seed(seed: int, step: int, place: Sequence[int]) -> int:
    """The dropout seed of a step at these mesh coordinates, so that there is no random state to
    save."""
    suffix = f":{list(place)}" if any(place) else ""
    digest = hashlib.sha256(f"{seed}:step:{step}{suffix}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def divide_batches(batches: Iterable[Batch], *, rank: int, ranks: int) -> Iterator[Batch]:
    """Assign batches to the ranks round-robin. Missing or smaller batches of a round are padded
    with samples of weight 0, so that all processes run the same collectives."""
    source = iter(batches)
    while batch_round := list(islice(source, ranks)):
        sizes = [batch.samples for batch in batch_round] + [0] * (ranks - len(batch_round))
        batch = batch_round[min(rank, len(batch_round) - 1)]
        yield batch if len(set(sizes)) == 1 else pad_batch(batch, sizes[rank], max(sizes))


def pad_batch(batch: Batch, count: int, size: int) -> Batch:
    """The first `count` samples of a batch, padded to `size` with samples of weight 0."""
    which = [min(number, max(count, 1) - 1) for number in range(size)]

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[which]

    weights = batch.loss_weights_BT
    weights = (torch.ones(batch.tokens_BT.shape) if weights is None else weights)[which].clone()
    weights[count:] = 0.0
    return Batch(
        batch.tokens_BT[which],
        batch.targets_BT[which],
        weights,
        batch.loss_tokens if count else 0.0,
        rows(batch.positions_BT),
        rows(batch.documents_BT),
    )


def shard_sequences(batch: Batch, *, rank: int, ranks: int) -> Batch:
    """A context-parallel rank's shard of the sequences of a batch."""
    if ranks == 1:
        return batch
    length, positions = batch.tokens_BT.shape[1], batch.positions_BT
    shards: dict[str, Any] = {
        field: shard_sequence(getattr(batch, field), 1, rank=rank, ranks=ranks)
        for field in ("tokens_BT", "targets_BT", "loss_weights_BT", "documents_BT")
        if getattr(batch, field) is not None
    }
    shards["positions_BT"] = (
        shard_positions(rank, ranks, length).expand(batch.samples, -1)
        if positions is None
        else shard_sequence(positions, 1, rank=rank, ranks=ranks)
    )
    return dataclasses.replace(batch, **shards)
