"""The native GPT: GPT-2 as published by default, modern variants by settings.

    tokens -> embedding (+ positions) -> blocks -> norm -> head (-> cap) -> logits or loss

A model may be a shard: some of the layers, and a part of each. Parameters keep the names they have
in the whole model.

Initial weights depend on the run's seed and the parameter's name alone (see `drawing`), not on the
device, the order of creation or the sharding. Output projections of
attention and MLP have their standard deviation divided by sqrt(2 layers), as in GPT-2.

Shapes: B samples, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from gristmill.base.tensor_slices import TensorSlice, split_slices
from gristmill.config.model import GPTConfig, Role
from gristmill.config.resolve import padded
from gristmill.models.cache import Cache, KVCache, SlotMemory
from gristmill.models.counter_rng import fill_normal
from gristmill.models.layers import (
    DOCUMENT_BLOCK,
    Block,
    BlockContext,
    Embedding,
    Linear,
    Rotary,
    build_norm,
    document_blocks,
)
from gristmill.models.loss import capped, linear_cross_entropy
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms
from gristmill.models.recompute import Recompute
from gristmill.models.spec import (
    PLAIN_EXECUTION,
    WHOLE,
    CausalLM,
    Execution,
    Loss,
    ModelShard,
    Split,
    document_mask,
)
from gristmill.plan.arithmetic import TokenCost, token_cost

FP8_LAYERS = {"attention": ("attention.qkv", "attention.out"), "mlp": ("mlp.up", "mlp.down")}
"""By what run files call the parts of a block."""


class GPT(CausalLM):
    """A decoder-only transformer; of the `rows` rows of its embedding, `vocab` can be predicted."""

    parts_beside_blocks: ClassVar[tuple[str, ...]] = ("embed", "look_up", "loss")
    casts_weights: ClassVar[bool] = True
    config: GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        *,
        vocab: int,
        shard: ModelShard = WHOLE,
        execution: Execution = PLAIN_EXECUTION,
        pad_for: int = 1,
    ) -> None:
        super().__init__(config, vocab=vocab, shard=shard, execution=execution)
        tp_size = shard.tp_size
        self.layers = tuple(range(config.layers)) if shard.layers is None else shard.layers
        self.rows = rows = padded(vocab, config, ranks=max(tp_size, pad_for))
        if shard.first:
            self.embedding = Embedding(rows // tp_size, config.width)
            learned = config.positions == "learned"
            self.positions = Embedding(config.context, config.width) if learned else None
            self.embedding_norm = build_norm(config) if config.embedding_norm else None
            self.dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        values = config.groups * config.head_size // tp_size
        self.values = nn.ModuleDict(
            {
                str(layer): Embedding(rows, values)
                for layer in config.value_layers
                if layer in self.layers
            }
        )
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, layer, tp_size) for layer in self.layers}
        )
        if shard.last:
            self.norm = build_norm(config)
            self.head = Linear(config.width, rows // tp_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Tie the head to the embedding, if the settings say so and this shard has both."""
        if self.config.tie_head and self.shard.first and self.shard.last:
            self.head.weight = self.embedding.weight

    # -------------------------------------------------------------- parameters

    def canonical_name(self, name: str) -> str:
        return "embedding.weight" if self.config.tie_head and name == "head.weight" else name

    def roles(self) -> dict[str, Role]:
        named = [(self.canonical_name(name), p) for name, p in self.named_parameters()]
        return {name: _role(name, parameter) for name, parameter in named}

    def vocabulary_parameters(self) -> frozenset[str]:
        tables = ("embedding", "head", "values")
        return frozenset(name for name in self.roles() if name.partition(".")[0] in tables)

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """QKV, and the two halves of SwiGLU."""
        return {
            name: split.parts
            for name, split in self.splits().items()
            if len(split.parts) > 1 and name.endswith("weight")
        }

    def block_names(self) -> Sequence[str]:
        return [f"blocks.{layer}" for layer in self.layers]

    def fp8_layers(self, parts: Iterable[str]) -> dict[str, Linear]:
        """The linear layers of blocks to compute in fp8, by name."""
        inside = [name for part in parts for name in FP8_LAYERS[part]]
        names = [f"{block}.{name}" for block in self.block_names() for name in inside]
        return {name: cast(Linear, self.get_submodule(name)) for name in names}

    def recompute_blocks(self, recompute: Recompute) -> None:
        """Selective recomputation saves matmuls and recomputes activations, so it turns off the
        fused MLP."""
        for number, layer in enumerate(self.layers):
            if recompute.kind == "selective" and recompute.concerns(number):
                block = self.blocks[str(layer)]
                assert isinstance(block, Block)
                block.mlp.may_fuse = False
        super().recompute_blocks(recompute)

    def token_cost(self, sequence: int, *, sampled: int | None = None) -> TokenCost:
        return token_cost(self.config, rows=sampled or self.rows, sequence=sequence)

    def new_cache(self, capacity: int | None = None) -> KVCache:
        return KVCache(capacity or self.config.context)

    def slot_memory(self, slots: int, capacity: int, *, dtype: torch.dtype) -> SlotMemory:
        config = self.config
        return SlotMemory(
            layers=config.layers,
            slots=slots,
            groups=config.groups,
            capacity=capacity,
            width=config.head_size,
            dtype=dtype,
            device=self.device,
        )

    def slot_bytes(self, capacity: int, *, dtype: torch.dtype) -> int:
        config = self.config
        return 2 * config.layers * config.groups * config.head_size * capacity * dtype.itemsize

    def splits(self) -> dict[str, Split]:
        """Split by heads, inner features and vocabulary rows."""
        config, rows = self.config, Split(0, (self.rows,))
        query, key = (heads * config.head_size for heads in (config.heads, config.groups))
        gates = 2 if config.activation == "swiglu" else 1
        in_block = {
            "attention.qkv.weight": Split(0, (query, key, key)),
            "attention.qkv.bias": Split(0, (query, key, key)),
            "attention.out.weight": Split(1, (query,)),
            "attention.value_gate.weight": Split(0, (config.groups,)),
            "attention.output_gate.weight": Split(0, (config.heads,)),
            "mlp.up.weight": Split(0, (config.inner,) * gates),
            "mlp.up.bias": Split(0, (config.inner,) * gates),
            "mlp.down.weight": Split(1, (config.inner,)),
        }
        tables = {f"values.{layer}.weight": Split(1, (key,)) for layer in config.value_layers}
        known = {"embedding.weight": rows, "head.weight": rows, **tables}
        for layer in self.layers:
            known |= {f"blocks.{layer}.{name}": split for name, split in in_block.items()}
        return {name: known[name] for name, _ in self.named_parameters() if name in known}

    def partial_gradients(self) -> list[str]:
        """With sequence parallelism, all replicated parameters: each rank sees only some positions.
        Otherwise the query and key norms: each rank sees only some heads."""
        splits = self.splits()
        replicated = [name for name, _ in self.named_parameters() if name not in splits]
        if self.comm.sequence_parallel:
            return replicated
        return [name for name in replicated if ".query_norm." in name or ".key_norm." in name]

    # -------------------------------------------------------------- initialisation

    @torch.no_grad()
    def initialise(self, seed: int, names: Iterable[str] | None = None) -> None:
        """Normal matrices and embeddings, zero biases, unit gains."""
        splits, shapes, shard = self.splits(), self.whole_shapes(), self.shard
        for name in dict(self.named_parameters()) if names is None else names:
            parameter, shape = self.get_parameter(name), shapes[name]
            canonical = self.canonical_name(name)
            std = self._initial_std(canonical, len(shape))
            parameter.fill_(1 if std is None else 0)
            if not std:
                continue
            drawn = TensorSlice.whole(shape)
            if canonical in ("embedding.weight", "head.weight"):
                # Rows that pad the vocabulary stay zero.
                drawn = drawn.narrow(0, 0, self.vocab)
            split = splits.get(name, Split(0, (shape[0],)))
            rank, ranks = (shard.tp_rank, shard.tp_size) if name in splits else (0, 1)
            for piece in split_slices(
                shape, dim=split.dim, parts=split.parts, rank=rank, ranks=ranks
            ):
                if region := piece.whole.intersect(drawn):
                    local = region.relative_to(piece.whole).shift(piece.local.begin)
                    fill_normal(
                        parameter[local.slices],
                        std,
                        seed=seed,
                        name=canonical,
                        shape=shape,
                        region=region,
                    )

    def reset_buffers(self) -> None:
        if self.rotary is not None:
            self.rotary.fill()

    def _initial_std(self, name: str, dims: int) -> float | None:
        """Initial standard deviation of a parameter; None for gains, which start at one."""
        config = self.config
        if name.startswith("values.") or name.endswith(("bias", "_gate.weight")):
            return 0.0
        if dims < 2:
            return None
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            return 0.0 if config.zero_init else config.init_std / math.sqrt(2 * config.layers)
        std = {"embedding.weight": config.embedding_std, "head.weight": config.head_std}.get(name)
        return std if std is not None else config.init_std

    # -------------------------------------------------------------- computation

    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        targets_BT: torch.Tensor | None = None,
        terms: LossTerms = PLAIN_LOSS,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_at_N: torch.Tensor | None = None,
    ) -> torch.Tensor | Loss:
        assert cache is None or documents_BT is None, "one document"
        assert cache is None or isinstance(cache, KVCache)
        context = self.block_context(tokens_BT, positions_BT, documents_BT, cache=cache)
        x_BTD = self.embed(tokens_BT, context)
        x_BTD = self.run_blocks(x_BTD, self.layers, tokens_BT, context)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        if targets_BT is not None:
            return self.loss(x_BTD, targets_BT, terms)
        assert self.comm.single, "only whole models compute logits"
        hidden = self.norm(x_BTD if logits_at_N is None else x_BTD.flatten(0, 1)[logits_at_N])
        return capped(self.head(hidden)[..., : self.vocab], self.config.logit_cap)

    def block_context(
        self,
        tokens_BT: torch.Tensor,
        positions: torch.Tensor | None,
        documents_BT: torch.Tensor | None,
        *,
        cache: KVCache | None = None,
    ) -> BlockContext:
        """The inputs that all blocks share for a batch; positions are (T) or (B, T)."""
        if positions is None:
            begin = cache.length if cache is not None else 0
            end = begin + tokens_BT.shape[1]
            positions = torch.arange(begin, end, device=tokens_BT.device)
        angles = None if self.rotary is None else self.rotary(positions)
        mask: torch.Tensor | BlockMask | None = None
        if documents_BT is not None and self.comm.attend is None:
            dropped = self.training and self.config.attention_drop > 0
            windows = self.config.short_window is not None
            blocks = self.kernels.document_blocks and not dropped and not windows
            blocks = blocks and documents_BT.shape[1] % DOCUMENT_BLOCK == 0
            mask = document_blocks(documents_BT) if blocks else document_mask(documents_BT)
        return BlockContext(positions, mask, angles, cache, self.kernels, self.comm, documents_BT)

    def embed(self, tokens_BT: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """The residual stream before the first block."""
        x_BTD = self.comm.reduce_from(self._rows(tokens_BT).to(self.compute))
        if self.positions is not None:
            positions = self.comm.local_positions(context.positions)
            x_BTD = x_BTD + self.positions(positions).to(self.compute)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        dropped: torch.Tensor = self.dropout(x_BTD)
        return dropped

    def _rows(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding; zero for tokens whose row is on another rank."""
        if self.shard.tp_size == 1:
            rows: torch.Tensor = self.embedding(tokens_BT)
            return rows
        count = self.embedding.num_embeddings
        local_BT = tokens_BT - self.shard.tp_rank * count
        inside_BT = (local_BT >= 0) & (local_BT < count)
        found: torch.Tensor = self.embedding(local_BT.clamp(0, count - 1))
        return found * inside_BT[..., None]

    def run_blocks(
        self,
        x_BTD: torch.Tensor,
        layers: Iterable[int],
        tokens_BT: torch.Tensor,
        context: BlockContext,
    ) -> torch.Tensor:
        """The residual stream after some of the blocks."""
        for layer in layers:
            looked_up_BTV = None
            if layer in self.config.value_layers:
                table = self.values[str(layer)]
                assert isinstance(table, nn.Embedding)
                looked_up_BTV = self.look_up(table.weight, tokens_BT)
            x_BTD = self.blocks[str(layer)](x_BTD, context, looked_up_BTV)
        return x_BTD

    def look_up(self, table_VW: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Rows of a table of value embeddings."""
        return functional.embedding(tokens_BT, table_VW).to(self.compute)

    def loss(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor, terms: LossTerms) -> Loss:
        """The loss, from the residual stream after the last block."""
        return linear_cross_entropy(
            self.comm.copy_to(self.norm(x_BTD)),
            self.head.weight,
            targets_BT,
            terms._replace(cap=self.config.logit_cap),
            vocab=self.vocab,
            kernel=self.kernels.loss,
            fp8=self.kernels.head_fp8,
            comm=self.comm,
            first=self.shard.tp_rank * self.head.weight.shape[0],
        )

    # -------------------------------------------------------------- pipeline stages

    def stage_modules(
        self, layers: Sequence[int], *, first: bool, last: bool
    ) -> Mapping[str, nn.Module]:
        ends = ["embedding", "positions", "embedding_norm"] if first else []
        ends += ["norm", "head"] if last else []
        names = [str(layer) for layer in layers]
        modules = {name: getattr(self, name) for name in ends}
        modules |= {f"block-{name}": self.blocks[name] for name in names}
        modules |= {f"values-{name}": self.values[name] for name in names if name in self.values}
        return {name: module for name, module in modules.items() if module is not None}

    def forward_stage(
        self,
        hidden_BTD: torch.Tensor,
        layers: Sequence[int],
        *,
        first: bool,
        last: bool,
        tokens_BT: torch.Tensor,
        targets_BT: torch.Tensor,
        terms: LossTerms = PLAIN_LOSS,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | Loss:
        context = self.block_context(tokens_BT, positions_BT, documents_BT)
        x_BTD = self.embed(tokens_BT, context) if first else hidden_BTD
        x_BTD = self.run_blocks(x_BTD, layers, tokens_BT, context)
        return self.loss(x_BTD, targets_BT, terms) if last else x_BTD

    def distinct_layers(self) -> Sequence[int]:
        def kind(layer: int) -> object:
            block = self.blocks[str(layer)]
            assert isinstance(block, Block)
            shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
            return shapes, block.attention.window

        return list({kind(layer): layer for layer in reversed(self.layers)}.values())[::-1]

    def stage_hidden(self, samples: int, length: int) -> torch.Tensor:
        """The residual stream, sharded along the sequence with sequence parallelism."""
        shards = self.shard.tp_size if self.comm.sequence_parallel else 1
        shape = (samples, length // shards, self.config.width)
        return torch.empty(shape, dtype=self.compute, device="meta", requires_grad=True)

    def tied_across_stages(self) -> list[str]:
        apart = self.shard.first != self.shard.last
        return ["embedding.weight"] if self.config.tie_head and apart else []


def _role(name: str, parameter: torch.Tensor) -> Role:
    if parameter.dim() < 2 or name.endswith("_gate.weight"):
        return Role.VECTOR
    tables = {
        "embedding": Role.EMBEDDING,
        "positions": Role.EMBEDDING,
        "values": Role.TABLE,
        "head": Role.HEAD,
    }
    return tables.get(name.partition(".")[0], Role.MATRIX)
