"""Matrix products of blocks in fp8, for training.

    y  = x W^T        x, W: e4m3     y, dx: in the dtype of x
    dx = dy W         dy: e5m2       dW: in the dtype of the weight, summed in fp32
    dW = dy^T x

Scaling is delayed: an operand is fp8 values times one scale, a power of two that follows from the
largest absolute values (amax) of earlier steps. So the scale is known before the operand is, and a
cast reads each value once; it also records the amax of this step. Values beyond the range of the
format are clamped. Infinities and NaN become NaN, so that the step is skipped. Before the first
step one sample goes through the model without fp8 to calibrate the scales.

The tensor cores sum along rows of both operands. Each operand is summed along both of its
dimensions in the three products, so a cast writes it twice, once transposed. A sharded weight is
gathered again for the backward pass and cast again there: keeping its fp8 copies would undo the
sharding.

On a CPU torch computes the same products in fp32, which is slow and meant for tests.

Shapes: N tokens, I inputs and O outputs of a layer; D width, F inner width of an MLP; L layers, A
values from one scale to the next. Names with an 8 are tensors in fp8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from gristmill.models.operations import fake, operation

MULTIPLE = 16
"""Dimensions of a product in fp8 must be multiples of this."""
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}
"""By whether the operand is a gradient."""
X, WEIGHT, GRADIENT = range(3)
"""The operands of a layer, in the order of its scales."""
UNTRANSPOSED, TRANSPOSED, BOTH = 1, 2, 3
"""Which layouts a cast writes."""
ALIGNED = 4
"""Values from one scale to the next: cuBLAS wants addresses that are multiples of 16."""
DECAY = 0.95
"""Factor by which an amax shrinks in every step that does not exceed it."""
MARGIN = 2.0
"""Factor between the amax of the calibration sample and the range of the first step."""
FUSED = ("gelu", "gelu_tanh", "relu", "relu2")
"""Activations that are computed within a cast."""


class Fp8Layer(Protocol):
    """A linear layer with scales."""

    fp8_scales: torch.Tensor | None
    """Of the operands X, WEIGHT and GRADIENT, each in the first column of a row."""
    fp8_amax: torch.Tensor | None
    """The operands' largest absolute values in this step."""
    fp8_calibrates: bool
    """Whether it computes without fp8 and only records the amax."""


# ------------------------------------------------------------------ scales


class Fp8Scales:
    """The scales of all layers in fp8, and the amax of earlier steps that they follow from, which
    is what a checkpoint holds. They are the same on all processes."""

    def __init__(self, layers: Mapping[str, Fp8Layer], device: torch.device) -> None:
        self.layers = dict(layers)
        self.amax_LO = torch.zeros(len(self.layers), 3, device=device)
        """The amax of earlier steps, decayed; 0 before the calibration."""
        largest = [torch.finfo(FORMATS[operand == GRADIENT]).max for operand in range(3)]
        # Made once: a copy from the host would wait for the device in every step.
        self._format_max_O = torch.tensor(largest, device=device)
        self.calibrated = False
        for layer in self.layers.values():
            layer.fp8_scales = torch.ones(3, ALIGNED, device=device)
            layer.fp8_amax = torch.zeros(3, device=device)

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Layers compute without fp8 and record the amax of their operands; nothing is compiled."""
        for layer in self.layers.values():
            layer.fp8_calibrates = True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for layer in self.layers.values():
                layer.fp8_calibrates = False

    @torch.no_grad()
    def update(
        self, reduce_max: Callable[[torch.Tensor], None], skip: torch.Tensor | None = None
    ) -> None:
        """Set the scales of the next step from the amax of this one, unless `skip` is 1.
        `reduce_max` replaces each value by the largest of all processes."""
        step_amax = [_tensor(layer.fp8_amax) for layer in self.layers.values()]
        step_amax_LO = torch.stack(step_amax)
        reduce_max(step_amax_LO.nan_to_num_(nan=0.0, posinf=0.0))
        if self.calibrated:
            new_LO = step_amax_LO.maximum(DECAY * self.amax_LO)
        else:
            new_LO = MARGIN * step_amax_LO
        self.amax_LO = new_LO if skip is None else torch.where(skip > 0, self.amax_LO, new_LO)
        self.calibrated = True
        torch._foreach_zero_(step_amax)
        self._write_scales()

    def _write_scales(self) -> None:
        # Projections that start at zero have an amax of 0, and so have the gradients of what is
        # before them. In the next step they are something, so they are scaled as the largest of
        # other layers: a scale that is too small would clamp them, one that is too large costs
        # digits only far from there.
        others_LO = self.amax_LO.amax(dim=0, keepdim=True)
        others_LO = torch.where(others_LO > 0, others_LO, 1.0)
        amax_LO = torch.where(self.amax_LO > 0, self.amax_LO, others_LO)
        # The power of two above: the exponent of fp32 is its bits from the 23rd on.
        least = (amax_LO / self._format_max_O).clamp(min=2.0**-100)
        scales_LO = ((least.view(torch.int32) & 0x7F800000) + (1 << 23)).view(torch.float32)
        spread_LOA = scales_LO[..., None].expand(-1, -1, ALIGNED)
        all_scales = [_tensor(layer.fp8_scales) for layer in self.layers.values()]
        torch._foreach_copy_(all_scales, list(spread_LOA.unbind()))

    def state(self) -> dict[str, list[float]]:
        """The amax of each layer's operands."""
        return dict(zip(self.layers, self.amax_LO.tolist(), strict=True))

    def load(self, state: Any) -> None:
        """Load what `state` returned; a `ValueError` says that this is something else."""
        if not isinstance(state, Mapping) or set(state) != set(self.layers):
            raise ValueError("not the scales of this model's products in fp8")
        rows = [_numbers(state[name]) for name in self.layers]
        self.amax_LO.copy_(torch.tensor(rows))
        self.calibrated = bool(self.amax_LO.any())
        self._write_scales()


