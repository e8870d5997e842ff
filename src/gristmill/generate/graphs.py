"""Steps in CUDA graphs: several are started at once, and none waits for the host.

What the next step needs stays on the device: each slot's token, its length, how tokens are drawn.
One graph for each number of rows holds a whole step, logits and draw; a burst of them is started
with one copy of the ids at its end, and while it is computed the burst before it is read. Rows that
fill up a graph decode in a slot that nobody has.

Requests that need the host between two steps, for log-probabilities or for what a text must match,
are served all the same: then a burst is one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gristmill.generate.kernels import SETTINGS, draw_rows
from gristmill.generate.request import Request, TokenProbability
from gristmill.generate.sampling import Sampling, seen_tokens, uniform_numbers
from gristmill.generate.steps import Drawn, Steps, bias_row, probability
from gristmill.models.kernel_decoding import KernelDecoder, captured

BURST = 8
"""Steps that are started at once."""
UNIFORM = 1024
"""Uniform numbers that the device has of a request."""


@dataclass
class _Row:
    """What the host knows of a slot."""

    request: Request
    drawn: int = 0
    """Tokens whose draw was started."""
    uniform: int = 0
    """The first of them whose uniform number the device has."""
    bias_V: torch.Tensor | None = None


@dataclass
class _Burst:
    """Ids on their way to the host."""

    steps: int
    rows: list[tuple[int, int]]
    """Slot, and where its first token is."""
    ids_SB: torch.Tensor
    ready: torch.cuda.Event
    chances: Sequence[Sequence[TokenProbability]]

    def ids(self) -> list[list[int]]:
        """The ids drawn for each row; waits until they are there."""
        self.ready.synchronize()
        kept = self.ids_SB.tolist()
        return [
            [kept[slot][(first + step) % BURST] for step in range(self.steps)]
            for slot, first in self.rows
        ]

    def probabilities(self) -> Sequence[Sequence[TokenProbability]]:
        return self.chances


class GraphSteps(Steps):
    """Steps that a GPU computes by itself."""

    ahead = 1

    def __init__(self, decoder: KernelDecoder, ids: int) -> None:
        self._decoder, self._ids, device = decoder, ids, decoder.device
        slots = decoder.slots + 1
        self._settings = torch.zeros(slots, SETTINGS, device=device)
        self._seen_SV = torch.zeros(slots, ids, dtype=torch.int32, device=device)
        self._bias_SV = torch.zeros(slots, ids, device=device)
        self._uniform_SU = torch.zeros(slots, UNIFORM, device=device)
        self._drawn_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self._ids_SB = torch.zeros(slots, BURST, dtype=torch.int32, device=device)
        self._rows: dict[int, _Row] = {}
        self._graphs: dict[int, _Graph] = {}

    def join(self, slot: int, request: Request) -> None:
        sampling = request.sampling
        row = _Row(request, bias_V=bias_row(sampling, self._ids))
        biased = row.bias_V is not None or request.matcher is not None
        self._rows[slot] = row
        self._upload(self._settings[slot], settings_row(sampling, biased=biased))
        self._send_uniform(slot, row)
        if sampling.penalises:
            self._upload(self._seen_SV[slot], seen_tokens(request.ids, self._ids))
        if row.bias_V is not None:
            self._upload(self._bias_SV[slot], row.bias_V)

    def begin(self, slot: int, *, token: int, length: int) -> None:
        self._decoder.tokens_S[slot].fill_(token)
        self._decoder.lengths_S[slot].fill_(length)

    def leave(self, slot: int) -> None:
        del self._rows[slot]

    def start(self, slots: Sequence[int]) -> Drawn:
        rows = [self._rows[slot] for slot in slots]
        watched = any(row.request.log_probs is not None or row.request.matcher for row in rows)
        # Who has just come sees its first token soon.
        steps = 1 if watched or any(row.drawn == 0 for row in rows) else BURST
        for slot, row in zip(slots, rows, strict=True):
            if row.drawn + steps > row.uniform + UNIFORM:
                self._send_uniform(slot, row)
            if row.request.matcher is not None:
                self._send_mask(slot, row)
        graph = self._graph_for(len(slots))
        graph.place(slots)
        for _ in range(steps):
            graph.replay()
        firsts = [row.drawn - row.uniform for row in rows]
        ids_SB = torch.empty(self._ids_SB.shape, dtype=torch.int32, pin_memory=True)
        ids_SB.copy_(self._ids_SB, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        burst = _Burst(
            steps, list(zip(slots, firsts, strict=True)), ids_SB, ready, [[]] * len(rows)
        )
        for row in rows:
            row.drawn += steps
        if watched:
            burst.chances = self._probabilities(rows, burst.ids(), graph.logits_RV)
        return burst

    def _probabilities(
        self, rows: Sequence[_Row], ids: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> list[list[TokenProbability]]:
        """The probabilities of the requests that ask for them."""
        chances = []
        for row, (id,), logits_V in zip(rows, ids, logits_RV, strict=False):
            wanted = row.request.log_probs
            known = wanted is not None and id >= 0
            chances.append([probability(logits_V[: self._ids], id, wanted or 0)] if known else [])
        return chances

    def _send_uniform(self, slot: int, row: _Row) -> None:
        """Upload the uniform numbers from the next token on."""
        end = min(row.drawn + UNIFORM, row.request.tokens)
        numbers = uniform_numbers(row.request.sampling.seed, row.request.sample, max(end, 1))
        self._upload(self._uniform_SU[slot, : end - row.drawn], numbers[row.drawn : end])
        row.uniform = row.drawn
        self._drawn_S[slot].zero_()

    def _send_mask(self, slot: int, row: _Row) -> None:
        """Upload what may come next as a bias."""
        assert row.request.matcher is not None
        mask_V = torch.zeros(self._ids) if row.bias_V is None else row.bias_V.clone()
        mask_V.masked_fill_(~row.request.allowed_ids(), -torch.inf)
        self._upload(self._bias_SV[slot], mask_V)

    def _upload(self, target: torch.Tensor, values: torch.Tensor) -> None:
        # From pinned memory: a copy from any other waits for what the GPU computes.
        target.copy_(values.to(target.dtype).pin_memory(), non_blocking=True)

    def _graph_for(self, rows: int) -> _Graph:
        """The graph with the next size."""
        size = min(_graph_size(rows), self._decoder.slots)
        if size not in self._graphs:
            self._graphs[size] = _Graph(size, self)
        return self._graphs[size]

    def compute(self, slots_R: torch.Tensor) -> torch.Tensor:
        """One step, on the device alone; its logits."""
        decoder = self._decoder
        logits_RV = decoder.next_logits(slots_R)
        draw_rows(
            logits_RV,
            self._settings,
            seen_SV=self._seen_SV,
            bias_SV=self._bias_SV,
            uniform_SU=self._uniform_SU,
            slots_R=slots_R,
            tokens_S=decoder.tokens_S,
            lengths_S=decoder.lengths_S,
            drawn_S=self._drawn_S,
            ids_SB=self._ids_SB,
            capacity=decoder.capacity,
        )
        return logits_RV

    @property
    def spare(self) -> int:
        """The slot that nobody has."""
        return self._decoder.slots


class _Graph:
    """A step for a number of rows."""

    def __init__(self, rows: int, steps: GraphSteps) -> None:
        self._rows, self._spare = rows, steps.spare
        self._placed: list[int] | None = None
        device = steps._decoder.device
        self.slots_R = torch.full((rows,), self._spare, dtype=torch.int32, device=device)

        def compute() -> None:
            self.logits_RV = steps.compute(self.slots_R)

        self._graph = captured(compute, device)

    def place(self, slots: Sequence[int]) -> None:
        """Give every row a slot."""
        placed = [*slots, *[self._spare] * (self._rows - len(slots))]
        if placed != self._placed:
            content = torch.tensor(placed, dtype=torch.int32).pin_memory()
            self.slots_R.copy_(content, non_blocking=True)
            self._placed = placed

    def replay(self) -> None:
        self._graph.replay()


def _graph_size(rows: int) -> int:
    """1, 2, 4, 8, 16, and multiples of 16 from there on."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


def settings_row(sampling: Sampling, *, biased: bool) -> torch.Tensor:
    """The settings of a request as the kernel reads them."""
    return torch.tensor(
        [
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.penalises + 2 * biased,
        ]
    )
