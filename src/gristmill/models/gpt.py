"""The native GPT: GPT-2 as published by default, its modern variants by settings.

    tokens -> embedding (+ positions) -> blocks -> norm -> head (-> cap) -> logits or loss

Weights are drawn per parameter from a generator seeded by the run's seed and the parameter's name,
so that no weight depends on the order in which others are made. Projections onto the residual
stream get a standard deviation smaller by sqrt(2 layers), as in GPT-2.

Shapes: B samples, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gristmill.config.roles import Role
from gristmill.config.schema import ModelConfig
from gristmill.models.layers import Block, Linear, Rotary, Surroundings, build_norm, document_mask
from gristmill.models.loss import capped, linear_cross_entropy
from gristmill.models.spec import Kernels, KVCache, Loss


class GPT(nn.Module):
    """A decoder-only transformer whose embedding has `rows` rows, of which `vocab` can be
    predicted. `compute` is the number format of its stream; `kernels` are those it may use."""

    def __init__(
        self, config: ModelConfig, *, vocab: int, rows: int, recompute: bool = False
    ) -> None:
        super().__init__()
        assert vocab <= rows
        self.config, self.vocab, self.recompute = config, vocab, recompute
        self.compute, self.kernels = torch.float32, Kernels()
        self.embedding = nn.Embedding(rows, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.embedding_norm = build_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        values = config.groups * config.head_width
        self.values = nn.ModuleDict(
            {str(layer): nn.Embedding(rows, values) for layer in config.value_layers}
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = build_norm(config)
        self.head = Linear(config.width, rows, bias=False)
        if config.tie_head:
            self.head.weight = self.embedding.weight

    def roles(self) -> dict[str, Role]:
        """What each parameter is for."""
        return {name: _role(name, parameter) for name, parameter in self.named_parameters()}

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Rows of each matrix in parameters that are several matrices, one below the other."""
        config = self.config
        query, key = config.width, config.groups * config.head_width
        stacked: dict[str, tuple[int, ...]] = {"attention.qkv.weight": (query, key, key)}
        if config.activation == "swiglu":
            stacked["mlp.up.weight"] = (config.inner, config.inner)
        return {
            f"blocks.{layer}.{name}": rows
            for layer in range(config.layers)
            for name, rows in stacked.items()
        }

    def initialise(self, seed: int) -> None:
        """Draw all weights: normal matrices and embeddings, zero biases, unit gains."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                spread = self._spread(name, parameter)
                if spread is None:
                    parameter.fill_(1.0)
                elif spread == 0:
                    parameter.zero_()
                else:
                    generator = torch.Generator(parameter.device)
                    generator.manual_seed(_named_seed(seed, name))
                    parameter.normal_(0.0, spread, generator=generator)

    def _spread(self, name: str, parameter: torch.Tensor) -> float | None:
        """Standard deviation of a parameter at the start; None for gains, which start at one."""
        config = self.config
        if name.startswith("values.") or name.endswith(("bias", "value_gate.weight", "shortcut")):
            return 0.0
        if parameter.dim() < 2:
            return None
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            return 0.0 if config.zero_init else config.init_std / math.sqrt(2 * config.layers)
        own = {"embedding.weight": config.embedding_std, "head.weight": config.head_std}.get(name)
        return own if own is not None else config.init_std

    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        targets_BT: torch.Tensor | None = None,
        weights_BT: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor | Loss:
        assert cache is None or (positions_BT is None and documents_BT is None), "one document"
        hidden_BTD = self._hidden(tokens_BT, positions_BT, documents_BT, cache)
        if targets_BT is not None:
            return linear_cross_entropy(
                hidden_BTD.flatten(0, 1),
                self.head.weight,
                targets_BT.flatten(),
                None if weights_BT is None else weights_BT.flatten(),
                vocab=self.vocab,
                scale=scale,
                cap=self.config.logit_cap,
                kernel=self.kernels.loss,
                fp8=self.kernels.head_fp8,
            )
        if last_only:
            hidden_BTD = hidden_BTD[:, -1:]
        return capped(self.head(hidden_BTD)[..., : self.vocab], self.config.logit_cap)

    def _hidden(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        documents_BT: torch.Tensor | None,
        cache: KVCache | None,
    ) -> torch.Tensor:
        start = cache.length if cache is not None else 0
        length = tokens_BT.shape[1]
        positions = positions_BT
        if positions is None:
            positions = torch.arange(start, start + length, device=tokens_BT.device)
        mask = None if documents_BT is None else document_mask(documents_BT)
        x_BTD = self.embedding(tokens_BT).to(self.compute)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions).to(self.compute)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        x_BTD = self.dropout(x_BTD)
        start_BTD = x_BTD if self.config.shortcut else None
        turn = None if self.rotary is None else self.rotary(positions)
        around = Surroundings(positions, mask, turn, start_BTD, cache, self.kernels)
        for layer, block in enumerate(self.blocks):
            looked_up = self._looked_up(layer, tokens_BT)
            if self.recompute and self.training:
                x_BTD = checkpoint(block, x_BTD, around, looked_up, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, around, looked_up)
        if cache is not None:
            cache.length += length
        return self.norm(x_BTD)

    def _looked_up(self, layer: int, tokens_BT: torch.Tensor) -> torch.Tensor | None:
        """What a layer with value embeddings adds to its values."""
        if layer not in self.config.value_layers:
            return None
        table: torch.Tensor = self.values[str(layer)](tokens_BT)
        return table.to(self.compute)


def _role(name: str, parameter: torch.Tensor) -> Role:
    if parameter.dim() < 2:
        return Role.VECTOR
    if name.endswith("value_gate.weight"):
        return Role.VECTOR
    tables = {
        "embedding": Role.EMBEDDING,
        "positions": Role.EMBEDDING,
        "values": Role.TABLE,
        "head": Role.HEAD,
    }
    return tables.get(name.partition(".")[0], Role.MATRIX)


def _named_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