def _numbers(row: Any) -> list[float]:
    try:
        numbers = [float(number) for number in row]
    except (TypeError, ValueError) as error:
        raise ValueError(f"amax of a layer in fp8: {row!r}") from error
    if len(numbers) != 3 or not all(0 <= number < float("inf") for number in numbers):
        raise ValueError(f"amax of a layer in fp8: {numbers}")
    return numbers


def _tensor(found: torch.Tensor | None) -> torch.Tensor:
    assert found is not None, "a layer in fp8"
    return found


def record_amax(layer: Fp8Layer, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Record the amax of a product's operands that was computed without fp8."""
    amax = _tensor(layer.fp8_amax)
    _raise_amax(amax, X, x)
    _raise_amax(amax, WEIGHT, weight)
    if y.requires_grad:
        y.register_hook(lambda gradient: _raise_amax(amax, GRADIENT, gradient))


@torch.no_grad()
def _raise_amax(amax: torch.Tensor, operand: int, values: torch.Tensor) -> None:
    largest = torch.linalg.vector_norm(values, ord=torch.inf, dtype=torch.float32)
    amax[operand] = amax[operand].maximum(largest)


# ------------------------------------------------------------------ casts and products


def _cast(
    x: torch.Tensor, layer: Sequence[torch.Tensor], activation: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of a layer in fp8, and transposed. `layer`: its scales and amax."""
    untransposed, transposed, _ = fp8_cast(x, None, *layer, X, activation, BOTH, False)
    return untransposed, transposed


def _cast_weight(
    weight: torch.Tensor, layer: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in fp8, and what to keep of it for a layer in a dtype."""
    if weight.dtype == dtype:
        return fp8_cast(weight, None, *layer, WEIGHT, "", UNTRANSPOSED, False)[0], weight
    untransposed, transposed, _ = fp8_cast(weight, None, *layer, WEIGHT, "", BOTH, False)
    return untransposed, transposed


def _weight_transposed(kept: torch.Tensor, layer: Sequence[torch.Tensor]) -> torch.Tensor:
    """A weight in fp8, transposed, from what was kept of it."""
    if kept.dtype == FORMATS[False]:
        return kept
    return fp8_cast(kept, None, *layer, WEIGHT, "", TRANSPOSED, False)[1]


def _cast_gradient(
    d: torch.Tensor,
    layer: Sequence[torch.Tensor],
    h: torch.Tensor | None = None,
    activation: str = "",
    *,
    summed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient in fp8, transposed, and the sums of its columns if they are needed; times the
    slope at h of an activation, if there is one."""
    d = d.contiguous()
    untransposed, transposed, sums = fp8_cast(d, h, *layer, GRADIENT, activation, BOTH, summed)
    return untransposed, transposed, sums.sum(0)


@operation(mutates_args=("amax",))
def fp8_cast(
    x: torch.Tensor,
    h: torch.Tensor | None,
    scales: torch.Tensor,
    amax: torch.Tensor,
    operand: int,
    activation: str,
    written: int,
    summed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in fp8, the same transposed, and if `summed` the sums of its columns by groups of
    rows. What is cast is x, its activation, or with `h` x times the activation's slope there.
    `written`: UNTRANSPOSED, TRANSPOSED or BOTH; the other is empty."""
    if x.is_cuda:
        from gristmill.models.kernels.fp8 import cast

        groups = -(-x.shape[0] // CAST_ROWS) if summed else 0
        written_to = results(x, operand, written, groups=groups)
        cast(x, h, scales, amax, operand, written_to, activation=activation, rows=CAST_ROWS)
        return written_to
    values = x.float()
    if h is not None:
        values = _slope(h.float(), activation, values)
    elif activation:
        values = ACTIVATIONS[activation](values)
    _raise_amax(amax, operand, values)
    dtype = FORMATS[operand == GRADIENT]
    most, scaled = torch.finfo(dtype).max, values / scales[operand, 0]
    # Infinity minus itself is not a number.
    untransposed = (scaled.clamp(-most, most) + (scaled - scaled)).to(dtype)
    sums = values.sum(0, keepdim=True) if summed else values.new_empty((0, x.shape[1]))
    transposed = untransposed.T.contiguous() if written & TRANSPOSED else untransposed.new_empty(0)
    return untransposed if written & UNTRANSPOSED else untransposed.new_empty(0), transposed, sums


@fake(fp8_cast)
def _(
    x: Any,
    h: Any,
    scales: Any,
    amax: Any,
    operand: int,
    activation: str,
    written: int,
    summed: bool,
) -> Any:
    groups = -(-x.shape[0] // CAST_ROWS) if x.is_cuda else 1
    return results(x, operand, written, groups=groups if summed else 0)


def results(
    x_RC: torch.Tensor, operand: int, written: int, *, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for what `fp8_cast` returns, with sums over so many groups of rows."""
    (rows, columns), dtype = x_RC.shape, FORMATS[operand == GRADIENT]
    shapes = [(rows, columns) if written & UNTRANSPOSED else (0,)]
    shapes.append((columns, rows) if written & TRANSPOSED else (0,))
    untransposed, transposed = (x_RC.new_empty(shape, dtype=dtype) for shape in shapes)
    return untransposed, transposed, x_RC.new_empty((groups, columns), dtype=torch.float32)


CAST_ROWS = 64
"""Rows of the tile that one program of the kernel casts."""

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
    scaled = _tensor(layer.fp8_scales), _tensor(layer.fp8_amax)
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
        amax: torch.Tensor,
    ) -> torch.Tensor:
        x8_NI, x8_IN = _cast(x_NI, (scales, amax))
        w8_OI, kept_weight = _cast_weight(weight_OI, (scales, amax), x_NI.dtype)
        ctx.save_for_backward(x8_IN, kept_weight, scales)
        ctx.dtypes, ctx.biased, ctx.amax = (x_NI.dtype, weight_OI.dtype), bias_O is not None, amax
        x_scale, w_scale, _ = _split(scales)
        return _product(x8_NI, w8_OI, x_scale, w_scale, dtype=x_NI.dtype, bias_N=bias_O, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8_IN, kept_weight, scales = ctx.saved_tensors
        w8_IO = _weight_transposed(kept_weight, (scales, ctx.amax))
        scaled = scales, ctx.amax
        d8_NO, d8_ON, sums_O = _cast_gradient(gradients[0], scaled, summed=ctx.biased)
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
    scaled = [_tensor(found) for found in (above.fp8_scales, above.fp8_amax)]
    scaled += [_tensor(found) for found in (below.fp8_scales, below.fp8_amax)]
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
        up_amax: torch.Tensor,
        down_scales: torch.Tensor,
        down_amax: torch.Tensor,
    ) -> torch.Tensor:
        up, down = (up_scales, up_amax), (down_scales, down_amax)
        dtype = x_ND.dtype
        x8_ND, x8_DN = _cast(x_ND, up)
        u8_FD, kept_up = _cast_weight(up_FD, up, dtype)
        x_scale, u_scale, _ = _split(up_scales)
        h_NF = _product(x8_ND, u8_FD, x_scale, u_scale, dtype=dtype, bias_N=bias_F, fast=True)
        y8_NF, y8_FN = _cast(h_NF, down, activation)
        d8_DF, kept_down = _cast_weight(down_DF, down, dtype)
        y_scale, d_scale, _ = _split(down_scales)
        ctx.save_for_backward(x8_DN, kept_up, h_NF, y8_FN, kept_down, up_scales, down_scales)
        ctx.amax, ctx.activation, ctx.biased = (up_amax, down_amax), activation, bias_F is not None
        ctx.dtypes = dtype, up_FD.dtype, down_DF.dtype
        return _product(y8_NF, d8_DF, y_scale, d_scale, dtype=dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8_DN, kept_up, h_NF, y8_FN, kept_down, up_scales, down_scales = ctx.saved_tensors
        up, down = (up_scales, ctx.amax[0]), (down_scales, ctx.amax[1])
        half, up_dtype, down_dtype = ctx.dtypes
        x_scale, u_scale, dh_scale = _split(up_scales)
        y_scale, d_scale, dz_scale = _split(down_scales)
        dz8_ND, dz8_DN, _ = _cast_gradient(gradients[0], down, summed=False)
        d_down_DF = _product(dz8_DN, y8_FN, dz_scale, y_scale, dtype=down_dtype)
        dy_NF = _product(dz8_ND, _weight_transposed(kept_down, down), dz_scale, d_scale, dtype=half)
        dh8_NF, dh8_FN, sums_F = _cast_gradient(dy_NF, up, h_NF, ctx.activation, summed=ctx.biased)
        d_up_FD = _product(dh8_FN, x8_DN, dh_scale, x_scale, dtype=up_dtype)
        d_x_ND = _product(dh8_NF, _weight_transposed(kept_up, up), dh_scale, u_scale, dtype=half)
        d_bias_F = sums_F.to(half) if ctx.biased else None
        return d_x_ND, d_up_FD, d_bias_F, d_down_DF, *([None] * 5)
