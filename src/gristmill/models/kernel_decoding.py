"""Decoding of the native GPT on a GPU, with the kernels of `kernels/decoding.py`.

A row is a position of a slot: one of each slot when text is generated, many of one slot when a
prompt is computed. Both take the same way, and a row's bits do not depend on the others, so what a
slot holds is the same whether it was computed as part of a prompt or generated.

Nothing here waits for the host or depends on what is in the slots, so that a CUDA graph can hold a
step. One slot more than asked for is allocated, for rows that fill up a graph.

    x = embedding[token] (+ position)        per block:  qkv = norm(x) W^T        attend
                                                         a = attended W^T
    logits = norm(x) head^T                              u = f(norm(x += a) W^T)  x += u W^T

What is added to the residual stream is added by the norm behind it.

Shapes: R rows, S slots, D width, N outputs of a layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch.nn import functional

from gristmill.config.model import GATE_FEATURES, GPTConfig
from gristmill.models.decoding import PromptPart, SlotDecoder
from gristmill.models.kernels import decoding as kernels
from gristmill.models.loss import capped
from gristmill.models.spec import CausalLM, SlotMemory

SPAN = 1024
"""Positions that one program attends to, at least; with a context of 32 times as many, more."""
CHUNKS = (16, 64, 256)
"""Numbers of positions of a prompt for which there are graphs."""


class _Rows(NamedTuple):
    """What is computed at once."""

    tokens_R: torch.Tensor
    slots_R: torch.Tensor
    places_R: torch.Tensor
    """The positions in their slots."""
    together: bool


class Stream(NamedTuple):
    """The residual stream, and what is still to be added to it."""

    x_RD: torch.Tensor
    added: Sequence[kernels.Product]


class KernelDecoder(SlotDecoder):
    """A decoder whose steps run on a GPU alone."""

    turns_weights: ClassVar[bool] = False
    runs_in_graphs: ClassVar[bool] = True

    def __init__(
        self, model: CausalLM, memory: SlotMemory, *, capacity: int, dtype: torch.dtype
    ) -> None:
        assert isinstance(model.config, GPTConfig)
        super().__init__(model, memory, capacity=capacity, dtype=dtype)
        self.slots = memory.slots - 1
        self.config: GPTConfig = model.config
        self._named: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._named.update(self._weights or {})
        self._named.setdefault("head.weight", self._named["embedding.weight"])
        buffers = dict(model.named_buffers())
        self._rotary = None
        if "rotary.cos_TK" in buffers:
            self._rotary = buffers["rotary.cos_TK"], buffers["rotary.sin_TK"]
        self._prompts: dict[int, PromptGraph] = {}
        # A position's bits do not depend on how a prompt is cut.
        self.chunk, self.grain, self.pause = CHUNKS[-1], 1, 4 * CHUNKS[-1]
        self._span = max(SPAN, self.config.context // 32)
        # What the device knows of the slots.
        slots = memory.slots
        self.tokens_S = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.lengths_S = torch.zeros(slots, dtype=torch.int32, device=self.device)

    def _row_counts(self) -> list[int]:
        return []  # any

    def prefill(self, parts: Sequence[PromptPart]) -> None:
        rows = [
            (id, part.slot, place)
            for part in parts
            for place, id in enumerate(part.ids, start=part.start)
        ]
        if not rows:
            return
        size = next(size for size in CHUNKS if size >= len(rows))
        prompt = self._prompts.get(size)
        if prompt is None:
            prompt = self._prompts[size] = PromptGraph(self, size)
        spare = (0, self.slots, 0)
        content = torch.tensor([*rows, *[spare] * (size - len(rows))], dtype=torch.int32)
        prompt.run(content.T.contiguous())

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        rows = torch.tensor([tokens, slots, lengths], dtype=torch.int32, device=self.device)
        return self.logits(self.hidden(*rows))

    def next_logits(self, slots_R: torch.Tensor) -> torch.Tensor:
        """Logits of these slots, from the tokens and lengths that the device knows."""
        embedded = self._embedded(self.tokens_S, self.lengths_S, slots_R=slots_R)
        return self.logits(self._blocks(embedded, slots_R, together=False))

    def logits(self, stream: Stream) -> torch.Tensor:
        """Logits of all rows of the head, in fp32."""
        _, n_RD = kernels.normalised(stream.x_RD, self._norm("norm"), stream.added)
        logits_RV = kernels.linear(n_RD, self._named["head.weight"], dtype=torch.float32)
        return capped(logits_RV, self.config.logit_cap)

    def hidden(
        self,
        tokens_R: torch.Tensor,
        slots_R: torch.Tensor,
        places_R: torch.Tensor,
        *,
        together: bool = False,
    ) -> Stream:
        """The residual stream behind the last block. `together`: rows may be of one slot."""
        return self._blocks(self._embedded(tokens_R, places_R), slots_R, together=together)

    def _embedded(
        self, tokens: torch.Tensor, places: torch.Tensor, *, slots_R: torch.Tensor | None = None
    ) -> kernels.Embedded:
        return kernels.embedded(
            tokens,
            places,
            self._named["embedding.weight"],
            self._named.get("positions.weight"),
            slots_R=slots_R,
            context=self.config.context,
        )

    def _blocks(
        self, embedded: kernels.Embedded, slots_R: torch.Tensor, *, together: bool
    ) -> Stream:
        x_RD = embedded.x_RD
        if self.config.embedding_norm:
            _, x_RD = kernels.normalised(x_RD, self._norm("embedding_norm"))
        stream = Stream(x_RD, [])
        rows = _Rows(embedded.tokens_R, slots_R, embedded.places_R, together)
        for layer in range(self.config.layers):
            stream = self._block(stream, layer, rows)
        return stream

    def _block(self, stream: Stream, layer: int, rows: _Rows) -> Stream:
        config, name = self.config, f"blocks.{layer}"
        x_RD, n_RD = kernels.normalised(
            stream.x_RD, self._norm(f"{name}.attention_norm"), stream.added
        )
        qkv_RN = self._linear(n_RD, f"{name}.attention.qkv")
        if layer in config.value_layers:
            self._add_value_embedding(qkv_RN, n_RD, layer, rows.tokens_R)
        y_RN = kernels.attend(
            qkv_RN,
            self.memory.keys_LSGCK[layer],
            self.memory.values_LSGCK[layer],
            rows.slots_R,
            rows.places_R,
            heads=config.heads,
            scale=config.attention_scale or config.head_size**-0.5,
            span=self._span,
            window=config.short_window if layer % 2 else None,
            rotary=self._rotary,
            norm=self._head_norm(name),
            together=rows.together,
        )
        if config.attention_gate:
            gate_RH = self._gate(f"{name}.attention.output_gate", n_RD)
            y_RN = (y_RN.unflatten(1, (config.heads, -1)) * gate_RH[..., None]).flatten(1)
        attended = self._product(y_RN, f"{name}.attention.out")
        # With parallel residual connections the MLP does not see what was attended to.
        seen, left = ([], [attended]) if config.parallel_residual else ([attended], [])
        x_RD, n_RD = kernels.normalised(x_RD, self._norm(f"{name}.mlp_norm"), seen)
        up_RN = self._linear(n_RD, f"{name}.mlp.up", activation=config.activation)
        return Stream(x_RD, [*left, self._product(up_RN, f"{name}.mlp.down")])

    def _product(self, x_RK: torch.Tensor, name: str) -> kernels.Product:
        named = self._named
        return kernels.product(x_RK, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def _linear(
        self, x_RK: torch.Tensor, name: str, *, activation: str | None = None
    ) -> torch.Tensor:
        named = self._named
        return kernels.linear(
            x_RK, named[f"{name}.weight"], named.get(f"{name}.bias"), activation=activation
        )

    def _norm(self, name: str) -> kernels.Norm:
        return kernels.Norm(
            self.config.norm == "layernorm",
            self.config.norm_eps,
            self._named.get(f"{name}.weight"),
            self._named.get(f"{name}.bias"),
        )

    def _head_norm(self, block: str) -> kernels.HeadNorm | None:
        if not self.config.qk_norm:
            return None
        gains = (self._named.get(f"{block}.attention.{of}_norm.weight") for of in ("query", "key"))
        return kernels.HeadNorm(self.config.norm_eps, *gains)

    def _gate(self, name: str, n_RD: torch.Tensor) -> torch.Tensor:
        """A factor from 0 to 2 for each head."""
        weight = self._named[f"{name}.weight"]
        features = min(GATE_FEATURES, self.config.width)
        return 2 * torch.sigmoid(kernels.linear(n_RD[:, :features], weight))

    def _add_value_embedding(
        self, qkv_RN: torch.Tensor, n_RD: torch.Tensor, layer: int, tokens_R: torch.Tensor
    ) -> None:
        gate_RG = self._gate(f"blocks.{layer}.attention.value_gate", n_RD)
        table = self._named[f"values.{layer}.weight"]
        added_RGD = functional.embedding(tokens_R, table).unflatten(1, (self.config.groups, -1))
        values_RN = qkv_RN[:, -table.shape[1] :]
        values_RN += (added_RGD * gate_RG[..., None]).flatten(1)


class PromptGraph:
    """The computation of some positions of a prompt, of which only keys and values are kept."""

    def __init__(self, decoder: KernelDecoder, size: int) -> None:
        device = decoder.device
        self._rows_3R = torch.zeros(3, size, dtype=torch.int32, device=device)
        self._rows_3R[1] = decoder.slots
        self._graph = captured(lambda: decoder.hidden(*self._rows_3R, together=True), device)

    def run(self, rows_3R: torch.Tensor) -> None:
        """Compute rows: tokens, slots and places."""
        # From pinned memory: a copy from any other waits for what the GPU computes.
        self._rows_3R.copy_(rows_3R.pin_memory(), non_blocking=True)
        self._graph.replay()


def captured(compute: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a computation, which runs once before, to compile its kernels."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph
