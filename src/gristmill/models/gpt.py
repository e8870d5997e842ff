"""The native GPT: GPT-2 as published by default, its modern variants by settings.

    tokens -> embedding (+ positions) -> blocks -> norm -> head -> logits or loss

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
from gristmill.models.layers import Block, build_norm, document_mask
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.spec import KVCache, Loss


class GPT(nn.Module):
    """A decoder-only transformer whose embedding has `rows` rows, of which `vocab` can be
    predicted."""

    def __init__(
        self, config: ModelConfig, *, vocab: int, rows: int, recompute: bool = False
    ) -> None:
        super().__init__()
        assert vocab <= rows
        self.config, self.vocab, self.recompute = config, vocab, recompute
        self.embedding = nn.Embedding(rows, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = build_norm(config)
        self.head = nn.Linear(config.width, rows, bias=False)
        if config.tie_head:
            self.head.weight = self.embedding.weight

    def roles(self) -> dict[str, Role]:
        """What each parameter is for."""
        return {name: _role(name, parameter) for name, parameter in self.named_parameters()}

    def initialise(self, seed: int) -> None:
        """Draw all weights: normal matrices and embeddings, zero biases, unit gains."""
        residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() < 2:
                    parameter.fill_(1.0)
                else:
                    last = name.endswith(("attention.out.weight", "mlp.down.weight"))
                    generator = torch.Generator(parameter.device)
                    generator.manual_seed(_named_seed(seed, name))
                    std = residual if last else self.config.init_std
                    parameter.normal_(0.0, std, generator=generator)

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
            )
        if last_only:
            hidden_BTD = hidden_BTD[:, -1:]
        return self.head(hidden_BTD)[..., : self.vocab]

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
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions)
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            if self.recompute and self.training:
                x_BTD = checkpoint(block, x_BTD, positions, mask, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, positions, mask, cache)
        if cache is not None:
            cache.length += length
        return self.norm(x_BTD)


def _role(name: str, parameter: torch.Tensor) -> Role:
    if parameter.dim() < 2:
        return Role.VECTOR
    tables = {"embedding": Role.EMBEDDING, "positions": Role.EMBEDDING, "head": Role.HEAD}
    return tables.get(name.partition(".")[0], Role.MATRIX)


def _named_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
