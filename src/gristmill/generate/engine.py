"""Continues sequences of ids with one model, several at once.

    submit(request) -> Generation      waits until a slot is free
    step()                             admits, computes part of a prompt, decodes; what is new
    cancel(generation)                 its slot is free at once

A request has a slot from its admission to its end; memory for all slots is allocated once. Between
two steps requests come and go, and none of it changes the ids of another: see `models/decoding.py`
for the logits and `sampling.py` for the draw.

What a prompt has in common with what some slot holds is copied from there, as far as computing it
again would give the very same bits: up to a multiple of the decoder's grain.

A request that `slides` goes on when the context is full: the older half of the window is dropped
and the rest computed anew.

    window   the last `context` ids: what the model sees; when full, its older half is dropped

The window depends on positions only. So decoding sees the same ids with and without a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gristmill.generate.request import Generation, Request
from gristmill.generate.sampling import NOT_FINITE, Sampling
from gristmill.generate.steps import Drawn, HostSteps, Steps
from gristmill.models.build import build_decoder
from gristmill.models.decoding import Decoder, PromptPart
from gristmill.models.spec import CausalLM


@dataclass
class _Slot:
    """A place for one sequence in the decoder's memory."""

    number: int
    generation: Generation | None = None
    window: int = 0
    """Where the window begins in the sequence's ids."""
    filled: int = 0
    """Positions that the decoder holds, those included that it is about to compute."""
    started: int = 0
    """Tokens whose computation was started."""
    in_flight: int = 0
    """Started steps that have not been read."""
    decoding: bool = False
    """Whether the prompt is computed."""
    prompt: list[int] = field(default_factory=list)
    """Ids, from its first position on, whose keys and values others may copy; also when it is
    free."""
    used: int = 0
    """When it was last taken."""

    @property
    def ids(self) -> list[int]:
        """What the model sees."""
        assert self.generation is not None
        return [*self.generation.request.ids, *self.generation.ids][self.window :]


@dataclass(frozen=True)
class _Started:
    """A step that is being computed."""

    drawn: Drawn
    rows: list[tuple[_Slot, Generation, int]]
    """Its rows, and how many of the tokens drawn for each count."""


