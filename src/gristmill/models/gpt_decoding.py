"""Decoding of the native GPT: its blocks, written once for kernels on GPUs and for torch.

A row is a position of a slot: one of each slot when text is generated, many of one slot when a
prompt is computed. Both take the same way.

    x = embedding[token] (+ position)        per block:  qkv = norm(x) W^T        attend
                                                         a = attended W^T
    logits = norm(x) head^T                              u = f(norm(x += a) W^T)  x += u W^T

What is added to the residual stream is added by the norm behind it.

`KernelDecoder` (`kernel_decoding.py`) computes the parts with kernels, `TorchDecoder`
(`torch_decoding.py`) with torch's own functions. Neither calls the model's modules, which take as
long as all products of a small model do.

Shapes: R rows, S slots, D width, N outputs of a layer, V vocabulary, H heads, G key and value
heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn import functional

from gristmill.config.model import GATE_FEATURES, GPTConfig
from gristmill.models.cache import SlotMemory
from gristmill.models.decoding import (
    AttentionShape,
    Decoder,
    HeadNorm,
    Norm,
    prepared_weights,
)
from gristmill.models.loss import capped
from gristmill.models.spec import CausalLM


class ResidualStream(NamedTuple):
    """The residual stream, and what is still to be added to it."""

    x_RD: torch.Tensor
    added: Sequence[Any]


class GPTDecoder(Decoder):
    """A decoder with keys and values of all slots in memory that is allocated once."""

    copies: ClassVar[bool] = True
    turns_weights: ClassVar[bool] = False
    """Whether products with several rows are faster with transposed weights."""

    def __init__(
        self, model: CausalLM, memory: SlotMemory, *, capacity: int, dtype: torch.dtype
    ) -> None:
        assert isinstance(model.config, GPTConfig)
        super().__init__(model, slots=memory.slots, capacity=capacity, dtype=dtype)
        self.memory, self.config = memory, model.config
        turns = self.turns_weights and memory.slots > 1
        self._named = prepared_weights(model, dtype, transposed=turns)
        self._named.setdefault("head.weight", self._named["embedding.weight"])
        buffers = dict(model.named_buffers())
        self._rotary = None
        if "rotary.cos_TK" in buffers:
            self._rotary = buffers["rotary.cos_TK"], buffers["rotary.sin_TK"]

    def copy(self, source: int, target: int, length: int) -> None:
        self.memory.copy(source, target, length)

    # ------------------------------------------------------------------ parts of a block

    @abstractmethod
    def _normalised(
        self, x_RD: torch.Tensor, norm: Norm, added: Sequence[Any] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with products added to it, and that normalised."""

    @abstractmethod
    def _linear(
        self, x_RK: torch.Tensor, name: str, *, activation: str | None = None
    ) -> torch.Tensor:
        """f(x W^T + bias) with the parameters of a layer; with swiglu, W is the gate above the
        rest."""

    @abstractmethod
    def _product(self, x_RK: torch.Tensor, name: str) -> Any:
        """x W^T + bias, for `_normalised` to add."""

    @abstractmethod
    def _attend(self, qkv_RN: torch.Tensor, shape: AttentionShape, rows: Any) -> torch.Tensor:
        """Append keys and values of rows, and let each attend to all positions up to itself."""

    @abstractmethod
    def _head(self, n_RD: torch.Tensor) -> torch.Tensor:
        """Logits in fp32."""

    # ------------------------------------------------------------------ the model

    def logits(self, stream: ResidualStream) -> torch.Tensor:
        """Logits of all rows of the head, in fp32."""
        _, n_RD = self._normalised(stream.x_RD, self._norm("norm"), stream.added)
        return capped(self._head(n_RD), self.config.logit_cap)

    def blocks(self, x_RD: torch.Tensor, tokens_R: torch.Tensor, rows: Any) -> ResidualStream:
        """The residual stream behind the last block, from the embedded tokens; `rows` is what
        `_attend` knows of them."""
        if self.config.embedding_norm:
            _, x_RD = self._normalised(x_RD, self._norm("embedding_norm"))
        stream = ResidualStream(x_RD, [])
        for layer in range(self.config.layers):
            stream = self._block(stream, layer, tokens_R, rows)
        return stream

    def _block(
        self, stream: ResidualStream, layer: int, tokens_R: torch.Tensor, rows: Any
    ) -> ResidualStream:
        config, name = self.config, f"blocks.{layer}"
        x_RD, n_RD = self._normalised(
            stream.x_RD, self._norm(f"{name}.attention_norm"), stream.added
        )
        qkv_RN = self._linear(n_RD, f"{name}.attention.qkv")
        if layer in config.value_layers:
            self._add_value_embedding(qkv_RN, n_RD, layer, tokens_R)
        shape = AttentionShape(
            layer,
            config.heads,
            config.attention_scale or config.head_size**-0.5,
            config.short_window if layer % 2 else None,
            self._head_norm(name),
        )
        y_RN = self._attend(qkv_RN, shape, rows)
        if config.attention_gate:
            gate_RH = self._gate(f"{name}.attention.output_gate", n_RD)
            y_RN = (y_RN.unflatten(1, (config.heads, -1)) * gate_RH[..., None]).flatten(1)
        attended = self._product(y_RN, f"{name}.attention.out")
        # With parallel residual connections the MLP does not see what was attended to.
        seen, left = ([], [attended]) if config.parallel_residual else ([attended], [])
        x_RD, n_RD = self._normalised(x_RD, self._norm(f"{name}.mlp_norm"), seen)
        up_RN = self._linear(n_RD, f"{name}.mlp.up", activation=config.activation)
        return ResidualStream(x_RD, [*left, self._product(up_RN, f"{name}.mlp.down")])

    def _norm(self, name: str) -> Norm:
        return Norm(
            self.config.norm == "layernorm",
            self.config.norm_eps,
            self._named.get(f"{name}.weight"),
            self._named.get(f"{name}.bias"),
        )

    def _head_norm(self, block: str) -> HeadNorm | None:
        if not self.config.qk_norm:
            return None
        gains = (self._named.get(f"{block}.attention.{of}_norm.weight") for of in ("query", "key"))
        return HeadNorm(self.config.norm_eps, *gains)

    def _gate(self, name: str, n_RD: torch.Tensor) -> torch.Tensor:
        """A factor from 0 to 2 for each head."""
        features = min(GATE_FEATURES, self.config.width)
        return 2 * torch.sigmoid(self._linear(n_RD[:, :features], name))

    def _add_value_embedding(
        self, qkv_RN: torch.Tensor, n_RD: torch.Tensor, layer: int, tokens_R: torch.Tensor
    ) -> None:
        gate_RG = self._gate(f"blocks.{layer}.attention.value_gate", n_RD)
        table = self._named[f"values.{layer}.weight"]
        added_RGD = functional.embedding(tokens_R, table).unflatten(1, (self.config.groups, -1))
        values_RN = qkv_RN[:, -table.shape[1] :]
        values_RN += (added_RGD * gate_RG[..., None]).flatten(1)
