"""Tiles of the products with few rows that decoding is made of, in bf16 on a GPU.

    python benchmarks/decoding_tiles.py
    python benchmarks/decoding_tiles.py --width 2048 --inner 8192 --rows 1 32

Each product is timed as it is used: in a CUDA graph, after a norm, with weights that are in no
cache. Printed are microseconds of such a pair for the best tiles of each number of pieces and of
parts, which must be the same for any number of rows. `tiles` in `models/kernels/decoding.py` comes
from here. Compiling takes most of the time: --compile N M compiles every M-th choice from the N-th
on, so that several processes can share it.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gristmill.models.decoding import Norm
from gristmill.models.kernels import decoding
from gristmill.models.kernels.decoding import DecodingTiles

DTYPE = torch.bfloat16
LAYERS = 30
"""Matrices that take turns, so that none is in the cache."""


class Shape(NamedTuple):
    """A product of a block."""

    name: str
    outputs: int
    inputs: int
    cut: bool
    """Whether its pieces are added up by the norm behind it."""


class Choice(NamedTuple):
    """A way to compute it."""

    pieces: int
    tiles: DecodingTiles


def shapes(width: int, inner: int) -> list[Shape]:
    return [
        Shape("qkv", 3 * width, width, False),
        Shape("out", width, width, True),
        Shape("up", inner, width, False),
        Shape("down", width, inner, True),
    ]


def choices(shape: Shape, rows: int) -> Iterator[Choice]:
    few = 16 if rows <= 16 else 32 if rows <= 32 else 64
    for pieces, parts in itertools.product((2, 4) if shape.cut else (1,), (1, 2, 4)):
        part = shape.inputs // (pieces * parts)
        for columns, depth, warps in itertools.product((16, 32, 64), (32, 64, 128), (2, 4)):
            if part % depth == 0 and parts * depth * columns <= 32768:
                yield Choice(pieces, DecodingTiles(parts, few, columns, depth, 3, warps))


def product(shape: Shape, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> None:
    decoding.CUT = choice.pieces
    decoding.tiles = lambda *_, **__: choice.tiles
    if shape.cut:
        decoding.product(x, weight, None)
    else:
        decoding.linear(x, weight)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def microseconds(compute: Callable[[], None]) -> float:
    """Of the fastest of some replays of a graph."""
    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * min(times)


def compare(shape: Shape, width: int, rows: int) -> None:
    stream, x = random(rows, width), random(rows, shape.inputs)
    weights = [random(shape.outputs, shape.inputs) for _ in range(LAYERS)]
    norm = Norm(True, 1e-5, random(width), random(width))
    best: dict[tuple[int, int], tuple[float, DecodingTiles]] = defaultdict(
        lambda: (math.inf, DecodingTiles(*6 * [0]))
    )
    for choice in choices(shape, rows):

        def compute(choice: Choice = choice) -> None:
            for weight in weights:
                decoding.normalised(stream, norm)
                product(shape, choice, x, weight)

        key = choice.pieces, choice.tiles.parts
        best[key] = min(best[key], (microseconds(compute) / LAYERS, choice.tiles))
    for (pieces, parts), (time, found) in sorted(best.items(), key=lambda item: item[1]):
        of = f"{shape.name:6}{rows:>4} rows {pieces:>3} pieces {parts:>3} parts"
        what = f"columns {found.columns}, depth {found.depth}, warps {found.warps}"
        print(f"{of}{time:>8.2f}  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--inner", type=int, default=3072)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--compile", type=int, nargs=2, metavar=("N", "M"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU")
    for shape, rows in itertools.product(shapes(options.width, options.inner), options.rows):
        if options.compile is None:
            compare(shape, options.width, rows)
            continue
        number, of = options.compile
        x, weight = random(rows, shape.inputs), random(shape.outputs, shape.inputs)
        for choice in list(choices(shape, rows))[number::of]:
            product(shape, choice, x, weight)


if __name__ == "__main__":
    main()
