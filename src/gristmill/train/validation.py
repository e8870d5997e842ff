"""The validation hook: the loss on the main validation text, and on further sets by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.base.units import Duration
from gristmill.checkpoint.layout import Best
from gristmill.checkpoint.state import TrainState
from gristmill.data.loader import Batch
from gristmill.strategies.strategy import Strategy
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.train.meter import StepEvent
from gristmill.train.tracker import Tracker

Batches = Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class _Measured:
    """The loss on some windows."""

    loss: float
    windows: int
    bits_per_byte: float | None

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 700.0)),
            "windows": self.windows,
            "bits_per_byte": self.bits_per_byte,
        }


class Validate:
    """Measures the loss on a fixed set of validation windows and, if configured, on training
    windows and further sets. The best loss is that of the validation windows."""

    phase = "validation"

    def __init__(
        self,
        every: Duration,
        *,
        strategy: Strategy,
        batches: Batches,
        train_batches: Batches | None,
        sets: Mapping[str, Batches],
        tokenizer: Tokenizer,
        tracker: Tracker,
        state: TrainState,
    ) -> None:
        self.every, self.strategy, self.batches = every, strategy, batches
        self.train_batches, self.sets = train_batches, sets
        self.tracker, self.state = tracker, state
        lengths = [len(tokenizer.token_bytes(id)) for id in range(tokenizer.size)]
        self._bytes_of = torch.tensor(lengths)
        self._done_at: int | None = None

    def at_start(self) -> None:
        self._measure()

    def due(self, event: StepEvent) -> bool:
        return self.every.due(event.before, event.after)

    def act(self, event: StepEvent) -> None:
        self._measure()

    def at_end(self, *, finished: bool) -> None:
        if finished and self._done_at != self.state.progress.steps:
            self._measure()

    def skip_end(self) -> None:
        """Note that the current step was already measured."""
        self._done_at = self.state.progress.steps

    def _measure(self) -> None:
        started = time.monotonic()
        main, distance = self._measured(self.batches), self.strategy.distance
        seconds = time.monotonic() - started
        known = None
        if self.train_batches is not None:
            known = self.strategy.evaluate(self.train_batches())
        sets = {name: self._measured(batches).facts for name, batches in self.sets.items()}
        step = self._done_at = self.state.progress.steps
        best, loss = self.state.best, main.loss
        better = step > 0 and math.isfinite(loss) and (best is None or loss < best.loss)
        if better:
            self.state.best = Best(step, loss)
        self.tracker.validation(
            **main.facts,
            seconds=seconds,
            best=better,
            train_loss=known,
            consensus_distance=distance,
            sets=sets or None,
        )

    def _measured(self, batches: Batches) -> _Measured:
        windows, tokens, text_bytes = 0, 0.0, 0.0

        def noted_batches() -> Iterator[Batch]:
            nonlocal windows, tokens, text_bytes
            for batch in batches():
                windows, tokens = windows + batch.samples, tokens + batch.loss_tokens
                text_bytes += self._bytes(batch)
                yield batch

        loss = self.strategy.evaluate(noted_batches())
        bits = loss * tokens / math.log(2) / text_bytes if text_bytes else None
        return _Measured(loss, windows, bits)

    def _bytes(self, batch: Batch) -> float:
        """The bytes of the counted targets."""
        bytes_BT = self._bytes_of[batch.targets_BT]
        loss_weights_BT = batch.loss_weights_BT
        return float((bytes_BT if loss_weights_BT is None else bytes_BT * loss_weights_BT).sum())
