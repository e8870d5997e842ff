"""A model in plain torch with a static cache, whose step is compiled into a CUDA graph: how
gpt-fast generates, on the weights of a model of transformers (GPT-2 or Llama).

All sequences of a batch have the same length, so one number is the position of all.

Shapes: B sequences, T positions, D width, H heads, G key and value heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class StaticPeer:
    """Generates for a fixed number of sequences."""

    def __init__(self, model: Any, *, sequences: int, length: int, top_k: int | None) -> None:
        self.net = (_GPT2 if model.config.model_type == "gpt2" else _Llama)(model)
        self.top_k, device = top_k, model.device
        length = -(-length // 8) * 8
        self.net.allocate(sequences, length)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        self._step = torch.compile(self._one, mode=mode, fullgraph=True, dynamic=False)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        if self.top_k is None:
            return logits.argmax(-1, keepdim=True)
        least = logits.topk(self.top_k).values[:, -1:]
        chances = logits.masked_fill(logits < least, -torch.inf).float().softmax(-1)
        # The same as multinomial, without its synchronisation.
        return (chances / torch.empty_like(chances).exponential_(1)).argmax(-1, keepdim=True)

    def _one(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self._draw(self.net(ids, position))

    def prefill(self, ids_BT: torch.Tensor) -> None:
        """Compute the prompts."""
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        self.ids = self._draw(self.net(ids_BT, positions))
        self.position = positions[-1:] + 1

    def first(self) -> None:
        """Wait for the first tokens, as somebody who shows them does."""
        self.ids.tolist()

    def go_on(self, tokens: int) -> list[torch.Tensor]:
        """So many more tokens."""
        new = []
        for _ in range(tokens):
            self.ids = self._step(self.ids, self.position).clone()
            self.position = self.position + 1
            new.append(self.ids)
        torch.cat(new, 1).tolist()
        return new


class _Net(nn.Module):
    """What both kinds of model share: the cache, and attention to it."""

    heads: int
    groups: int
    layers: int

    def allocate(self, sequences: int, length: int) -> None:
        """The cache."""
        weight = next(self.parameters())
        shape = self.layers, 2, sequences, self.groups, length, self.head_width
        self.register_buffer("cache", torch.zeros(shape, dtype=weight.dtype, device=weight.device))
        mask = torch.ones(length, length, dtype=torch.bool, device=weight.device).tril()
        self.register_buffer("mask", mask)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Append keys and values, and attend to all."""
        self.cache[layer, 0].index_copy_(2, at, k)
        self.cache[layer, 1].index_copy_(2, at, v)
        y = functional.scaled_dot_product_attention(
            q,
            self.cache[layer, 0],
            self.cache[layer, 1],
            attn_mask=self.mask[at][None, None],
            enable_gqa=self.heads != self.groups,
        )
        return y.transpose(1, 2).flatten(2)

    def by_head(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class _GPT2(_Net):
    def __init__(self, model: Any) -> None:
        super().__init__()
        config, self.body, self.head = model.config, model.transformer, model.lm_head
        self.heads = self.groups = config.n_head
        self.head_width, self.layers = config.n_embd // config.n_head, config.n_layer

    def forward(self, ids_BT: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        body = self.body
        x = body.wte(ids_BT) + body.wpe(at)
        for number, block in enumerate(body.h):
            attention, mlp = block.attn, block.mlp
            q, k, v = map(self.by_head, attention.c_attn(block.ln_1(x)).chunk(3, -1))
            x = x + attention.c_proj(self.attend(number, q, k, v, at))
            inner = functional.gelu(mlp.c_fc(block.ln_2(x)), approximate="tanh")
            x = x + mlp.c_proj(inner)
        return self.head(body.ln_f(x[:, -1]))


class _Llama(_Net):
    def __init__(self, model: Any) -> None:
        super().__init__()
        config, self.body, self.head = model.config, model.model, model.lm_head
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_width, self.layers = config.head_dim, config.num_hidden_layers

    def forward(self, ids_BT: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        body = self.body
        x = body.embed_tokens(ids_BT)
        cos, sin = body.rotary_emb(x, at[None])
        cos, sin = cos[:, None], sin[:, None]

        def turn(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        for number, block in enumerate(body.layers):
            attention, mlp = block.self_attn, block.mlp
            n = block.input_layernorm(x)
            q, k, v = (
                self.by_head(layer(n))
                for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            x = x + attention.o_proj(self.attend(number, turn(q), turn(k), v, at))
            n = block.post_attention_layernorm(x)
            x = x + mlp.down_proj(functional.silu(mlp.gate_proj(n)) * mlp.up_proj(n))
        return self.head(body.norm(x[:, -1]))
