"""Matrix products of blocks in fp8, for training.

    y  = x W^T        x, W: e4m3     y, dx: in the dtype of x
    dx = dy W         dy: e5m2       dW: in the dtype of the weight, summed in fp32
    dW = dy^T x

An operand is fp8 numbers times one scale, the power of two from which on nothing seen lately is too
large for the format. It is known before the operand is, so that a cast reads each number once; the
cast notes the largest for later steps. What is larger all the same is clamped. What is not finite
becomes not a number, so that the step is skipped. Before the first step one sample is computed
without fp8, to have scales at all.

The tensor cores sum along rows of both operands. Each operand is summed along both of its
dimensions in the three products, so a cast writes it twice, once transposed. A weight that is
sharded, and so is gathered anew for the backward pass, is cast anew there too: its copy in fp8
would be as large as the model.

Elsewhere torch computes the same products in fp32, which is slow and meant for tests.

Shapes: N tokens, I inputs and O outputs of a layer; D width, F inner width of an MLP. A name that
ends in 8 is of fp8 numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

MULTIPLE = 16
"""Dimensions of a product in fp8 must be multiples of this."""
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}
"""By whether the operand is a gradient."""
X, WEIGHT, GRADIENT = range(3)
"""The operands of a layer, in the order of its scales."""
DIRECT, TURNED, BOTH = 1, 2, 3
"""What a cast writes."""
ALIGNED = 4
"""Numbers from one scale to the next: cuBLAS wants addresses that are multiples of 16."""
DECAY = 0.95
"""What a step leaves of the largest number of earlier ones."""
MARGIN = 2.0
"""How much larger than a sample's the numbers of the first step may be."""
FUSED = ("gelu", "gelu_tanh", "relu", "relu2")
"""Activations that are computed within a cast."""


class Fp8Layer(Protocol):
    """A linear layer with scales."""

    fp8_scales: torch.Tensor | None
    """Of `X`, `WEIGHT` and `GRADIENT`, each in the first column of a row."""
    fp8_seen: torch.Tensor | None
    """The largest numbers of this step."""
    fp8_measures: bool
    """Whether it only notes them."""


# ------------------------------------------------------------------ scales


class Fp8Scales:
    """The scales of a model's products in fp8: how they follow the operands, and what of them is
    saved. They are the same on all processes, whatever each of them holds."""

    def __init__(self, layers: Mapping[str, Fp8Layer], device: torch.device) -> None:
        self.layers = dict(layers)
        self.largest_LO = torch.zeros(len(self.layers), 3, device=device)
        """For each layer and operand, the largest number of late; 0 before there was one."""
        largest = [torch.finfo(FORMATS[operand == GRADIENT]).max for operand in range(3)]
        # Made once: a copy from the host would wait for the device in every step.
        self._most_O = torch.tensor(largest, device=device)
        self.cold = True
        """Whether none was seen yet."""
        for layer in self.layers.values():
            layer.fp8_scales = torch.ones(3, ALIGNED, device=device)
            layer.fp8_seen = torch.zeros(3, device=device)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Layers compute without fp8 and note the operands. Nothing is compiled for that."""
        for layer in self.layers.values():
            layer.fp8_measures = True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for layer in self.layers.values():
                layer.fp8_measures = False

    @torch.no_grad()
    def follow(
        self, largest_of_all: Callable[[torch.Tensor], None], skip: torch.Tensor | None = None
    ) -> None:
        """Set the scales of the next step from what was seen in this one, unless `skip` is 1.
        `largest_of_all` replaces each number by the largest of all processes."""
        all_seen = [_tensor(layer.fp8_seen) for layer in self.layers.values()]
        seen_LO = torch.stack(all_seen)
        largest_of_all(seen_LO.nan_to_num_(nan=0.0, posinf=0.0))
        new_LO = MARGIN * seen_LO if self.cold else seen_LO.maximum(DECAY * self.largest_LO)
        self.largest_LO = new_LO if skip is None else torch.where(skip > 0, self.largest_LO, new_LO)
        self.cold = False
        torch._foreach_zero_(all_seen)
        self._write()

    def _write(self) -> None:
        # The power of two above: the exponent of fp32 is its bits from the 23rd on.
        least = (self.largest_LO / self._most_O).clamp(min=2.0**-100)
        scales_LO = ((least.view(torch.int32) & 0x7F800000) + (1 << 23)).view(torch.float32)
        spread_LOA = scales_LO[..., None].expand(-1, -1, ALIGNED)
        all_scales = [_tensor(layer.fp8_scales) for layer in self.layers.values()]
        torch._foreach_copy_(all_scales, list(spread_LOA.unbind()))

    def state(self) -> dict[str, list[float]]:
        """The largest numbers of each layer's operands."""
        return dict(zip(self.layers, self.largest_LO.tolist(), strict=True))

    def load(self, state: Any) -> None:
        """Load what `state` returned; a `ValueError` says that this is something else."""
        if not isinstance(state, Mapping) or set(state) != set(self.layers):
            raise ValueError("not the scales of this model's products in fp8")
        rows = [_numbers(state[name]) for name in self.layers]
        self.largest_LO.copy_(torch.tensor(rows))
        self.cold = not self.largest_LO.any().item()
        self._write()


