"""Compression of exchanges: codecs for n fp32 numbers in four formats, and sums over a group of
workers in these formats (`Transfer`).

    fp32    4n bytes, the numbers themselves
    bf16    2n bytes, rounded to nearest
    int8    for each block of 256 numbers its largest magnitude (fp32), then n codes from -127 to
            127, rounded to nearest: an error of at most 1/254 of the block's largest magnitude
    top-k   for each chunk of 4096 numbers two levels (fp32), then the places in their chunks of
            the numbers that are sent (12 bits each), then sign and level of these (2 bits each)

The size of a payload follows from n alone, so a receiver needs no header. Top-k sends the largest
magnitudes of each chunk (chunk-wise, as in SparseLoCo, arXiv 2508.15706). Its two levels are those
of the least squared error for what is sent: each is the mean of its group, and all splits of the
sorted magnitudes are compared. So decoding never adds energy: |v - C(v)|² = |v|² - |C(v)|².

Numbers that are not finite stay visible, so that the run's health check sees them: fp32 and bf16
keep them, an int8 block with one of them is NaN all over, and in a top-k chunk with one of them
everything that is sent is NaN. bf16 makes infinity of what is beyond its largest number, 3.39e38.

With equal magnitudes, top-k's choice depends on the device: the same device type gives the same
bytes, but a CPU and a GPU may choose differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from gristmill.distributed.control import wait_for

_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, which deprecates the old one."""


class GroupSum(NamedTuple):
    """The sum over a group, and what this process contributed to it."""

    total: torch.Tensor
    own: torch.Tensor
    """This process's values as the others received them; the values themselves in a lossless
    format."""
    sent: int
    """Bytes that this process sent."""


