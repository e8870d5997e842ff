"""The native GPT: GPT-2 as published by default, its modern variants by settings.

    tokens -> embedding (+ positions) -> blocks -> norm -> head (-> cap) -> logits or loss

A model may hold a `Portion` only: some of the layers, and a share of each. Its parameters keep the
names that they have in the whole.

Weights are drawn per parameter from a generator seeded by the run's seed and the parameter's name,
so that no weight depends on the order in which others are made, nor on how the model is divided.
Projections onto the residual stream get a standard deviation smaller by sqrt(2 layers), as in
GPT-2.

Shapes: B samples, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import nn

from gristmill.base.boxes import split_pieces
from gristmill.config.roles import Role
from gristmill.config.schema import ModelConfig
from gristmill.models.layers import Block, Linear, Rotary, Surroundings, build_norm, document_mask
from gristmill.models.loss import capped, linear_cross_entropy
from gristmill.models.recompute import NOTHING, Recompute
from gristmill.models.spec import Kernels, KVCache, Links, Loss, Portion, Split


class GPT(nn.Module):
    """A decoder-only transformer whose embedding has `rows` rows, of which `vocab` can be
    predicted. `compute` is the number format of its stream; `kernels` are those it may use; `links`
    lead to the other parts of a model that is divided."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab: int,
        rows: int,
        recompute: Recompute = NOTHING,
        portion: Portion | None = None,
    ) -> None:
        super().__init__()
        assert vocab <= rows
        portion = portion or Portion.whole(config)
        self.config, self.vocab, self.rows, self.portion = config, vocab, rows, portion
        self.recompute = recompute
        self.compute, self.kernels, self.links = torch.float32, Kernels(), Links()
        share = rows // portion.ranks
        if portion.first:
            self.embedding = nn.Embedding(share, config.width)
            learned = config.positions == "learned"
            self.positions = nn.Embedding(config.context, config.width) if learned else None
            self.embedding_norm = build_norm(config) if config.embedding_norm else None
            self.dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        values = config.groups * config.head_width // portion.ranks
        self.values = nn.ModuleDict(
            {
                str(layer): nn.Embedding(rows, values)
                for layer in config.value_layers
                if layer in portion.layers
            }
        )
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, layer, portion.ranks) for layer in portion.layers}
        )
        if portion.last:
            self.norm = build_norm(config)
            self.head = Linear(config.width, share, bias=False)
        self.tie()

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter here."""
        return self.config.tie_head and self.portion.first and self.portion.last

    def tie(self) -> None:
        """Make embedding and head one parameter, if they are to be."""
        if self.tied:
            self.head.weight = self.embedding.weight

    # -------------------------------------------------------------- about the parameters

    def whole_name(self, name: str) -> str:
        """A parameter's name in the whole model, where a tied head is the embedding."""
        return "embedding.weight" if self.config.tie_head and name == "head.weight" else name

    def roles(self) -> dict[str, Role]:
        """What each parameter is for, by its name in the whole model."""
        named = [(self.whole_name(name), p) for name, p in self.named_parameters()]
        return {name: _role(name, parameter) for name, parameter in named}

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Rows, in the whole model, of each matrix in parameters that are several matrices, one
        below the other."""
        splits = self.splits().items()
        return {
            name: split.parts
            for name, split in splits
            if len(split.parts) > 1 and name.endswith("weight")
        }

    def splits(self) -> dict[str, Split]:
        """How parameters are divided among processes that share layers; those not named here are
        on each of them."""
        config, rows = self.config, Split(0, (self.rows,))
        query, key = config.width, config.groups * config.head_width
        gates = 2 if config.activation == "swiglu" else 1
        within = {
            "attention.qkv.weight": Split(0, (query, key, key)),
            "attention.qkv.bias": Split(0, (query, key, key)),
            "attention.out.weight": Split(1, (query,)),
            "attention.value_gate.weight": Split(0, (config.groups,)),
            "mlp.up.weight": Split(0, (config.inner,) * gates),
            "mlp.up.bias": Split(0, (config.inner,) * gates),
            "mlp.down.weight": Split(1, (config.inner,)),
        }
        tables = {f"values.{layer}.weight": Split(1, (key,)) for layer in config.value_layers}
        known = {"embedding.weight": rows, "head.weight": rows, **tables}
        for layer in self.portion.layers:
            known |= {f"blocks.{layer}.{name}": split for name, split in within.items()}
        return {name: known[name] for name, _ in self.named_parameters() if name in known}

    def partial(self, *, sequence: bool) -> list[str]:
        """Parameters that every process sharing layers has, and whose gradient is the sum of all
        processes' gradients; `sequence`: the stream is divided among them along the sequence."""
        everywhere = [name for name, _ in self.named_parameters() if name not in self.splits()]
        if sequence:
            return everywhere
        return [name for name in everywhere if ".query_norm." in name or ".key_norm." in name]

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape in the whole model."""
        shape = list(self.get_parameter(name).shape)
        split = self.splits().get(name)
        if split is not None:
            shape[split.dim] = sum(split.parts)
        return tuple(shape)

    # -------------------------------------------------------------- how it begins

    def initialise(self, seed: int, names: Iterable[str] | None = None) -> None:
        """Draw weights, all or those named: normal matrices and embeddings, zero biases, unit
        gains."""
        splits, portion = self.splits(), self.portion
        for name in dict(self.named_parameters()) if names is None else names:
            parameter, shape = self.get_parameter(name), self.whole_shape(name)
            value = self._initial(self.whole_name(name), shape, seed, parameter.device)
            split = splits.get(name, Split(0, (shape[0],)))
            rank, ranks = (portion.rank, portion.ranks) if name in splits else (0, 1)
            with torch.no_grad():
                for piece in split_pieces(
                    shape, dim=split.dim, parts=split.parts, rank=rank, ranks=ranks
                ):
                    parameter[piece.local.slices] = value[piece.whole.slices]

    def _initial(
        self, name: str, shape: tuple[int, ...], seed: int, device: torch.device
    ) -> torch.Tensor:
        """What a whole parameter begins as; rows that only pad the vocabulary are zero."""
        spread = self._spread(name, len(shape))
        if spread is None:
            return torch.ones(shape, device=device)
        value = torch.zeros(shape, device=device)
        if spread:
            generator = torch.Generator(device)
            generator.manual_seed(_named_seed(seed, name))
            drawn = value[: self.vocab] if name in ("embedding.weight", "head.weight") else value
            drawn.normal_(0.0, spread, generator=generator)
        return value

    def _spread(self, name: str, dims: int) -> float | None:
        """Standard deviation of a parameter at the start; None for gains, which start at one."""
        config = self.config
        if name.startswith("values.") or name.endswith(("bias", "value_gate.weight")):
            return 0.0
        if dims < 2:
            return None
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            return 0.0 if config.zero_init else config.init_std / math.sqrt(2 * config.layers)
        own = {"embedding.weight": config.embedding_std, "head.weight": config.head_std}.get(name)
        return own if own is not None else config.init_std

    # -------------------------------------------------------------- what it computes

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
        around = self.surroundings(tokens_BT, positions_BT, documents_BT, cache=cache)
        x_BTD = self.embed(tokens_BT, around)
        x_BTD = self.through(x_BTD, self.portion.layers, tokens_BT, around)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        if targets_BT is not None:
            return self.loss(x_BTD, targets_BT, weights_BT, scale)
        hidden_BTD = self.norm(x_BTD[:, -1:] if last_only else x_BTD)
        assert self.links.alone, "logits are asked of whole models only"
        return capped(self.head(hidden_BTD)[..., : self.vocab], self.config.logit_cap)

    def surroundings(
        self,
        tokens_BT: torch.Tensor,
        positions: torch.Tensor | None,
        documents_BT: torch.Tensor | None,
        *,
        cache: KVCache | None = None,
    ) -> Surroundings:
        """What the blocks are told about a batch; positions are (T) or (B, T)."""
        if positions is None:
            begin = cache.length if cache is not None else 0
            length = tokens_BT.shape[1]
            positions = torch.arange(begin, begin + length, device=tokens_BT.device)
        turn = None if self.rotary is None else self.rotary(positions)
        dense = documents_BT is not None and self.links.attend is None
        mask = document_mask(documents_BT) if dense and documents_BT is not None else None
        return Surroundings(positions, mask, turn, cache, self.kernels, self.links, documents_BT)

    def embed(self, tokens_BT: torch.Tensor, around: Surroundings) -> torch.Tensor:
        """The stream before the first block."""
        x_BTD = self.links.leave(self._rows(tokens_BT).to(self.compute))
        if self.positions is not None:
            positions = self.links.own(around.positions, -1)
            x_BTD = x_BTD + self.positions(positions).to(self.compute)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        dropped: torch.Tensor = self.dropout(x_BTD)
        return dropped

    def _rows(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding; zero for tokens whose row another process has."""
        if self.portion.ranks == 1:
            rows: torch.Tensor = self.embedding(tokens_BT)
            return rows
        count = self.embedding.num_embeddings
        here_BT = tokens_BT - self.portion.rank * count
        inside_BT = (here_BT >= 0) & (here_BT < count)
        found: torch.Tensor = self.embedding(here_BT.clamp(0, count - 1))
        return found * inside_BT[..., None]

    def through(
        self,
        x_BTD: torch.Tensor,
        layers: Iterable[int],
        tokens_BT: torch.Tensor,
        around: Surroundings,
    ) -> torch.Tensor:
        """The stream after some of the blocks."""
        for layer in layers:
            block, looked_up = self.blocks[str(layer)], self._looked_up(layer, tokens_BT)
            if self.training:
                told = around._replace(kernels=self.recompute.may_use(self.kernels, layer))
                x_BTD = self.recompute.run(layer, block, x_BTD, told, looked_up)
            else:
                x_BTD = block(x_BTD, around, looked_up)
        return x_BTD

    def _looked_up(self, layer: int, tokens_BT: torch.Tensor) -> torch.Tensor | None:
        """What a layer with value embeddings adds to its values."""
        if layer not in self.config.value_layers:
            return None
        table: torch.Tensor = self.values[str(layer)](tokens_BT)
        return table.to(self.compute)

    def loss(
        self,
        x_BTD: torch.Tensor,
        targets_BT: torch.Tensor,
        weights_BT: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> Loss:
        """The loss of the stream after the last block."""
        hidden_BTD = self.links.enter(self.norm(x_BTD))
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
            links=self.links,
            first=self.portion.rank * self.head.weight.shape[0],
        )


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
