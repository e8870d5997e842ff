"""Compares the copies of weights and optimizer state that several processes hold.

Processes with the same initial state and the same updates stay bit-identical, so any difference is
silent corruption: a device that miscomputes, a flipped bit in memory, a broken link. A checksum of
every tensor is taken on the device; equal slices of equal names must have equal ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gristmill.optim.spec import Optimizer, Placement
from gristmill.strategies.sharding import ShardedParameters

_CHUNK = 2**22
"""Elements that are converted to 64 bits at once."""
_FACTOR, _OFFSET = 0x1E3779B97F4A7C15, 0x51B54A32D192ED03
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ReplicaDifference:
    """Processes whose copies differ from the majority."""

    ranks: tuple[int, ...]
    """The ranks in the minority, or all that hold a copy if there is none."""
    agreed: tuple[int, ...]
    """The majority; empty if there is none."""
    names: tuple[str, ...]
    """Tensors that differ."""


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum, on the tensor's device, which changes with any change of a single element
    and almost certainly with any other change."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        at = torch.arange(begin, begin + chunk.numel(), device=tensor.device)
        # Odd factors are invertible modulo 2^64, so that no difference is multiplied to 0.
        factors = (at * _FACTOR + _OFFSET) | 1
        total += (chunk * factors).sum()
    return total


def held_checksums(parameters: ShardedParameters, optimizer: Optimizer) -> dict[str, str]:
    """The checksums of everything of which another process may hold a copy, by tensor and slice."""
    tensors = dict[str, torch.Tensor]()
    for one in parameters.values():
        tensors[_key(f"weight/{one.name}", one.slices)] = one.local
    for entry in optimizer.entries():
        name = f"{entry.kind}/{entry.key}"
        match optimizer.placements[entry.kind]:
            case Placement.SHARDED:
                tensors[_key(name, parameters[entry.key].slices)] = entry.value
            case Placement.REPLICATED:
                tensors[_key(name, ())] = entry.value
            case Placement.PER_RANK | Placement.ASSIGNED:
                pass
    sums = [checksum(tensor) for tensor in tensors.values()]
    # Step counters may be on the host and everything else on a device.
    values = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return {key: f"{value % 2**64:016x}" for key, value in zip(tensors, values, strict=True)}


def _key(name: str, slices: Sequence[object]) -> str:
    digest = hashlib.sha256(repr(slices).encode()).hexdigest()[:12]
    return f"{name}@{digest}"


def find_differences(reports: Sequence[Mapping[str, str]]) -> list[ReplicaDifference]:
    """The differences between processes, given the checksums of each by rank."""
    holders = defaultdict[str, dict[int, str]](dict)
    for rank, report in enumerate(reports):
        for key, value in report.items():
            holders[key][rank] = value
    found = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[str]](list)
    for key, values in holders.items():
        counts = Counter(values.values()).most_common()
        if len(counts) == 1:
            continue
        (common, most), (_, second) = counts[:2]
        clear = most > second
        agreed = tuple(r for r, value in values.items() if clear and value == common)
        differ = tuple(r for r in values if r not in agreed)
        found[differ, agreed].append(key.partition("@")[0])
    return [ReplicaDifference(*ranks, tuple(names)) for ranks, names in found.items()]