@dataclass(frozen=True)
class Transfer:
    """Sums tensors over groups of workers, in a number format of few bytes.

        fp32           all-reduce
        two workers    each sends its payload to the other
        top-k          each sends its payload to all others: a sum has more elements than its terms
        bf16, int8     all-to-all: worker i gets the i-th chunk of all others and sums it in fp32;
                       all-gather: it sends the sum of its chunk to all others, again in this format
                       if `round_sum` allows that, else in fp32

    In every case all members of a group get the same bits: sums are computed in the order of ranks,
    by one process for all, or by all from the same payloads.
    """

    codec: Codec
    on_host: bool = False
    """Whether sent data goes through host memory."""
    interrupt: Callable[[], None] | None = None
    """Raises to stop waiting for the others."""

    def sum(self, values: torch.Tensor, group: dist.ProcessGroup, *, round_sum: bool) -> GroupSum:
        """The sum of flat fp32 values over a group."""
        codec, size, n = self.codec, group.size(), values.numel()
        if not codec.lossy:
            total = self.all_reduce(values.clone(), group)
            # In an all-reduce each process sends almost all of it twice, whatever the algorithm.
            return GroupSum(total, values, 2 * (size - 1) * 4 * n // size)
        if size > 2 and not isinstance(codec, TopKCodec):
            return self._sum_chunks(values, group, round_sum=round_sum)
        payload = codec.encode(values)
        payloads = self._all_gather(payload, group)
        decoded = [codec.decode(one, n) for one in payloads.view(size, -1)]
        total = torch.stack(decoded).sum(0) if size == 2 else _sum_in_order(decoded)
        return GroupSum(total, decoded[group.rank()], (size - 1) * payload.numel())

    def all_reduce(self, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The exact sum, in place."""
        sent = self._staged(values)
        work = dist.all_reduce(sent, group=group, async_op=True)
        wait_for(work, self.interrupt, group=group)
        return values if sent is values else values.copy_(sent)

    def _sum_chunks(
        self, values: torch.Tensor, group: dist.ProcessGroup, *, round_sum: bool
    ) -> GroupSum:
        codec, size, n = self.codec, group.size(), values.numel()
        unit = size * BLOCK
        chunks = pad(values, (0, -n % unit)).view(size, -1)
        length = chunks.shape[1]
        sent = torch.stack([codec.encode(chunk) for chunk in chunks])
        staged = self._staged(sent)
        received = torch.empty_like(staged)
        work = dist.all_to_all_single(received, staged, group=group, async_op=True)
        wait_for(work, self.interrupt, group=group)
        received = received.to(sent.device)
        mine = _sum_in_order([codec.decode(one, length) for one in received])
        own = torch.cat([codec.decode(one, length) for one in sent])[:n]
        if round_sum:
            payloads = self._all_gather(codec.encode(mine), group).view(size, -1)
            total = torch.cat([codec.decode(payload, length) for payload in payloads])
        else:
            payloads = self._all_gather(mine, group)
            total = payloads
        bytes_sent = (size - 1) * (sent[0].numel() + payloads.nbytes // size)
        return GroupSum(total[:n], own, bytes_sent)

    def _all_gather(self, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sent = self._staged(values.contiguous())
        count, pinned = group.size() * values.numel(), sent.is_pinned()
        gathered = torch.empty(count, dtype=sent.dtype, device=sent.device, pin_memory=pinned)
        work = _gather_flat(gathered, sent, group=group, async_op=True)
        wait_for(work, self.interrupt, group=group)
        return gathered.to(values.device)

    def _staged(self, values: torch.Tensor) -> torch.Tensor:
        """The values for the network: themselves, or a copy in pinned host memory."""
        if not self.on_host or not values.is_cuda:
            return values
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)


def _sum_in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


BLOCK = 256
"""Numbers of int8 with a common scale."""
CHUNK = 4096
"""Numbers in a chunk of top-k, whose positions take 12 bits."""

CodecName = Literal["fp32", "bf16", "int8", "top-k"]


class Codec(Protocol):
    """A format of flat fp32 tensors on the wire."""

    @property
    def lossy(self) -> bool:
        """Whether decoding may give different numbers than were encoded."""
        ...

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """A payload (uint8) of a flat fp32 tensor, whose memory it may share."""
        ...

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        """A payload's n numbers in fp32, which may share its memory."""
        ...


def build_codec(name: CodecName, density: float) -> Codec:
    """The codec of a name; `density` is the part of the numbers that top-k sends."""
    codecs: dict[CodecName, Codec] = {
        "fp32": Fp32Codec(),
        "bf16": Bf16Codec(),
        "int8": Int8Codec(),
        "top-k": TopKCodec(density=density),
    }
    return codecs[name]


# ------------------------------------------------------------------ the formats


@dataclass(frozen=True)
class Fp32Codec:
    """The numbers themselves, in the memory where they are."""

    lossy: ClassVar[bool] = False

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(torch.uint8)

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        return _as_type(payload, torch.float32)


@dataclass(frozen=True)
class Bf16Codec:
    """The numbers rounded to bfloat16."""

    lossy: ClassVar[bool] = True

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.bfloat16().view(torch.uint8)

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        return _as_type(payload, torch.bfloat16).float()


@dataclass(frozen=True)
class Int8Codec:
    """Codes of 8 bits in units of 1/127 of the largest magnitude of a block.

    That magnitude is stored rather than the unit, which underflows where the numbers are subnormal.
    """

    lossy: ClassVar[bool] = True

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        blocks = pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        largest = torch.maximum(blocks.amax(1), -blocks.amin(1))
        divisor = torch.where(largest == 0, 1.0, largest)[:, None]
        # Infinity over itself is NaN, which has no code: zero times infinity is NaN again.
        codes = (blocks / divisor).mul_(127).round_().nan_to_num_(0.0).to(torch.int8)
        return torch.cat(
            (largest.view(torch.uint8), codes.view(torch.uint8).view(-1)[: flat.numel()])
        )

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        header = 4 * _ceil_div(n, BLOCK)
        largest = _as_type(payload[:header], torch.float32)
        codes = payload[header:].view(torch.int8).float()
        blocks = pad(codes, (0, -n % BLOCK)).view(-1, BLOCK)
        return blocks.div_(127).mul_(largest[:, None]).view(-1)[:n]


@dataclass(frozen=True)
class TopKCodec:
    """The largest magnitudes of each chunk, as a sign and one of two levels."""

    density: float
    lossy: ClassVar[bool] = True

    def chosen(self, size: int) -> int:
        """How many numbers of a chunk of this size are sent."""
        return max(1, round(self.density * size))

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        parts = [self._choose(chunks) for chunks in self._chunks(flat)]
        levels, places, codes = (torch.cat(several) for several in zip(*parts, strict=True))
        return torch.cat((levels.view(torch.uint8), _pack_12(places), _pack_2(codes)))

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        flat = payload.new_zeros(n, dtype=torch.float32)
        shapes = [(len(chunks), self.chosen(chunks.shape[1])) for chunks in self._chunks(flat)]
        sent, header = sum(rows * k for rows, k in shapes), 8 * sum(rows for rows, _ in shapes)
        middle = header + 3 * _ceil_div(sent, 2)
        levels = _as_type(payload[:header], torch.float32).view(-1, 2)
        places = _unpack_12(payload[header:middle], sent)
        codes = _unpack_2(payload[middle:], sent)
        first_row = first = 0
        for chunks, (rows, k) in zip(self._chunks(flat), shapes, strict=True):
            code = codes[first : first + rows * k].view(rows, k).long()
            value = levels[first_row : first_row + rows].gather(1, code & 1)
            value = torch.where(code >= 2, -value, value)
            chunks.scatter_(1, places[first : first + rows * k].view(rows, k).long(), value)
            first_row, first = first_row + rows, first + rows * k
        return flat

    def _chunks(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the full chunks, and of what is left as one more."""
        whole = flat.numel() - flat.numel() % CHUNK
        views = [flat[:whole].view(-1, CHUNK), flat[whole:].view(1, -1)]
        return [view for view in views if view.numel()]

    def _choose(self, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Levels, places and codes (2 x negative + larger level), each flat."""
        # Magnitudes sort as the bits that store them, and integers sort faster; NaN comes first.
        bits = chunks.view(torch.int32) & 0x7FFFFFFF
        largest, places = bits.topk(self.chosen(chunks.shape[1]), dim=1)
        levels, split = _two_levels(largest.view(torch.float32))
        larger = torch.arange(places.shape[1], device=places.device) < split
        codes = (chunks.gather(1, places) < 0).to(torch.uint8) * 2 + larger
        return levels.view(-1), places.view(-1), codes.view(-1)


def _two_levels(sorted_down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smaller and the larger level of each row, and how many numbers get the larger one.

    The squared error of a split is the sum of all squares less count x mean² of both groups.
    """
    k = sorted_down.shape[1]
    top = sorted_down[:, :1]
    # Sums of what is at most 1 do not overflow. A row with infinity becomes NaN: it is inf / inf.
    sums = (sorted_down / torch.where(top == 0, 1.0, top)).cumsum(1)
    counts = torch.arange(1, k + 1, device=sums.device, dtype=sums.dtype)
    rest_sums, rest_counts = sums[:, -1:] - sums, (k - counts).clamp(min=1)
    explained = sums.square() / counts + rest_sums.square() / rest_counts
    split = explained.argmax(1, keepdim=True)
    larger = (sums / counts).gather(1, split)
    smaller = (rest_sums / rest_counts).gather(1, split)
    return torch.cat((smaller, larger), 1) * top, split + 1


# ------------------------------------------------------------------ bits and bytes


def _pack_12(numbers: torch.Tensor) -> torch.Tensor:
    """Two numbers below 4096 in three bytes, the lower bits first."""
    first, second = pad(numbers, (0, numbers.numel() % 2)).view(-1, 2).int().unbind(1)
    bytes_ = (first & 255, (first >> 8) | ((second & 15) << 4), second >> 4)
    return torch.stack(bytes_, 1).to(torch.uint8).view(-1)


def _unpack_12(packed: torch.Tensor, n: int) -> torch.Tensor:
    low, middle, high = packed.view(-1, 3).int().unbind(1)
    return torch.stack((low | ((middle & 15) << 8), (middle >> 4) | (high << 4)), 1).view(-1)[:n]


def _pack_2(numbers: torch.Tensor) -> torch.Tensor:
    """Four numbers below 4 in a byte, the first in the lowest bits."""
    a, b, c, d = pad(numbers, (0, -numbers.numel() % 4)).view(-1, 4).unbind(1)
    return a | (b << 2) | (c << 4) | (d << 6)


def _unpack_2(packed: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], 1).view(-1)[:n]


def _ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def _as_type(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes read as numbers, copied first if they begin where such numbers cannot."""
    return (payload.clone() if payload.storage_offset() % dtype.itemsize else payload).view(dtype)
