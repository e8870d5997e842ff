"""Bytes of activations for each token of a block: what is kept from the forward pass until the
backward pass, and what the backward pass of one block needs besides.

With C features of the residual stream, Q of queries, G of keys (and of values), F inner ones, b
bytes of the format, and t devices that share a layer, a token keeps

    input of the block             b C / s    s = t if the stream is divided along the sequence too
    input of queries, keys, values b C        the output of the norm, gathered
    queries, keys, values          b (Q + 2 G) / t
    the same, rotated or normed    b (Q + G) / t              where they are
    result of attention            b Q / t, and 4 bytes per head
    stream after attention         b C / s    not with parallel residual branches
    input of the MLP               b C
    inner features                 b F / t for each tensor of the activation function (see INNER)
    masks of dropout               1 byte for each C / s, in two places

GPT-2 in bf16 so keeps 32 C bytes, 34 C with dropout. Scores of attention are never kept: kernels
recompute them. Recomputation keeps the input of the block only (full), or that and all results of
matrix products and attention (selective). What goes into products in fp8 is kept in one byte, and
the result of attention beside that; of inner features, what comes out of the first product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gristmill.config.model import GPTConfig

Mode = Literal["none", "selective", "full"]

INNER = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}
"""Tensors of the inner size that a feed-forward part keeps: its products and what goes into the
next one. swiglu's two products, silu of one of them, and the result."""
INNER_COMPILED = {**INNER, "relu2": 2, "swiglu": 3}
"""The same in a compiled block, which computes silu once more."""
INNER_FUSED = {"gelu": 2, "gelu_tanh": 2, "relu2": 1}
"""The same with the kernels for the feed-forward part, which keep the result and the slope."""
WIDEST_FUSED = {"gelu": 1280, "gelu_tanh": 1024, "relu2": 1600}
"""Widths up to which these kernels are used."""


@dataclass(frozen=True)
class Computing:
    """How a model is computed, as far as it matters to memory."""

    itemsize: int = 2
    """Bytes of the format of activations."""
    compiled: bool = True
    """Whether blocks are compiled, so that what is cheap is computed again."""
    kernels: bool = True
    """Whether the kernels that come with this program are used."""
    on_gpu: bool = True
    tp: int = 1
    fp8: frozenset[str] = frozenset()
    """Parts of blocks with products in fp8."""
    divides_stream: bool = False
    """Whether tp divides the residual stream along the sequence."""
    cp: int = 1

    @property
    def stream(self) -> int:
        """Parts of the residual stream."""
        return self.tp if self.divides_stream else 1


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block for each token on this device."""

    kept: float
    """Until its backward pass."""
    working: float
    """What its backward pass needs besides."""
    recomputed: float
    """What its backward pass computes again and holds at once."""


def is_fused(model: GPTConfig, computing: Computing, *, mode: Mode) -> bool:
    """Whether the kernels for the feed-forward part are used."""
    fits = model.width % 64 == 0 and model.inner // computing.tp % 256 == 0
    worth = model.width <= WIDEST_FUSED.get(model.activation, 0) and model.lora is None
    half = computing.itemsize == 2
    return (
        computing.kernels and computing.on_gpu and half and fits and worth and mode != "selective"
    )


def block_bytes(
    model: GPTConfig, computing: Computing, *, mode: Mode, scores: float = 0.0
) -> BlockBytes:
    """What a block keeps, if it recomputes in this mode. `scores`: bytes of attention masks and
    weights for each token, where no kernel of attention does without."""
    b, tp, stream = computing.itemsize, computing.tp, computing.stream
    width, features = model.width, model.heads * model.head_size / tp
    groups, inner = model.groups * model.head_size / tp, model.inner / tp
    doubled = 2 if model.activation == "swiglu" else 1
    entry, norm = b * width / stream, b * width
    products = b * (features + 2 * groups)
    attended = b * features + 4 * model.heads / tp
    middle = 0.0 if model.parallel_residual else b * width / stream
    masks = 2 * width / stream if model.dropout else 0.0
    if model.dropout and computing.compiled:
        masks = 0.0  # drawn once more from the same state
    tensors = INNER_COMPILED if computing.compiled else INNER
    fused = is_fused(model, computing, mode=mode)
    mlp = b * inner * (INNER_FUSED if fused else tensors)[model.activation]
    attention_input, mlp_input = norm, norm
    if "attention" in computing.fp8:
        attention_input, attended = width, attended + features
    if "mlp" in computing.fp8:
        mlp_input, mlp = width, (b * doubled + 1) * inner
    statistics = 16.0 if model.norm == "layernorm" else 8.0
    kept = entry + attention_input + products + _turned(model, computing) + attended + middle
    kept += (
        mlp_input
        + mlp
        + masks
        + statistics
        + _values(model, computing)
        + _adapters(model, computing)
    )
    kept += scores + _plain_norms(model, computing)
    # Gradients of the stream and of the widest inner tensor, before and after the activation.
    working = 2 * entry + norm * (stream > 1) + b * inner * doubled
    if "mlp" in computing.fp8:
        working += 2 * inner * doubled
    if mode == "full":
        return BlockBytes(entry, working, kept - entry)
    if mode == "selective":
        # All results of products, also of those that only the next addition reads.
        results = entry + products + attended + b * inner * doubled + 2 * norm + scores
        return BlockBytes(results, working, max(0.0, kept - results + norm))
    return BlockBytes(kept, working, 0.0)


def _turned(model: GPTConfig, computing: Computing) -> float:
    """Queries and keys after norm and rotation, beside those before."""
    tp, b = computing.tp, computing.itemsize
    both = (model.heads + model.groups) * model.head_size / tp
    if model.positions == "rotary" or model.qk_norm:
        return b * both
    return 0.0


def _plain_norms(model: GPTConfig, computing: Computing) -> float:
    """What RMSNorm keeps besides where it is computed by plain operations: its input in fp32 and,
    with a gain, the result before it."""
    if (model.norm != "rmsnorm" and not model.qk_norm) or computing.on_gpu or computing.compiled:
        return 0.0
    heads = (model.heads + model.groups) * model.head_size / computing.tp
    features = 2 * model.width / computing.stream if model.norm == "rmsnorm" else 0.0
    features += heads if model.qk_norm else 0.0
    wide = 4 if computing.itemsize < 4 else 0
    return features * (wide + (4 if model.norm_gain else 0))


def _values(model: GPTConfig, computing: Computing) -> float:
    """Rows of value embeddings, in the mean over all layers, and gates of attention."""
    b, tp = computing.itemsize, computing.tp
    group = model.groups * model.head_size / tp
    # The row, and the values with it added.
    tables = len(model.value_layers) / model.layers * b * 2 * group
    gate = b * model.heads * model.head_size / tp if model.attention_gate else 0.0
    return tables + gate


def _adapters(model: GPTConfig, computing: Computing) -> float:
    """Inner features of adapters and, with dropout, their inputs, in the mean over all layers."""
    lora = model.lora
    if lora is None:
        return 0.0
    b = computing.itemsize
    first = {name: shape for name, shape in model.linears().items() if name.startswith("blocks.0.")}
    chosen = [shape for name, shape in first.items() if lora.chosen(name)]
    dropped = sum(shape.inputs * (b + 1) for shape in chosen) if lora.dropout else 0
    return sum(b * lora.rank for _ in chosen) + dropped
