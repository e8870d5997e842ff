"""The parts of a transformer block, each chosen by the model's settings.

Positions are one row for all samples (T) or a row for each (B, T). A mask says which positions see
which, where it is not simply the earlier ones.

Shapes: B samples, T positions, D width, H heads, G key and value heads, K head width, F inner
width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gristmill.config.schema import ModelConfig
from gristmill.models.spec import KVCache


def build_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Normalisation over the last dimension."""
    width = width or config.width
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(width, eps=config.norm_eps)


def document_mask(documents_BT: torch.Tensor) -> torch.Tensor:
    """Which position sees which, (B, 1, T, T): the earlier ones of the same document and itself."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]


class Rotary(nn.Module):
    """Turns pairs of query and key features by an angle that grows with the position.

    Feature i and feature i + K/2 form a pair, turned by position x base^(-2i/K).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pairs = config.head_width // 2
        self.base = config.rotary_base or 10_000.0

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions, computed in fp32: (T, K/2) or (B, 1, T, K/2)."""
        steps = torch.arange(self.pairs, device=positions.device, dtype=torch.float32)
        frequencies = self.base ** (-steps / self.pairs)
        angles = positions.float()[..., None] * frequencies
        if positions.dim() == 2:
            angles = angles[:, None]
        return angles.cos(), angles.sin()

    def forward(self, x_BHTK: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(positions)
        first, second = x_BHTK.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.type_as(x_BHTK)


class Attention(nn.Module):
    """Causal self-attention with as many key and value heads as the settings say."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.groups, self.head_width = config.heads, config.groups, config.head_width
        self.dropout = config.dropout
        inner = self.heads * self.head_width
        both = 2 * self.groups * self.head_width
        self.qkv = nn.Linear(config.width, inner + both, bias=config.bias)
        self.out = nn.Linear(inner, config.width, bias=config.bias)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.query_norm = nn.RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: KVCache | None,
    ) -> torch.Tensor:
        query, key, value = self._project(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        causal = mask is None
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
            causal = cache.length == 0
            if not causal and positions.shape[0] > 1:
                mask = positions[:, None] >= torch.arange(key.shape[2], device=key.device)
        y_BHTK = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=self.groups != self.heads,
        )
        return self.out(y_BHTK.transpose(1, 2).flatten(2))

    def _project(self, x_BTD: torch.Tensor) -> list[torch.Tensor]:
        widths = [heads * self.head_width for heads in (self.heads, self.groups, self.groups)]
        parts = self.qkv(x_BTD).split(widths, dim=-1)
        return [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts]


class MLP(nn.Module):
    """The feed-forward part of a block; swiglu has a gate beside the inner layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gates = 2 if config.activation == "swiglu" else 1
        self.up = nn.Linear(config.width, gates * config.inner, bias=config.bias)
        self.down = nn.Linear(config.inner, config.width, bias=config.bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        inner_BTF = self.up(x_BTD)
        match self.activation:
            case "gelu":
                inner_BTF = functional.gelu(inner_BTF)
            case "gelu_tanh":
                inner_BTF = functional.gelu(inner_BTF, approximate="tanh")
            case "relu2":
                inner_BTF = functional.relu(inner_BTF).square()
            case "swiglu":
                gate_BTF, inner_BTF = inner_BTF.chunk(2, dim=-1)
                inner_BTF = functional.silu(gate_BTF) * inner_BTF
        return self.down(inner_BTF)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x_BTD), positions, mask, cache)
        x_BTD = x_BTD + self.dropout(attended)
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
