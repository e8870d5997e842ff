"""The layers of a transformer block, chosen by the model's settings.

Weights are kept in fp32 and cast to the dtype of their input. The embedding's output sets the dtype
of the whole forward pass; weight gradients are fp32.

Positions have shape (T), shared by all samples, or (B, T). A mask is given only where attention is
not plain causal attention.

A process may hold only some heads and inner features (see `models/spec.py`): linears into them are
column-parallel, linears out of them are row-parallel and all-reduced.

Shapes: B samples, T positions, D width, H heads, G key and value heads, K head width, F inner
width.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gristmill.config.model import GATE_FEATURES, GPTConfig
from gristmill.models.cache import KVCache
from gristmill.models.fp8 import FUSED, fp8_linear, fp8_mlp, record_amax
from gristmill.models.products import (
    cast_linear,
    fused_mlp,
    project_qkv,
    worth_fusing_mlp,
    worth_fusing_qkv,
)
from gristmill.models.spec import Kernels, ShardComm

_ARM = platform.machine() in ("aarch64", "arm64")


class BlockContext(NamedTuple):
    """The inputs that all blocks of one forward pass share."""

    positions: torch.Tensor
    mask: torch.Tensor | BlockMask | None = None
    rotary: RotaryAngles | None = None
    """For models with rotary positions."""
    cache: KVCache | None = None
    kernels: Kernels = Kernels()
    comm: ShardComm = ShardComm()
    documents_BT: torch.Tensor | None = None
    """The document of each position, for `comm.attend`, which builds its own mask."""


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input, or in fp8 while it trains."""

    fp8_scales: torch.Tensor | None
    fp8_amax: torch.Tensor | None
    fp8_calibrates = False

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_buffer("fp8_scales", None, persistent=False)
        self.register_buffer("fp8_amax", None, persistent=False)

    @property
    def in_fp8(self) -> bool:
        return self.fp8_scales is not None and self.training and not self.fp8_calibrates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, None if self.bias is None else self.bias.to(x.dtype))

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight
        if self.in_fp8:
            return fp8_linear(self, x, weight, bias)
        if x.is_cuda and weight.requires_grad and weight.dtype != x.dtype:
            y = cast_linear(x, weight, bias)
        else:
            y = functional.linear(x, weight.to(x.dtype), bias)
        if self.fp8_calibrates:
            record_amax(self, x, weight, y)
        return y


class RowParallelLinear(Linear):
    """A linear layer whose input features may be sharded over processes."""

    def forward(self, x: torch.Tensor, comm: ShardComm | None = None) -> torch.Tensor:
        if comm is None or comm.single:
            return super().forward(x)
        return self.reduce(self._linear(x, None), comm)

    def reduce(self, products: torch.Tensor, comm: ShardComm) -> torch.Tensor:
        """The layer's output, from this process's partial products."""
        y = comm.reduce_from(products)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Embedding(nn.Embedding):
    """An embedding that draws no values when it is made: `initialise` does. On the meta device
    torch would import its compiler for that, which takes seconds."""

    def reset_parameters(self) -> None:
        pass


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input; sums are accumulated in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def build_norm(config: GPTConfig) -> nn.Module:
    """The norm the settings ask for, over the residual stream."""
    width, gain = config.width, config.norm_gain
    if config.norm == "layernorm":
        return LayerNorm(
            width, eps=config.norm_eps, elementwise_affine=gain, bias=config.bias and gain
        )
    return RMSNorm(width, eps=config.norm_eps, elementwise_affine=gain)


