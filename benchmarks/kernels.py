"""Our kernels beside torch's: parts of a block, and the step of AdamW.

    python benchmarks/kernels.py              the feed-forward part, both passes, in bf16
    python benchmarks/kernels.py --tiles      our two kernels of it alone, with other tiles
    python benchmarks/kernels.py --qkv        backward pass of queries, keys and values
    python benchmarks/kernels.py --adamw      a step of AdamW with its division of gradients
    python benchmarks/kernels.py --gradients  gradients of weights: cast to fp32, and written in it

For GPT-2's four sizes, and of the feed-forward part one more. `models/products.py` has the widths
up to which ours is used, and `models/kernels/products.py` the tiles; this script is where they come
from, and says what they should be on another GPU. So it is with queries, keys and values.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from gristmill.config.model import GPTConfig
from gristmill.models.build import build_meta_model
from gristmill.models.products import MLP_WIDEST, fused_mlp, product, qkv_backward, worth_fusing_qkv
from gristmill.optim.adamw import adam_step

TILES = (
    (128, 128, 64, 4, 2, 3),
    (128, 128, 64, 8, 2, 3),
    (128, 128, 64, 4, 2, 2),
    (128, 128, 32, 8, 2, 4),
    (128, 128, 32, 8, 2, 5),
    (128, 256, 64, 8, 1, 3),
    (128, 256, 64, 8, 1, 4),
    (256, 128, 64, 8, 1, 3),
    (256, 128, 64, 8, 1, 4),
    (64, 256, 64, 4, 2, 3),
    (128, 128, 128, 8, 1, 3),
)
"""Rows, columns, depth, warps (half as many for the forward kernel of relu2), programs per SM,
stages."""

SHAPES = ((65536, 768), (32768, 768), (32768, 1024), (16384, 1280), (8192, 1600), (16384, 2048))
"""Rows and widths."""
SIZES = {
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}
"""Layers, heads and widths of GPT-2."""
ROWS = {"124M": 65536, "350M": 32768, "774M": 16384, "1.5B": 8192}
"""Tokens in a step of `gpu_speed.py`."""
ROUNDS, CALLS = 5, 8

Part = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="our kernels alone, with other tiles")
    parser.add_argument("--qkv", action="store_true", help="queries, keys and values, backward")
    parser.add_argument("--adamw", action="store_true", help="the step of AdamW")
    parser.add_argument("--gradients", action="store_true", help="the gradients of weights")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, milliseconds")
    if options.qkv:
        compare_qkv()
    elif options.adamw:
        compare_adamw()
    elif options.gradients:
        compare_gradients()
    else:
        (compare_tiles if options.tiles else compare_parts)()


def compare_parts() -> None:
    """The whole part, both passes, ours and the compiler's."""
    print(f"{'activation':<12}{'rows':>8}{'width':>8}{'ours':>9}{'plain':>9}{'ratio':>8}  used")
    for activation, widest in MLP_WIDEST.items():
        for rows, width in SHAPES:
            torch.compiler.reset()  # past a number of shapes, nothing is compiled any more
            plain = torch.compile(plain_part(activation), dynamic=False)
            ours, theirs = times(rows, width, fused_part(activation), plain)
            used = "ours" if width <= widest else "plain"
            print(
                f"{activation:<12}{rows:>8}{width:>8}{ours:>9.3f}{theirs:>9.3f}"
                f"{theirs / ours:>8.3f}  {used}",
                flush=True,
            )


def compare_tiles() -> None:
    """Forward and backward kernel with each of the tiles, and the library's product alone."""
    for activation in MLP_WIDEST:
        for rows, width in (SHAPES[0], SHAPES[2], SHAPES[3]):
            try_tiles(activation, rows, width)


def try_tiles(activation: str, rows: int, width: int) -> None:
    from gristmill.models.kernels import products
    from gristmill.models.kernels.products import ProductTiles

    x, up, down, kept = (
        torch.rand(shape, device="cuda").bfloat16()
        for shape in ((rows, width), (4 * width, width), (width, 4 * width), (rows, 4 * width))
    )
    product = median(lambda: x @ up.T)
    print(f"{activation}, {rows} x {width}: the product alone {product:.3f}", flush=True)
    for numbers in TILES:
        products.FORWARD = products.BACKWARD = ProductTiles(*numbers)
        try:
            forward = median(lambda: products.linear_activation(x, up, None, activation))
            backward = median(lambda: products.activation_backward(x, down, kept, activation))
        except Exception as error:  # too much shared memory, say
            print(f"  {numbers!s:<30}{type(error).__name__}", flush=True)
        else:
            print(f"  {numbers!s:<30}{forward:>8.3f}{backward:>8.3f}", flush=True)


