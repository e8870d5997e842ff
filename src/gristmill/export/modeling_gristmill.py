"""A GPT that was trained with Gristmill, for transformers.

This file stands by itself: it needs torch and transformers, not Gristmill. It was put here by
`gristmill export --code`. Transformers runs it only if you say so:

    AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)

    tokens -> embedding (+ positions) (-> norm) -> blocks -> norm -> head (-> cap) -> logits

    block          x + attention(norm(x)), then x + mlp(norm(x)); both from the same x if parallel
    attention      one product for queries, keys and values; key and value heads may be shared
    value tables   some layers add a vector to the values, looked up by token and gated by the input
    window         every other layer, from the second on, sees so many last positions only
    cap            z becomes cap tanh(z / cap)

There is no dropout. Shapes: B samples, T positions, S keys, D width, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

GATE_FEATURES = 32
"""How many features of the input decide a gate."""


class GristmillConfig(PretrainedConfig):
    """The settings of the `[model]` table of a run file, under the same names."""

    model_type = "gristmill"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "hidden_size": "width",
        "head_dim": "head_width",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "context",
        "vocab_size": "vocab",
        "initializer_range": "init_std",
    }

    def __init__(
        self,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
        context: int = 1024,
        vocab: int = 50257,
        kv_heads: int | None = None,
        head_width: int | None = None,
        mlp_width: int | None = None,
        positions: str = "learned",
        rotary_base: float = 10_000.0,
        rotary_fraction: float = 1.0,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        norm_gain: bool = True,
        qk_norm: bool = False,
        bias: bool = True,
        qkv_bias: bool | None = None,
        activation: str = "gelu_tanh",
        parallel_residual: bool = False,
        window: int | None = None,
        embedding_norm: bool = False,
        value_embeddings: int = 0,
        attention_gate: bool = False,
        attention_scale: float | None = None,
        logit_cap: float | None = None,
        init_std: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.layers, self.heads, self.width = layers, heads, width
        self.context, self.vocab = context, vocab
        self.kv_heads = kv_heads or heads
        self.head_width = head_width or width // heads
        self.mlp_width = mlp_width or 4 * width
        self.positions = positions
        self.rotary_base, self.rotary_fraction = rotary_base, rotary_fraction
        self.norm, self.norm_eps, self.norm_gain = norm, norm_eps, norm_gain
        self.qk_norm, self.bias = qk_norm, bias
        self.qkv_bias = bias if qkv_bias is None else qkv_bias
        self.activation, self.parallel_residual = activation, parallel_residual
        self.window = window
        self.embedding_norm, self.value_embeddings = embedding_norm, value_embeddings
        self.attention_gate = attention_gate
        self.attention_scale = attention_scale or self.head_width**-0.5
        self.logit_cap, self.init_std = logit_cap, init_std
        super().__init__(**kwargs)

    @property
    def value_layers(self) -> tuple[int, ...]:
        """The layers with value tables: every other one, from the last down."""
        return tuple(range(self.layers - 1, -1, -2))[: self.value_embeddings]


def build_norm(config: GristmillConfig) -> nn.Module:
    """The norm of the residual stream."""
    gain = config.norm_gain
    if config.norm == "layernorm":
        return nn.LayerNorm(config.width, config.norm_eps, gain, bias=config.bias and gain)
    return nn.RMSNorm(config.width, config.norm_eps, gain)


def rotate(x_BHTK: torch.Tensor, positions_BT: torch.Tensor, config: Any) -> torch.Tensor:
    """Rotary positions: of the first features, i and i + half form a pair."""
    count = int(config.head_width * config.rotary_fraction)
    steps = torch.arange(count // 2, device=x_BHTK.device, dtype=torch.float32)
    frequencies = config.rotary_base ** (-steps / (count // 2))
    angles = positions_BT[:, None, :, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x_BHTK[..., :count].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.type_as(x_BHTK), x_BHTK[..., count:]), dim=-1)


class GristmillAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GristmillConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        query, key = config.heads * config.head_width, config.kv_heads * config.head_width
        self.widths = (query, key, key)
        self.qkv = nn.Linear(config.width, sum(self.widths), bias=config.qkv_bias)
        self.out = nn.Linear(query, config.width, bias=config.bias)
        if config.qk_norm:
            gain = config.norm_gain
            self.query_norm = nn.RMSNorm(config.head_width, config.norm_eps, gain)
            self.key_norm = nn.RMSNorm(config.head_width, config.norm_eps, gain)
        gates = min(GATE_FEATURES, config.width)
        if config.attention_gate:
            self.output_gate = nn.Linear(gates, config.heads, bias=False)
        if layer in config.value_layers:
            self.value_gate = nn.Linear(gates, config.kv_heads, bias=False)

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        mask_BHTS: torch.Tensor,
        cache: Any,
        looked_up_BTV: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self.config
        query, key, value = (
            part.unflatten(-1, (-1, config.head_width)).transpose(1, 2)
            for part in self.qkv(x_BTD).split(self.widths, dim=-1)
        )
        if looked_up_BTV is not None:
            looked_up = looked_up_BTV.unflatten(-1, (-1, config.head_width)).transpose(1, 2)
            value = value + looked_up * gate(self.value_gate, x_BTD)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if config.positions == "rotary":
            query, key = (rotate(x, positions_BT, config) for x in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask_BHTS,
            scale=config.attention_scale,
            enable_gqa=config.kv_heads != config.heads,
        )
        if config.attention_gate:
            attended = attended * gate(self.output_gate, x_BTD)
        return self.out(attended.transpose(1, 2).flatten(2))


def gate(linear: nn.Linear, x_BTD: torch.Tensor) -> torch.Tensor:
    """A factor from 0 to 2 for each head, from the first features of the input."""
    gate_BTH = 2 * torch.sigmoid(linear(x_BTD[..., : linear.in_features]))
    return gate_BTH.transpose(1, 2)[..., None]


class GristmillMLP(nn.Module):
    """The feed-forward part; swiglu's gate is the first half of `up`."""

    def __init__(self, config: GristmillConfig) -> None:
        super().__init__()
        self.activation = config.activation
        halves = 2 if config.activation == "swiglu" else 1
        self.up = nn.Linear(config.width, halves * config.mlp_width, bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        inner = self.up(x_BTD)
        if self.activation == "swiglu":
            gates, inner = inner.chunk(2, dim=-1)
            inner = functional.silu(gates) * inner
        elif self.activation in ("relu", "relu2"):
            inner = functional.relu(inner)
            inner = inner.square() if self.activation == "relu2" else inner
        else:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            inner = functional.gelu(inner, approximate=approximate)
        return self.down(inner)


class GristmillBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GristmillConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = GristmillAttention(config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp = GristmillMLP(config)
        self.parallel = config.parallel_residual

    def forward(self, x_BTD: torch.Tensor, *context: Any) -> torch.Tensor:
        after_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), *context)
        return after_BTD + self.mlp(self.mlp_norm(x_BTD if self.parallel else after_BTD))


class GristmillForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model."""

    config_class = GristmillConfig
    base_model_prefix = "model"
    _no_split_modules = ["GristmillBlock"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config: GristmillConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab, config.width)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context, config.width)
        if config.embedding_norm:
            self.embedding_norm = build_norm(config)
        values = config.kv_heads * config.head_width
        self.values = nn.ModuleDict(
            {str(layer): nn.Embedding(config.vocab, values) for layer in config.value_layers}
        )
        self.blocks = nn.ModuleList(GristmillBlock(config, layer) for layer in range(config.layers))
        self.norm = build_norm(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, value: Any) -> None:
        self.head = value

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with `labels` the loss. Embeddings cannot be given instead of tokens: value
        tables are looked up by token."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = input_ids.shape[1]
        if position_ids is None:
            if attention_mask is None:
                ahead = torch.arange(past, past + length, device=input_ids.device)[None]
            else:
                ahead = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]
            position_ids = ahead
        masks = [
            visible_keys(length, past, attention_mask, window, device=input_ids.device)
            for window in (None, self.config.window)
        ]
        x_BTD = self.embedding(input_ids)
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.positions(position_ids)
        if self.config.embedding_norm:
            x_BTD = self.embedding_norm(x_BTD)
        for layer, block in enumerate(self.blocks):
            tables = [self.values[name] for name in self.values if name == str(layer)]
            looked_up = tables[0](input_ids) if tables else None
            x_BTD = block(x_BTD, position_ids, masks[layer % 2], past_key_values, looked_up)
        logits = self.head(self.norm(x_BTD[:, -logits_to_keep:]))
        if self.config.logit_cap is not None:
            logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)
        loss: Any = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def visible_keys(
    length: int,
    past: int,
    attention_mask: torch.Tensor | None,
    window: int | None,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Which keys each position sees: no later ones, none before its window, and no padding but
    itself."""
    keys_S = torch.arange(past + length, device=device)
    positions_T = keys_S[past:, None]
    mask = (keys_S <= positions_T)[None, None]
    if window is not None:
        mask = mask & (keys_S > positions_T - window)
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, :].bool() | (keys_S == positions_T)
    return mask
