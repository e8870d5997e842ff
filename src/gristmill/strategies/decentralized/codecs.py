"""What an exchange sends: n fp32 numbers as bytes, in one of four formats.

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

Equal magnitudes make top-k's choice a matter of the device: the same device type gives the same
bytes, but a CPU and a GPU may choose differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch.nn.functional import pad

BLOCK = 256
"""Numbers of int8 with a common scale."""
CHUNK = 4096
"""Numbers among which top-k chooses; a place takes 12 bits."""

CodecName = Literal["fp32", "bf16", "int8", "top-k"]


class Codec(Protocol):
    """A format of flat fp32 tensors on the wire."""

    @property
    def lossy(self) -> bool:
        """Whether decoding gives other numbers than were encoded."""
        ...

    def payload_bytes(self, n: int) -> int:
        """The size of n numbers."""
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

    def payload_bytes(self, n: int) -> int:
        return 4 * n

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(torch.uint8)

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        return _as_type(_checked(self, payload, n), torch.float32)


@dataclass(frozen=True)
class Bf16Codec:
    """The numbers rounded to bfloat16."""

    lossy: ClassVar[bool] = True

    def payload_bytes(self, n: int) -> int:
        return 2 * n

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.bfloat16().view(torch.uint8)

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        return _as_type(_checked(self, payload, n), torch.bfloat16).float()


@dataclass(frozen=True)
class Int8Codec:
    """Codes of 8 bits in units of 1/127 of the largest magnitude of a block.

    That magnitude is stored rather than the unit, which underflows where the numbers are subnormal.
    """

    lossy: ClassVar[bool] = True

    def payload_bytes(self, n: int) -> int:
        return 4 * _ceil_div(n, BLOCK) + n

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        blocks = pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        largest = torch.maximum(blocks.amax(1), -blocks.amin(1))
        divisor = torch.where(largest == 0, 1.0, largest)[:, None]
        # Infinity over itself is NaN, which has no code: zero times infinity is NaN again.
        codes = (blocks / divisor).mul_(127).round_().nan_to_num_(0.0).to(torch.int8)
        payload = flat.new_empty(self.payload_bytes(flat.numel()), dtype=torch.uint8)
        header = 4 * len(largest)
        payload[:header] = largest.view(torch.uint8)
        payload[header:] = codes.view(torch.uint8).view(-1)[: flat.numel()]
        return payload

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        header = 4 * _ceil_div(n, BLOCK)
        largest = _as_type(_checked(self, payload, n)[:header], torch.float32)
        codes = payload[header:].view(torch.int8).float()
        blocks = pad(codes, (0, -n % BLOCK)).view(-1, BLOCK)
        return blocks.div_(127).mul_(largest[:, None]).view(-1)[:n]


@dataclass(frozen=True)
class TopKCodec:
    """The largest magnitudes of each chunk, as a sign and one of two levels."""

    density: float
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert 0 < self.density <= 1, self.density

    def chosen(self, size: int) -> int:
        """How many numbers of a chunk of this size are sent."""
        return max(1, round(self.density * size))

    def payload_bytes(self, n: int) -> int:
        full, rest = divmod(n, CHUNK)
        sent = full * self.chosen(CHUNK) + (self.chosen(rest) if rest else 0)
        return 8 * (full + (rest > 0)) + 3 * _ceil_div(sent, 2) + _ceil_div(sent, 4)

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        parts = [self._choose(chunks) for chunks in self._chunks(flat)]
        levels, places, codes = (torch.cat(several) for several in zip(*parts, strict=True))
        return torch.cat((levels.view(torch.uint8), _pack_12(places), _pack_2(codes)))

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        flat = payload.new_zeros(n, dtype=torch.float32)
        shapes = [(len(chunks), self.chosen(chunks.shape[1])) for chunks in self._chunks(flat)]
        sent, header = sum(rows * k for rows, k in shapes), 8 * sum(rows for rows, _ in shapes)
        middle = header + 3 * _ceil_div(sent, 2)
        levels = _as_type(_checked(self, payload, n)[:header], torch.float32).view(-1, 2)
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


def _checked(codec: Codec, payload: torch.Tensor, n: int) -> torch.Tensor:
    assert payload.shape == (codec.payload_bytes(n),), (payload.shape, n)
    return payload


def _as_type(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes read as numbers, copied first if they begin where such numbers cannot."""
    return (payload.clone() if payload.storage_offset() % dtype.itemsize else payload).view(dtype)