class Engine:
    """Continues sequences of ids with one model."""

    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int = 1,
        capacity: int | None = None,
        ids: int | None = None,
        dtype: torch.dtype | None = None,
        cached: bool = True,
    ) -> None:
        """`slots` sequences at once, each of up to `capacity` ids (the context if not given). `ids`
        limits what can be drawn, for a model with more ids than its tokenizer. `dtype` is that of
        weights and activations; as the model computes if not given."""
        context = model.config.context
        self.model, self.capacity = model, min(capacity or context, context)
        self.decoder = build_decoder(
            model,
            slots=slots,
            capacity=self.capacity,
            dtype=dtype or model.compute,
            cached=cached,
        )
        self._steps = _build_steps(self.decoder, ids or model.vocab)
        self._slots = [_Slot(number) for number in range(slots)]
        self._waiting = deque[Generation]()
        self._started = deque[_Started]()
        self._clock = 0

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> Generation:
        """Put a request behind those that wait."""
        assert request.ids and request.tokens > 0, "the caller has something to ask"
        assert request.slides or len(request.ids) <= self.capacity, "the caller refuses longer ones"
        generation = Generation(request)
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a request, whether it has begun or not."""
        if generation.finish is None:
            generation.finish = "cancelled"
            if generation in self._waiting:
                self._waiting.remove(generation)
            for slot in self._slots:
                if slot.generation is generation:
                    self._free(slot)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._started) or self.active > 0

    @property
    def active(self) -> int:
        """Slots that are taken."""
        return sum(slot.generation is not None for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int,
        sampling: Sampling,
        ends: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """The continuations of prompts, also beyond the context."""
        generations = [
            self.submit(Request(list(ids), tokens, sampling, ends=ends, slides=True))
            for ids in prompts
        ]
        while self.busy:
            for generation in self.step():
                generation.require_token()
        return [generation.ids for generation in generations]

    def warm_up(self) -> None:
        """Compute some tokens for nobody: the first ones wait for compilers and for graphs."""
        ids = [0] * min(8, self.capacity - 1)
        generation = self.submit(Request(ids, 2, Sampling(temperature=0)))
        while generation.finish is None:
            self.step()

    # ------------------------------------------------------------------ a step

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Do a part of what there is to do; the requests that have something new."""
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            self._admit()
            self._prefill()
            self._start()
            # A GPU computes a step while the one before it is read.
            ahead = self._steps.ahead if any(map(self._may_start, self._slots)) else 0
            return self._read() if len(self._started) > ahead else []
        finally:
            if was_training:
                self.model.train()

    def _admit(self) -> None:
        """Give free slots to those who wait longest."""
        free = [slot for slot in self._slots if slot.generation is None]
        while self._waiting and free:
            generation = self._waiting.popleft()
            ids = generation.request.ids
            window = window_start(len(ids), self.capacity)
            slot = self._with_prefix(list(ids[window:-1]), free)
            free.remove(slot)
            self._clock += 1
            slot.generation, slot.window, slot.used = generation, window, self._clock
            slot.started, slot.decoding, generation.shared = 0, False, slot.filled
            self._steps.join(slot.number, generation.request)

    def _with_prefix(self, prompt: list[int], free: list[_Slot]) -> _Slot:
        """A free slot that holds as many chunks of a prompt as are known."""
        shared = {slot.number: self._shared(slot, prompt) for slot in self._slots}
        source = max(self._slots, key=lambda slot: (shared[slot.number], slot in free))
        known = shared[source.number]
        slot = source if known and source in free else min(free, key=lambda slot: slot.used)
        if slot is not source and known:
            self.decoder.copy(source.number, slot.number, known)
        slot.prompt, slot.filled = prompt[:known], known
        return slot

    def _shared(self, slot: _Slot, prompt: list[int]) -> int:
        """Positions of whole chunks that a slot has in common with a prompt."""
        if not self.decoder.copies:
            return 0
        most = min(len(slot.prompt), len(prompt))
        if slot.prompt[:most] == prompt[:most]:
            shared = most
        else:
            shared = next(at for at in range(most) if slot.prompt[at] != prompt[at])
        return shared - shared % self.decoder.grain

    def _prefill(self) -> None:
        """Compute prompts of new requests; while others decode, only a part of them in a step."""
        left, parts = self.decoder.pause, list[PromptPart]()
        for slot in sorted(self._slots, key=lambda slot: slot.used):
            if slot.generation is None:
                continue
            if slot.decoding and self._is_full(slot):
                self._slide(slot)
            while not slot.decoding:
                if left <= 0 and any(other.decoding for other in self._slots):
                    self.decoder.prefill(parts)
                    return
                room = self.decoder.chunk - sum(len(part.ids) for part in parts)
                if parts and room < self._part_length(slot):
                    self.decoder.prefill(parts)
                    parts, room = [], self.decoder.chunk
                parts.append(self._next_part(slot, room))
                left -= len(parts[-1].ids)
                if not self.decoder.joins:
                    self.decoder.prefill(parts)
                    parts = []
        self.decoder.prefill(parts)

    def _part_length(self, slot: _Slot) -> int:
        """Positions that the next part of a prompt needs: with a grain it cannot be cut anywhere
        else."""
        if self.decoder.grain == 1:
            return 1
        return min(self.decoder.chunk, len(slot.ids) - 1 - slot.filled)

    def _next_part(self, slot: _Slot, room: int) -> PromptPart:
        """The next part of a prompt, which is about to be computed. Its last id is the first that
        is decoded."""
        ids, grain = slot.ids, self.decoder.grain
        end = min(slot.filled + room, len(ids) - 1)
        part = PromptPart(slot.number, ids[slot.filled : end], slot.filled)
        slot.prompt, slot.filled = ids[: end - end % grain], end
        if end == len(ids) - 1:
            slot.decoding = True
            self._steps.begin(slot.number, token=ids[-1], length=end)
        return part

    def _is_full(self, slot: _Slot) -> bool:
        """Whether a sequence goes on, but its window does not."""
        generation = slot.generation
        return (
            generation is not None
            and slot.filled >= self.capacity
            and slot.in_flight == 0
            and len(generation.ids) < generation.request.tokens
        )

    def _slide(self, slot: _Slot) -> None:
        """Move the window, and compute it anew."""
        generation = slot.generation
        assert generation is not None and generation.request.slides
        slot.window = window_start(generation.length, self.capacity)
        slot.filled, slot.prompt, slot.decoding = 0, [], False

    def _may_start(self, slot: _Slot) -> bool:
        """Whether the next token can be computed."""
        generation = slot.generation
        return (
            generation is not None
            and slot.decoding
            and slot.started < generation.request.tokens
            and slot.filled < self.capacity
            and not (generation.request.matcher is not None and slot.in_flight)
        )

    def _start(self) -> None:
        """Start a step of all sequences that can go on."""
        slots = [slot for slot in self._slots if self._may_start(slot)]
        if not slots:
            return
        drawn = self._steps.start([slot.number for slot in slots])
        rows = []
        for slot in slots:
            generation = slot.generation
            assert generation is not None
            count = min(
                drawn.steps,
                generation.request.tokens - slot.started,
                self.capacity - slot.filled,
            )
            rows.append((slot, generation, count))
            slot.started, slot.filled = slot.started + count, slot.filled + count
            slot.in_flight += 1
        self._started.append(_Started(drawn, rows))

    def _read(self) -> list[Generation]:
        """What the oldest step has drawn."""
        step = self._started.popleft()
        new = []
        for (slot, generation, count), ids, probabilities in zip(
            step.rows, step.drawn.ids(), step.drawn.probabilities(), strict=True
        ):
            if slot.generation is not generation:
                continue  # ended meanwhile
            slot.in_flight -= 1
            new.append(generation)
            generation.probabilities += probabilities[:count]
            for id in ids[:count]:
                self._append(generation, id)
                if generation.finish is not None:
                    del generation.probabilities[len(generation.ids) :]
                    self._free(slot)
                    break
        return new

    def _append(self, generation: Generation, id: int) -> None:
        request = generation.request
        if id == NOT_FINITE:
            generation.finish = "error"
            return
        generation.ids.append(id)
        if request.matcher is not None and id not in request.ends:
            request.matcher.append(id)
        if id in request.ends:
            generation.finish = "stop"
        elif len(generation.ids) == request.tokens or (
            not request.slides and generation.length > self.capacity
        ):
            generation.finish = "length"

    def _free(self, slot: _Slot) -> None:
        if self.decoder.grain == 1 and slot.decoding:
            # What was generated is worth as much as a prompt. The last id may not be computed.
            slot.prompt = slot.ids[:-1]
        slot.generation, slot.in_flight, slot.decoding = None, 0, False
        self._steps.leave(slot.number)


def _build_steps(decoder: Decoder, ids: int) -> Steps:
    if decoder.runs_in_graphs:
        # Needs Triton.
        from gristmill.generate.graphs import GraphSteps
        from gristmill.models.kernel_decoding import KernelDecoder

        assert isinstance(decoder, KernelDecoder)
        return GraphSteps(decoder, ids)
    return HostSteps(decoder, ids)


def window_start(length: int, context: int) -> int:
    """The first of `length` ids that is in the window."""
    if length <= context:
        return 0
    half = max(1, context // 2)
    return -(-(length - context) // half) * half
