"""Decoding of the native GPT on a GPU, with the kernels of `kernels/decoding.py` and
`kernels/decoding_attention.py`.

A row's bits do not depend on the others, so what a slot holds is the same whether it was computed
as part of a prompt or generated.

Nothing here waits for the host or depends on what is in the slots, so that a CUDA graph can hold a
step. One slot more than asked for is allocated, for rows that fill up a graph.

Shapes: R rows, S slots, D width, N outputs of a layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from gristmill.models.cache import SlotMemory
from gristmill.models.decoding import AttentionShape, Norm, PromptPart
from gristmill.models.gpt_decoding import GPTDecoder, ResidualStream
from gristmill.models.kernels import decoding as kernels
from gristmill.models.kernels.decoding_attention import attend
from gristmill.models.spec import CausalLM

SPAN = 1024
"""Positions that one program attends to, at least; with a context of 32 times as many, more."""
CHUNKS = (16, 64, 256, 1024)
"""Numbers of positions of a prompt for which there are graphs."""


class _Rows(NamedTuple):
    """Where rows are."""

    slots_R: torch.Tensor
    places_R: torch.Tensor
    """The positions in their slots."""
    together: bool


class KernelDecoder(GPTDecoder):
    """A decoder whose steps run on a GPU alone."""

    joins = True
    runs_in_graphs: ClassVar[bool] = True

    def __init__(
        self, model: CausalLM, memory: SlotMemory, *, capacity: int, dtype: torch.dtype
    ) -> None:
        super().__init__(model, memory, capacity=capacity, dtype=dtype)
        self.slots = memory.slots - 1
        self._prompts: dict[int, PromptGraph] = {}
        # A position's bits do not depend on how a prompt is cut.
        self.chunk, self.grain, self.pause = CHUNKS[-1], 1, CHUNKS[-1]
        self._span = max(SPAN, self.config.context // 32)
        slots = memory.slots
        groups = memory.keys_LSGCK.shape[2]
        self._arrived = torch.zeros(
            max(slots, CHUNKS[-1]) * groups, dtype=torch.int32, device=self.device
        )
        # What the device knows of the slots.
        self.tokens_S = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.lengths_S = torch.zeros(slots, dtype=torch.int32, device=self.device)

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
        rows = _Rows(slots_R, embedded.places_R, together=False)
        return self.logits(self.blocks(embedded.x_RD, embedded.tokens_R, rows))

    def hidden(
        self,
        tokens_R: torch.Tensor,
        slots_R: torch.Tensor,
        places_R: torch.Tensor,
        *,
        together: bool = False,
    ) -> ResidualStream:
        """The residual stream behind the last block. `together`: rows may be of one slot."""
        embedded = self._embedded(tokens_R, places_R)
        rows = _Rows(slots_R, embedded.places_R, together)
        return self.blocks(embedded.x_RD, embedded.tokens_R, rows)

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

    def _normalised(
        self, x_RD: torch.Tensor, norm: Norm, added: Sequence[kernels.Product] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.normalised(x_RD, norm, added)

    def _linear(
        self, x_RK: torch.Tensor, name: str, *, activation: str | None = None
    ) -> torch.Tensor:
        named = self._named
        return kernels.linear(
            x_RK, named[f"{name}.weight"], named.get(f"{name}.bias"), activation=activation
        )

    def _product(self, x_RK: torch.Tensor, name: str) -> kernels.Product:
        named = self._named
        return kernels.product(x_RK, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def _attend(self, qkv_RN: torch.Tensor, shape: AttentionShape, rows: _Rows) -> torch.Tensor:
        return attend(
            qkv_RN,
            self.memory.keys_LSGCK[shape.layer],
            self.memory.values_LSGCK[shape.layer],
            rows.slots_R,
            rows.places_R,
            shape,
            span=self._span,
            arrived=self._arrived,
            rotary=self._rotary,
            together=rows.together,
        )

    def _head(self, n_RD: torch.Tensor) -> torch.Tensor:
        return kernels.linear(n_RD, self._named["head.weight"], dtype=torch.float32)


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