class Rotary(nn.Module):
    """Rotary position embedding.

    Of the K features that are rotated, i and i + K/2 form a pair, rotated by position x
    base^(-2i/K). Cosines and sines are kept in tables: computed per element inside a kernel, they
    would cost more than attention.
    """

    cos_TK: torch.Tensor
    sin_TK: torch.Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.base = config.wavelength
        for name in ("cos_TK", "sin_TK"):
            table = torch.empty(config.context, config.rotated // 2)
            self.register_buffer(name, table, persistent=False)

    def fill(self) -> None:
        """Compute the tables, in fp32."""
        context, pairs = self.cos_TK.shape
        device = self.cos_TK.device
        steps = torch.arange(pairs, device=device, dtype=torch.float32)
        positions = torch.arange(context, device=device, dtype=torch.float32)
        angles_TK = positions[:, None] * self.base ** (-steps / pairs)
        self.cos_TK.copy_(angles_TK.cos())
        self.sin_TK.copy_(angles_TK.sin())

    def forward(self, positions: torch.Tensor) -> RotaryAngles:
        cos, sin = self.cos_TK[positions], self.sin_TK[positions]
        if positions.dim() == 1:
            return RotaryAngles(cos, sin)
        return RotaryAngles(cos[:, None], sin[:, None])


class RotaryAngles(NamedTuple):
    """Cosines and sines of the positions of a pass: (T, K/2) or (B, 1, T, K/2)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x_BHTK: torch.Tensor) -> torch.Tensor:
        """Rotate the first features; those behind them stay as they are."""
        x, count = x_BHTK.float(), 2 * self.cos.shape[-1]
        first, second = x[..., :count].chunk(2, dim=-1)
        rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        if count < x.shape[-1]:
            rotated.append(x[..., count:])
        return torch.cat(rotated, dim=-1).type_as(x_BHTK)


class Attention(nn.Module):
    """Causal self-attention, multi-head or grouped-query."""

    def __init__(self, config: GPTConfig, layer: int, ranks: int = 1) -> None:
        super().__init__()
        self.layer, self.scale = layer, config.attention_scale
        self.heads, self.groups = config.heads // ranks, config.groups // ranks
        self.head_width = config.head_size
        self.dropout = config.attention_drop
        self.window = config.short_window if layer % 2 else None
        query, both = self.heads * self.head_width, 2 * self.groups * self.head_width
        self.qkv = Linear(config.width, query + both, bias=config.has_qkv_bias)
        self.out = RowParallelLinear(query, config.width, bias=config.bias)
        self.query_norm = self.key_norm = self.value_gate = self.output_gate = None
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                RMSNorm(self.head_width, config.norm_eps, elementwise_affine=config.norm_gain)
                for _ in range(2)
            )
        gates = min(GATE_FEATURES, config.width)
        if layer in config.value_layers:
            self.value_gate = Linear(gates, self.groups, bias=False)
        if config.attention_gate:
            self.output_gate = Linear(gates, self.heads, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, context: BlockContext, looked_up_BTV: torch.Tensor | None
    ) -> torch.Tensor:
        x_BTD = context.comm.copy_to(x_BTD)
        query, key, value = self._project(x_BTD, context)
        if self.value_gate is not None and looked_up_BTV is not None:
            value = value + self._gated(looked_up_BTV, x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary is not None:
            query, key = context.rotary.apply(query), context.rotary.apply(key)
        if context.comm.attend is not None:
            y_BHTK = context.comm.attend(
                query, key, value, scale=self.scale, documents_BT=context.documents_BT
            )
        else:
            with context.comm.distinct_rng():
                y_BHTK = self._attend(query, key, value, context)
        if self.output_gate is not None:
            y_BHTK = y_BHTK * _gate(self.output_gate, x_BTD)
        return self.out(y_BHTK.transpose(1, 2).flatten(2), context.comm)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: BlockContext
    ) -> torch.Tensor:
        positions, mask, cache = context.positions, context.mask, context.cache
        grouped = self.groups != self.heads
        if isinstance(mask, BlockMask):
            assert self.window is None, "models with windows have dense masks"
            attended: torch.Tensor = flex_attention(
                query, key, value, block_mask=mask, scale=self.scale, enable_gqa=grouped
            )
            return attended
        causal = mask is None
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
            causal = cache.length == 0
            if not causal and positions.shape[0] > 1:
                mask = positions[:, None] >= torch.arange(key.shape[2], device=key.device)
        if self.window is not None:
            near = _near(query.shape[2], key.shape[2], self.window, device=key.device)
            mask, causal = near if mask is None else near & mask, False
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def _project(self, x_BTD: torch.Tensor, context: BlockContext) -> list[torch.Tensor]:
        layer, equal = self.qkv, self.heads == self.groups
        # The backward pass of a norm or rotation writes its gradient where it belongs.
        plain = self.query_norm is None and context.rotary is None
        worth = worth_fusing_qkv(x_BTD, outputs=layer.out_features)
        plain = plain and layer.fp8_scales is None
        if context.kernels.products and equal and plain and worth and _fusible(layer):
            bias = None if layer.bias is None else layer.bias.to(x_BTD.dtype)
            parts = project_qkv(x_BTD.flatten(0, 1), layer.weight, bias)
            return [self._by_head(part.unflatten(0, x_BTD.shape[:2])) for part in parts]
        widths = [heads * self.head_width for heads in (self.heads, self.groups, self.groups)]
        return [self._by_head(x) for x in layer(x_BTD).split(widths, dim=-1)]

    def _by_head(self, x_BTF: torch.Tensor) -> torch.Tensor:
        return x_BTF.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def _gated(self, looked_up_BTV: torch.Tensor, x_BTD: torch.Tensor) -> torch.Tensor:
        """Value embeddings, gated per head."""
        assert self.value_gate is not None
        return self._by_head(looked_up_BTV) * _gate(self.value_gate, x_BTD)


def _gate(linear: Linear, x_BTD: torch.Tensor) -> torch.Tensor:
    """A factor from 0 to 2 for each head, computed from the first features of the input: (B, heads,
    T, 1)."""
    gate_BTH = 2 * torch.sigmoid(linear(x_BTD[..., : linear.in_features]))
    return gate_BTH.transpose(1, 2)[..., None]


def _near(queries: int, keys: int, window: int, *, device: torch.device) -> torch.Tensor:
    """Which of the keys each of the last positions sees: those of the window that it ends."""
    keys_S = torch.arange(keys, device=device)
    last_T1 = keys_S[keys - queries :, None]
    return (keys_S <= last_T1) & (keys_S > last_T1 - window)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU with the error function.

    For a contiguous fp32 tensor on a CPU torch calls oneDNN, whose backward takes four times as
    long on ARM as torch's own vectorised kernel. A transposed view avoids that without a copy:
    output and gradient keep their memory layout.
    """
    if _ARM and x.device.type == "cpu":
        return functional.gelu(x.mT).mT
    return functional.gelu(x)


def _fusible(*layers: Linear) -> bool:
    """Whether a function may use the weights of these layers. It would compute the gradients of
    frozen ones, and pass adapters and statistics of layers by."""
    watched = any(getattr(layer, "statistics_on", False) for layer in layers)
    return not watched and all(layer.weight.requires_grad for layer in layers)


class MLP(nn.Module):
    """The MLP of a block; swiglu adds a gate."""

    def __init__(self, config: GPTConfig, ranks: int = 1) -> None:
        super().__init__()
        self.activation, self.inner = config.activation, config.inner // ranks
        self.may_fuse = True
        gates = 2 if config.activation == "swiglu" else 1
        self.up = Linear(config.width, gates * self.inner, bias=config.bias)
        self.down = RowParallelLinear(self.inner, config.width, bias=config.bias)

    def forward(self, x_BTD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        x_BTD, up, down = context.comm.copy_to(x_BTD), self.up, self.down
        may_fuse = self.may_fuse and _fusible(up, down)
        bias = None if up.bias is None else up.bias.to(x_BTD.dtype)
        if up.in_fp8 and may_fuse and self.activation in FUSED:
            layers = (up, up.weight, bias), (down, down.weight)
            return down.reduce(fp8_mlp(x_BTD, *layers, self.activation), context.comm)
        plain = up.fp8_scales is None
        worth = worth_fusing_mlp(x_BTD, inner=self.inner, activation=self.activation)
        if context.kernels.products and may_fuse and worth and plain:
            weights = up.weight, bias, down.weight
            y_BTD = fused_mlp(x_BTD.flatten(0, 1), *weights, self.activation).view_as(x_BTD)
            return down.reduce(y_BTD, context.comm)
        return self.down(activated(self.up(x_BTD), self.activation), context.comm)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """What the feed-forward part makes of its inner features; swiglu halves their number."""
    match activation:
        case "gelu":
            return gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each added to the residual stream, one after
    the other or both at once."""

    def __init__(self, config: GPTConfig, layer: int, ranks: int = 1) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer, ranks)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config, ranks)
        self.parallel_residual = config.parallel_residual
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: torch.Tensor,
        context: BlockContext,
        looked_up_BTV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x_BTD), context, looked_up_BTV)
        before_BTD, x_BTD = x_BTD, x_BTD + self.dropout(attended)
        read_BTD = before_BTD if self.parallel_residual else x_BTD
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(read_BTD), context))


# ------------------------------------------------------------------ packed documents
#
# Documents of a sample are numbered in the order in which they are packed, and do not attend to
# one another. A dense mask (`document_mask`) works on any device. On a GPU its B x T x T entries
# slow attention down, so there the mask is a block mask: for every query block i, the key blocks j
# it attends to at all, and which of these it attends to fully. Document numbers never decrease, so
# both follow from the first and last document of each block:
#
#     seen    j <= i  and  last[j] >= first[i]      full    j < i  and  first[j] == last[i]

DOCUMENT_BLOCK = 128
"""Positions per block."""


def document_blocks(documents_BT: torch.Tensor) -> BlockMask:
    """A causal mask within documents as a block mask; T must be a multiple of the block size."""
    first_BN, last_BN = (
        documents_BT[:, ::DOCUMENT_BLOCK],
        documents_BT[:, DOCUMENT_BLOCK - 1 :: DOCUMENT_BLOCK],
    )
    number_N = torch.arange(first_BN.shape[1], device=documents_BT.device)
    seen_BNN = last_BN[:, None, :] >= first_BN[:, :, None]
    seen_BNN = seen_BNN & (number_N[None, :] <= number_N[:, None])
    full_BNN = first_BN[:, None, :] == last_BN[:, :, None]
    full_BNN = full_BNN & (number_N[None, :] < number_N[:, None])

    def visible(
        b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (documents_BT[b, query] == documents_BT[b, key])

    return BlockMask.from_kv_blocks(
        *_listed(seen_BNN & ~full_BNN),
        *_listed(full_BNN),
        BLOCK_SIZE=DOCUMENT_BLOCK,
        mask_mod=visible,
        seq_lengths=(documents_BT.shape[1], documents_BT.shape[1]),
    )


def _listed(chosen_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every query block, the number of chosen key blocks, and the key blocks, chosen first."""
    order_BNN = torch.argsort(chosen_BNN.int(), dim=-1, descending=True, stable=True)
    return chosen_BNN.sum(-1, dtype=torch.int32)[:, None], order_BNN.int()[:, None]