def _numbers(row: Any) -> list[float]:
    try:
        numbers = [float(number) for number in row]
    except (TypeError, ValueError) as error:
        raise ValueError(f"largest numbers of a layer in fp8: {row!r}") from error
    if len(numbers) != 3 or not all(0 <= number < float("inf") for number in numbers):
        raise ValueError(f"largest numbers of a layer in fp8: {numbers}")
    return numbers


def _tensor(found: torch.Tensor | None) -> torch.Tensor:
    assert found is not None, "a layer in fp8"
    return found


def note_operands(layer: Fp8Layer, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Note the largest numbers of a product that was computed without fp8."""
    seen = _tensor(layer.fp8_seen)
    _note(seen, X, x)
    _note(seen, WEIGHT, weight)
    if y.requires_grad:
        y.register_hook(lambda gradient: _note(seen, GRADIENT, gradient))


@torch.no_grad()
def _note(seen: torch.Tensor, operand: int, values: torch.Tensor) -> None:
    largest = torch.linalg.vector_norm(values, ord=torch.inf, dtype=torch.float32)
    seen[operand] = seen[operand].maximum(largest)


# ------------------------------------------------------------------ casts and products


def _cast(
    x: torch.Tensor, layer: Sequence[torch.Tensor], activation: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into a layer in fp8, and transposed. `layer`: scales, and what was seen."""
    direct, turned, _ = fp8_cast(x, None, *layer, X, activation, BOTH)
    return direct, turned


def _cast_weight(
    weight: torch.Tensor, layer: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in fp8, and what to keep of it for a layer in a dtype."""
    if weight.dtype == dtype:
        return fp8_cast(weight, None, *layer, WEIGHT, "", DIRECT)[0], weight
    direct, turned, _ = fp8_cast(weight, None, *layer, WEIGHT, "", BOTH)
    return direct, turned


def _turned(kept: torch.Tensor, layer: Sequence[torch.Tensor]) -> torch.Tensor:
    """A weight in fp8, transposed, from what was kept of it."""
    if kept.dtype == FORMATS[False]:
        return kept
    return fp8_cast(kept, None, *layer, WEIGHT, "", TURNED)[1]


def _cast_gradient(
    d: torch.Tensor, layer: Sequence[torch.Tensor], h: torch.Tensor | None = None, name: str = ""
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient in fp8, transposed, and the sums of its columns; times the slope at h of an
    activation, if there is one."""
    direct, turned, sums = fp8_cast(d.contiguous(), h, *layer, GRADIENT, name, BOTH)
    return direct, turned, sums.sum(0)


@torch.library.custom_op("gristmill::fp8_cast", mutates_args=("seen",))
def fp8_cast(
    x: torch.Tensor,
    h: torch.Tensor | None,
    scales: torch.Tensor,
    seen: torch.Tensor,
    operand: int,
    activation: str,
    written: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in fp8, the same transposed, and for a gradient sums of its columns by groups of
    rows. What is cast is x, its activation, or with `h` x times the activation's slope there.
    `written`: DIRECT, TURNED or BOTH; the other is empty."""
    if x.is_cuda:
        from gristmill.models.kernels.fp8 import cast

        found = results(x, operand, written, groups=-(-x.shape[0] // CAST_ROWS))
        where = scales[operand], seen[operand:]
        cast(x, h, *where, found, activation=activation, rows=CAST_ROWS)
        return found
    values = x.float()
    if h is not None:
        values = _slope(h.float(), activation, values)
    elif activation:
        values = ACTIVATIONS[activation](values)
    _note(seen, operand, values)
    dtype = FORMATS[operand == GRADIENT]
    most, scaled = torch.finfo(dtype).max, values / scales[operand, 0]
    # Infinity minus itself is not a number.
    direct = (scaled.clamp(-most, most) + (scaled - scaled)).to(dtype)
    sums = values.sum(0, keepdim=True) if operand == GRADIENT else values.new_empty(0)
    turned = direct.T.contiguous() if written & TURNED else direct.new_empty(0)
    return direct if written & DIRECT else direct.new_empty(0), turned, sums


@fp8_cast.register_fake
def _(x: Any, h: Any, scales: Any, seen: Any, operand: int, activation: str, written: int) -> Any:
    return results(x, operand, written, groups=-(-x.shape[0] // CAST_ROWS) if x.is_cuda else 1)


def results(
    x_RC: torch.Tensor, operand: int, written: int, *, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for what `fp8_cast` returns, with sums over so many groups of rows."""
    (rows, columns), gradient = x_RC.shape, operand == GRADIENT
    shapes = [(rows, columns) if written & DIRECT else (0,)]
    shapes.append((columns, rows) if written & TURNED else (0,))
    direct, turned = (x_RC.new_empty(shape, dtype=FORMATS[gradient]) for shape in shapes)
    sums = (groups, columns) if gradient else (0,)
    return direct, turned, x_RC.new_empty(sums, dtype=torch.float32)


CAST_ROWS = 128
"""Rows that a program of the kernel casts."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda h: functional.relu(h).square(),
}


def _slope(h: torch.Tensor, activation: str, d: torch.Tensor) -> torch.Tensor:
    """d times the slope of an activation at h."""
    if activation in ("gelu", "gelu_tanh"):
        kind = "tanh" if activation == "gelu_tanh" else "none"
        found: torch.Tensor = torch.ops.aten.gelu_backward(d, h, approximate=kind)
        return found
    return d * (h > 0) if activation == "relu" else 2 * d * functional.relu(h)


def _product(
    a8_MK: torch.Tensor,
    b8_NK: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    dtype: torch.dtype,
    bias_N: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """a b^T. `fast`: accumulate in the tensor cores, with about 14 bits."""
    return torch._scaled_mm(
        a8_MK,
        b8_NK.T,
        scale_a,
        scale_b,
        bias=bias_N,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


# ------------------------------------------------------------------ layers


def fp8_linear(
    layer: Fp8Layer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A linear layer in fp8; its bias is in the dtype of x."""
    scaled = _tensor(layer.fp8_scales), _tensor(layer.fp8_seen)
    y: torch.Tensor = _Fp8Linear.apply(x.flatten(0, -2).contiguous(), weight, bias, *scaled)
    return y.unflatten(0, x.shape[:-1])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        scales: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        x8_NI, x8_IN = _cast(x_NI, (scales, seen))
        w8_OI, kept_weight = _cast_weight(weight_OI, (scales, seen), x_NI.dtype)
        ctx.save_for_backward(x8_IN, kept_weight, scales)
        ctx.dtypes, ctx.biased, ctx.seen = (x_NI.dtype, weight_OI.dtype), bias_O is not None, seen
        x_scale, w_scale, _ = _split(scales)
        return _product(x8_NI, w8_OI, x_scale, w_scale, dtype=x_NI.dtype, bias_N=bias_O, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8_IN, kept_weight, scales = ctx.saved_tensors
        w8_IO = _turned(kept_weight, (scales, ctx.seen))
        d8_NO, d8_ON, sums_O = _cast_gradient(gradients[0], (scales, ctx.seen))
        x_scale, w_scale, d_scale = _split(scales)
        d_x_NI = _product(d8_NO, w8_IO, d_scale, w_scale, dtype=ctx.dtypes[0])
        d_weight_OI = _product(d8_ON, x8_IN, d_scale, x_scale, dtype=ctx.dtypes[1])
        d_bias_O = sums_O.to(ctx.dtypes[0]) if ctx.biased else None
        return d_x_NI, d_weight_OI, d_bias_O, None, None


def _split(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return scales[X, :1], scales[WEIGHT, :1], scales[GRADIENT, :1]


def fp8_mlp(
    x: torch.Tensor,
    up: tuple[Fp8Layer, torch.Tensor, torch.Tensor | None],
    down: tuple[Fp8Layer, torch.Tensor],
    activation: str,
) -> torch.Tensor:
    """Up, activation and down, each layer with its weight, and its bias in the dtype of x; the
    caller adds the bias of `down`. The activation is computed within casts, so that nothing but h
    is written in half precision."""
    (above, up_FD, bias_F), (below, down_DF) = up, down
    scaled = [_tensor(found) for found in (above.fp8_scales, above.fp8_seen)]
    scaled += [_tensor(found) for found in (below.fp8_scales, below.fp8_seen)]
    x_ND = x.flatten(0, -2).contiguous()
    z: torch.Tensor = _Fp8MLP.apply(x_ND, up_FD, bias_F, down_DF, activation, *scaled)
    return z.unflatten(0, x.shape[:-1])


class _Fp8MLP(torch.autograd.Function):
    #     h = x U^T + b    y = f(h)    z = y D^T
    #     dh = (dz D) f'(h)    dU = dh^T x    dD = dz^T y    dx = dh U

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        up_FD: torch.Tensor,
        bias_F: torch.Tensor | None,
        down_DF: torch.Tensor,
        activation: str,
        up_scales: torch.Tensor,
        up_seen: torch.Tensor,
        down_scales: torch.Tensor,
        down_seen: torch.Tensor,
    ) -> torch.Tensor:
        up, down = (up_scales, up_seen), (down_scales, down_seen)
        dtype = x_ND.dtype
        x8_ND, x8_DN = _cast(x_ND, up)
        u8_FD, kept_up = _cast_weight(up_FD, up, dtype)
        x_scale, u_scale, _ = _split(up_scales)
        h_NF = _product(x8_ND, u8_FD, x_scale, u_scale, dtype=dtype, bias_N=bias_F, fast=True)
        y8_NF, y8_FN = _cast(h_NF, down, activation)
        d8_DF, kept_down = _cast_weight(down_DF, down, dtype)
        y_scale, d_scale, _ = _split(down_scales)
        ctx.save_for_backward(x8_DN, kept_up, h_NF, y8_FN, kept_down, up_scales, down_scales)
        ctx.seen, ctx.activation, ctx.biased = (up_seen, down_seen), activation, bias_F is not None
        ctx.dtypes = dtype, up_FD.dtype, down_DF.dtype
        return _product(y8_NF, d8_DF, y_scale, d_scale, dtype=dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8_DN, kept_up, h_NF, y8_FN, kept_down, up_scales, down_scales = ctx.saved_tensors
        up, down = (up_scales, ctx.seen[0]), (down_scales, ctx.seen[1])
        half, up_dtype, down_dtype = ctx.dtypes
        x_scale, u_scale, dh_scale = _split(up_scales)
        y_scale, d_scale, dz_scale = _split(down_scales)
        dz8_ND, dz8_DN, _ = _cast_gradient(gradients[0], down)
        d_down_DF = _product(dz8_DN, y8_FN, dz_scale, y_scale, dtype=down_dtype)
        dy_NF = _product(dz8_ND, _turned(kept_down, down), dz_scale, d_scale, dtype=half)
        dh8_NF, dh8_FN, sums_F = _cast_gradient(dy_NF, up, h_NF, ctx.activation)
        d_up_FD = _product(dh8_FN, x8_DN, dh_scale, x_scale, dtype=up_dtype)
        d_x_ND = _product(dh8_NF, _turned(kept_up, up), dh_scale, u_scale, dtype=half)
        d_bias_F = sums_F.to(half) if ctx.biased else None
        return d_x_ND, d_up_FD, d_bias_F, d_down_DF, *([None] * 5)