def compare_qkv() -> None:
    """From the gradients of queries, keys and values to those of the input and the weight: joined
    by a copy, and read where they are."""
    print(f"{'':<8}{'rows':>8}{'width':>8}{'ours':>9}{'joined':>9}{'ratio':>8}  used")
    for name, (_, _, width) in SIZES.items():
        rows = ROWS[name]
        x, *parts = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(4))
        weight = 0.02 * torch.randn(3 * width, width, device="cuda").bfloat16()
        theirs = median(partial(joined_backward, parts, x, weight))
        try:
            ours = median(partial(qkv_backward, *parts, x=x, weight=weight, dtype=torch.float32))
        except AssertionError:
            print(f"{name:<8}{rows:>8}{width:>8}{'':>9}{theirs:>9.3f}{'':>8}  joined", flush=True)
            continue
        used = "ours" if worth_fusing_qkv(x, outputs=3 * width) else "joined"
        print(
            f"{name:<8}{rows:>8}{width:>8}{ours:>9.3f}{theirs:>9.3f}{theirs / ours:>8.3f}  {used}",
            flush=True,
        )


def joined_backward(
    parts: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat(list(parts), dim=1)
    return whole @ weight, product(whole.T, x, torch.float32)


def compare_adamw() -> None:
    """A step over all parameters of GPT-2, by torch's fused kernel and by ours."""
    print(f"{'':<8}{'parameters':>14}{'torch':>9}{'ours':>9}{'ratio':>8}{'ours, TB/s':>12}")
    for name, (layers, heads, width) in SIZES.items():
        config = GPTConfig(layers=layers, heads=heads, width=width, context=1024)
        count, theirs, ours = times_of_adamw(config)
        rate = 28 * count / ours / 1e9  # seven numbers are read or written
        print(
            f"{name:<8}{count:>14,}{theirs:>9.3f}{ours:>9.3f}{theirs / ours:>8.3f}{rate:>12.2f}",
            flush=True,
        )
        torch.cuda.empty_cache()


@torch.no_grad()
def times_of_adamw(config: GPTConfig) -> tuple[int, float, float]:
    """The number of parameters, and the milliseconds of torch's step and ours."""
    shapes = [tuple(one.shape) for one in build_meta_model(config, vocab=50257).parameters()]
    parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    state: dict[nn.Parameter, dict[str, torch.Tensor]] = {one: {} for one in parameters}
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    group = {"params": parameters, **settings}
    one = torch.ones((), device="cuda")
    step = partial(adam_step, state, group, divisor=one, skip=torch.zeros_like(one))
    count = sum(parameter.numel() for parameter in parameters)
    return count, median(partial(step, kernel=False)), median(partial(step, kernel=True))


def compare_gradients() -> None:
    """Those of the linear layers of a block: a product in bf16 that is cast, and one in fp32."""
    print(f"{'':<8}{'rows':>8}{'inputs':>8}{'outputs':>9}{'cast':>9}{'fp32':>9}{'ratio':>8}")
    for name, (_, _, width) in SIZES.items():
        rows = ROWS[name]
        for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
            x, d = (
                torch.randn(rows, parts * width, device="cuda").bfloat16()
                for parts in (inputs, outputs)
            )
            cast = median(lambda x=x, d=d: (d.T @ x).float())
            written = median(lambda x=x, d=d: product(d.T, x, torch.float32))
            print(
                f"{name:<8}{rows:>8}{x.shape[1]:>8}{d.shape[1]:>9}{cast:>9.3f}{written:>9.3f}"
                f"{cast / written:>8.3f}",
                flush=True,
            )


def median(call: Callable[[], object]) -> float:
    call()  # compiles
    return statistics.median(measure(call) for _ in range(ROUNDS))


def fused_part(activation: str) -> Part:
    return lambda x, up, down: fused_mlp(x, up, None, down, activation)


def plain_part(activation: str) -> Part:
    def part(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = x @ up.T
        if activation == "relu2":
            return functional.relu(inner).square() @ down.T
        kind = "tanh" if activation == "gelu_tanh" else "none"
        return functional.gelu(inner, approximate=kind) @ down.T

    return part


def times(rows: int, width: int, *parts: Part) -> list[float]:
    """Milliseconds of both passes, the median of rounds in which the parts take turns."""
    shapes = {"x": (rows, width), "up": (4 * width, width), "down": (width, 4 * width)}
    x, up, down = (
        (torch.randn(shape, device="cuda") * (1.0 if name == "x" else 0.02)).bfloat16()
        for name, shape in shapes.items()
    )
    tensors = [tensor.requires_grad_() for tensor in (x, up, down)]
    outer = torch.randn_like(x)

    def call(part: Part) -> None:
        torch.autograd.grad(part(*tensors), tensors, outer)

    for part in parts:  # compiles
        call(part)
    found = [[measure(lambda part=part: call(part)) for part in parts] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def measure(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / CALLS


if __name__ == "__main__":
    main()
