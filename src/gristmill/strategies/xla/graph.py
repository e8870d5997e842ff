"""Our own torch code as graphs of ATen operations, which `lower.py` translates to JAX.

A function is called once with tensors on the meta device, and torch records its operations: a model
with its loss, or a decision with a step of an optimizer. Torch itself removes mutations and views,
so every node of a graph is a pure function of its inputs, of known shape and dtype. The traced code
needs no changes for this.

Some functions are replaced while they are traced:

    scaled_dot_product_attention       one operation, not its decomposition for some device
    rms_norm                           one operation, so that it has a custom derivative
    _fused_adam(w)_                    one operation for each parameter, which torch traces once
    _fused_sgd_                        the same arithmetic in plain operations, which XLA fuses
    the forward of a block             between two edges, so that it can be recomputed as a whole
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import torch
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gristmill.models.spec import CausalLM

Tensors = Sequence[torch.Tensor]


class Traced(NamedTuple):
    """A function as a graph, which takes and returns the leaves of trees."""

    graph: Graph
    inputs: Any
    outputs: Any


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """Trace a function of meta tensors, in trees of any structure, to a graph."""
    leaves, inputs = jax.tree.flatten(args)
    assert len(set(map(id, leaves))) == len(leaves), "a graph knows its inputs by their identity"
    outputs: list[Any] = []

    def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
        found, spec = jax.tree.flatten(function(*jax.tree.unflatten(inputs, leaves)))
        outputs.append(spec)
        return found

    with replaced():
        module = make_fx(dispatch_functionalize(flat))(*leaves)
    return Traced(module.graph, inputs, outputs[0])


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Compute with meta tensors like `trace`, but record nothing, which is much faster."""
    with torch.no_grad(), _Replaced():
        yield


def meta(shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values, to trace with."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# ------------------------------------------------------------------ operations of our own


@torch.library.custom_op("gristmill::attention", mutates_args=())
def attention(
    query_BHTK: torch.Tensor,
    key_BGTK: torch.Tensor,
    value_BGTK: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention, multi-head or grouped-query; only ever traced."""
    raise NotImplementedError


@attention.register_fake
def _(query_BHTK: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(query_BHTK)


@torch.library.custom_op("gristmill::block_edge", mutates_args=())
def block_edge(x: torch.Tensor, block: int, end: bool) -> torch.Tensor:
    """The residual stream where a block begins or ends; only ever traced."""
    raise NotImplementedError


@block_edge.register_fake
def _(x: torch.Tensor, block: int, end: bool) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("gristmill::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension; only ever traced."""
    raise NotImplementedError


@rms_norm.register_fake
def _(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("gristmill::adamw", mutates_args=())
def adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    divisor: torch.Tensor | None,
    skip: torch.Tensor | None,
    settings: Sequence[float],
    decoupled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A parameter and its two averages after a step; only ever traced. `settings`: both betas,
    epsilon and weight decay."""
    raise NotImplementedError


@adamw.register_fake
def _(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(parameter), torch.empty_like(average), torch.empty_like(square)


@contextlib.contextmanager
def marked_blocks(model: CausalLM) -> Iterator[None]:
    """While a model is traced, mark where its blocks begin and end."""
    blocks = [model.get_submodule(name) for name in model.block_names()]
    plain = [block.forward for block in blocks]

    def marked(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return block_edge(forward(block_edge(x, number, False), *args, **kwargs), number, True)

        return run

    for number, block in enumerate(blocks):
        block.forward = marked(plain[number], number)
    try:
        yield
    finally:
        for block, forward in zip(blocks, plain, strict=True):
            block.forward = forward


# ------------------------------------------------------------------ replacements


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    assert len(normalized_shape) == 1, "norms are over the last dimension"
    return rms_norm(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


def _adamw_(
    parameters: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    max_squares: Tensors,
    steps: Tensors,
    *,
    lr: torch.Tensor | float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    decoupled: bool = True,
) -> None:
    """What torch's fused kernels of AdamW and, if not `decoupled`, of Adam do."""
    assert not amsgrad and not maximize
    rate = torch.as_tensor(lr, device="meta")
    for parameter, gradient, average, square, step in zip(
        parameters, gradients, averages, squares, steps, strict=True
    ):
        moved = adamw(
            *(parameter, gradient, average, square, step, rate, grad_scale, found_inf),
            *([beta1, beta2, eps, weight_decay], decoupled),
        )
        for old, new in zip((parameter, average, square), moved, strict=True):
            old.copy_(new)


def _sgd_(
    parameters: Tensors,
    gradients: Tensors,
    buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: torch.Tensor | float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """What torch's fused kernel of SGD does."""
    assert not dampening and not maximize and not is_first_step
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        g = gradient if grad_scale is None else gradient / grad_scale
        g = g + weight_decay * parameter if weight_decay else g
        if momentum:
            buffer = momentum * buffers[number] + g
            step = g + momentum * buffer if nesterov else buffer
            _store((parameter, parameter - lr * step), (buffers[number], buffer), skip=found_inf)
        else:
            _store((parameter, parameter - lr * g), skip=found_inf)


def _store(*pairs: tuple[torch.Tensor, torch.Tensor], skip: torch.Tensor | None) -> None:
    for old, new in pairs:
        old.copy_(new if skip is None else torch.where(skip > 0, old, new))


class _Replaced(TorchFunctionMode):
    """Calls the replacements below instead of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    torch._fused_adamw_: _adamw_,
    torch._fused_adam_: partial(_adamw_, decoupled=False),
    torch._fused_sgd_: _sgd_,
}
