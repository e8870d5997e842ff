"""The decentralized strategy: training steps of workers with weights of their own.

A worker's own step is that of `Spmd`, on the processes of the worker. Around it, weights rather
than gradients are exchanged with other workers (see `outer.py`), while training continues:

    step t       forward, backward, update              x(t)
                 start the exchange of x(t)             in a thread, on a separate stream
    step t + 1   forward and backward at x(t)           at the same time
                 finish it: x <- exchanged
                 update                                 x(t+1) = Mix[x(t)] - update(g at x(t))
                 start the exchange of x(t+1)

With a longer `delay` the result comes later, and the updates that the worker has made in the
meantime are added to it. A worker waits only for the others in its group of this round. Overflow,
norm and clipping are decided within a worker, over its whole model.

The model of the run is the average of all workers: it is evaluated, sampled, saved and exported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.base.units import Progress
from gristmill.config.parallel import ExchangeConfig, GossipConfig, ParallelConfig
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.distributed.control import ControlGroup
from gristmill.models.spec import CausalLM
from gristmill.optim.schedule import build_schedule
from gristmill.optim.spec import Optimizer, Placement, StateEntry
from gristmill.strategies.decentralized.outer import Buckets, Exchange, FlatLayout
from gristmill.strategies.decentralized.workers import StopAgreement, WorkerSet
from gristmill.strategies.sharding import ShardedParameters, gather_model
from gristmill.strategies.spmd import Spmd
from gristmill.strategies.step import divide_batches
from gristmill.strategies.strategy import REQUEST, ExchangeReport, StepLimits, StepResult

WEIGHTS, RESULT, SENT, LOSS_SCALE = "weights", "result", "sent", "loss_scale"
"""Kinds of state, besides those of the exchange. Result: of an exchange that is not applied yet."""

Mixing = Callable[[Progress], float]
"""How far a worker moves towards the result of an exchange, at a progress of the run."""


def build_mixing(config: RunConfig, resolved: Resolved | None) -> Mixing:
    """The mixing factor over a run."""
    gossip = config.parallel.gossip or GossipConfig()
    factor, power = gossip.mixing, gossip.mixing_power
    if power is None:
        return lambda progress: factor
    assert resolved is not None, "a factor that follows the learning rate needs the run's numbers"
    schedule, since = build_schedule(config, resolved), gossip.mixing_from
    start = schedule.warmup if since is None else resolved.samples_of(since)
    base = schedule.rate(Progress(samples=start))

    def follow(progress: Progress) -> float:
        if progress.samples < start or not base:
            return factor
        return factor * min(1.0, schedule.rate(progress) / base) ** power

    return follow


@dataclass
class _PendingExchange:
    """An exchange from its start until its result is applied."""

    due: int
    """The step before whose update the result is applied."""
    sent: Buckets
    """The weights that this worker contributed."""
    future: Future[tuple[Buckets, int]] | None = None
    result: Buckets | None = None
    bytes: int = 0
    """Bytes sent by this process for it."""
    ready: torch.cuda.Event | None = None


class Decentralized:
    """Runs the steps of one worker, and its exchanges with others."""

    def __init__(
        self,
        config: ParallelConfig,
        *,
        inner: Spmd,
        workers: WorkerSet,
        slots: int,
        control: ControlGroup,
        agreement: StopAgreement,
        mixing: Mixing,
        seed: int,
    ) -> None:
        self.inner, self.workers, self.control, self.agreement = inner, workers, control, agreement
        self.slots = slots
        """Workers of the whole run, some of which may be absent."""
        self.every = config.exchange_every
        settings = config.exchange or ExchangeConfig()
        self.delay, self.keeps_average = settings.delay, settings.average == "keep"
        self.mixing = mixing
        self.layout = FlatLayout(inner.parameters)
        self.exchange = Exchange(config, workers, self.layout, seed=seed)
        self.distance: float | None = None
        self.compiled = None
        self._rounds = 0
        self._sent_bytes = 0
        self._before = Progress()
        self._pending: _PendingExchange | None = None
        self._error: Exception | None = None
        """The error of an exchange, kept until the step is complete."""
        self._own: Buckets | None = None
        """This worker's weights while the parameters hold the average."""
        self._agreed = False
        """Whether all workers hold the average, after an evaluation that no step has followed."""
        self._loaded: set[str] = set()
        device = inner.world.device.torch_device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._started = False

    # ------------------------------------------------------------------ the interface of strategies

    @property
    def model(self) -> CausalLM:
        return self.inner.model

    @property
    def parameters(self) -> ShardedParameters:
        return self.inner.parameters

    @property
    def optimizer(self) -> Optimizer:
        return self.inner.optimizer

    @property
    def tensors(self) -> Decentralized:
        return self

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult:
        if self._error is not None:
            raise self._error
        if self.workers.interrupt is not None:
            self.workers.interrupt()
        if not self._started:
            self._started = True
            self.agreement.start(progress.steps + 1)
        self._before, self._agreed = progress, False
        result = self.inner.accumulate(batches, progress)
        return dataclasses.replace(
            result,
            samples=result.samples * self.slots,
            tokens=result.tokens * self.slots,
        )

    def update(
        self, result: StepResult, *, signals: int = 0, limits: StepLimits | None = None
    ) -> StepResult:
        """Finish the exchange that is due, take the worker's step, start the next exchange."""
        before, step = self._before, self._before.steps + 1
        waited = self._use_result() if self._pending and self._pending.due <= step else 0.0
        result = self.inner.update(result, limits=limits)
        after, stop_step = before.after(samples=result.samples, tokens=result.tokens), None
        try:
            if self.every.due(before, after):
                if self._pending is not None:
                    waited += self._use_result()
                self._start(step)
                if self.delay == 0:
                    waited += self._use_result()
            stop_step = self.agreement.after_step(step, asked=signals % REQUEST > 0)
        except Exception as error:
            # The step is complete and counts; the error is raised in the next one.
            self._error = error
        inner_wait = result.waited
        return dataclasses.replace(
            result,
            stop_step=stop_step,
            waited=lambda: waited + (inner_wait() if inner_wait is not None else 0.0),
            exchange=ExchangeReport(self._sent_bytes, self.mixing(before)),
        )

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss of the average of all workers, which share the work."""
        share = divide_batches(batches, rank=self.workers.index, ranks=self.workers.count)
        if self._agreed:
            # Averaged again, equal weights would be rounded.
            return self.inner.evaluate(share)
        if self.keeps_average and self._pending is not None:
            # An outer step moves the average, so it must not be lost.
            self._use_result()
        with self.published_weights():
            loss = self.inner.evaluate(share)
            if self.keeps_average:
                self._own, self._agreed = self.layout.read(), True
            return loss

    @contextlib.contextmanager
    def published_weights(self) -> Iterator[None]:
        """Replace the weights of all workers by their average."""
        if self._own is not None:
            yield
            return
        self._settle()
        own = self.layout.read()
        average = self.exchange.average([one.clone() for one in own])
        self.distance = self._distance(own, average)
        self.layout.write(average)
        self.inner.weights_changed()
        self._own = own
        try:
            yield
        finally:
            assert self._own is not None
            self.layout.write(self._own)
            self.inner.weights_changed()
            self._own = None

    def gather_full_model(self) -> CausalLM | None:
        with self.published_weights():
            first = self.workers.index == 0
            shards = self.inner.parameters if first else {}
            return gather_model(self.model, shards, self.inner.world, self.control)

    def weights_changed(self) -> None:
        """Restart all exchanges after new weights were loaded."""
        self.inner.weights_changed()
        self._pending, self._agreed = None, False
        self.exchange.restart()

    def close(self) -> None:
        if self._error is not None:
            raise self._error
        self._settle()
        self.agreement.close()

    def enter(self, workers: WorkerSet, control: ControlGroup, agreement: StopAgreement) -> None:
        """Continue with other workers; unfinished exchanges with the old ones are dropped."""
        if self._pending is not None and self._pending.future is not None:
            # The exchange ends soon, in success or failure, and changes the outer state until then.
            wait([self._pending.future])
        self.workers, self.control, self.agreement = workers, control, agreement
        self.inner.control, self._agreed = control, False
        self.inner.sync.clear()
        self.exchange.enter(workers)
        self._pending, self._started, self._error = None, False, None

    def catch_up(self, *, counts: bool, rounds: int) -> None:
        """Give joining workers, whose own weights do not `count`, the average of the others."""
        self.exchange.catch_up(counts=counts)
        self._rounds = rounds
        self.inner.weights_changed()

    # ------------------------------------------------------------------ exchanges

    def _start(self, step: int) -> None:
        """Start an exchange of the current weights."""
        weights = self.layout.read()
        pending = _PendingExchange(due=step + self.delay, sent=weights)
        round, self._rounds = self._rounds, self._rounds + 1
        begun = None
        if self._stream is not None:
            begun = torch.cuda.current_stream().record_event()
            pending.ready = torch.cuda.Event()
        pending.future = self._thread.submit(self._run, pending, round, begun)
        self._pending = pending

    def _run(
        self, pending: _PendingExchange, round: int, begun: torch.cuda.Event | None
    ) -> tuple[Buckets, int]:
        """The exchange, in its thread; on a GPU, on its stream."""
        if self._stream is None or begun is None:
            return self.exchange.run(pending.sent, round=round)
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(begun)
            done = self.exchange.run(pending.sent, round=round)
            assert pending.ready is not None
            pending.ready.record(self._stream)
            return done

    def _settle(self) -> float:
        """Wait until no exchange is running; returns the seconds that this took."""
        pending = self._pending
        if pending is None or pending.future is None:
            return 0.0
        started = time.monotonic()
        pending.result, pending.bytes = pending.future.result()
        pending.future = None
        if pending.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(pending.ready)
            for one in (*pending.result, *self._state_tensors()):
                one.record_stream(stream)
        return time.monotonic() - started

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for buckets in self.exchange.state.named().values():
            yield from buckets

    @torch.no_grad()
    def _use_result(self) -> float:
        """Apply the result of the exchange; returns the seconds waited for it."""
        waited, pending = self._settle(), self._pending
        assert pending is not None and pending.result is not None
        factor, unchanged = self.mixing(self._before), self.delay <= 1
        if unchanged and factor == 1.0:
            self.layout.write(pending.result)
        else:
            differences = zip(pending.result, pending.sent, strict=True)
            self.layout.add([factor * (after - sent) for after, sent in differences])
        self._sent_bytes += pending.bytes
        self._pending = None
        return waited

    def _distance(self, own: Buckets, average: Buckets) -> float:
        """The root mean square distance of workers to their average, relative to its norm."""
        differences = [one - other for one, other in zip(own, average, strict=True)]
        mine = [self.layout.owned_squares(held) for held in (differences, average)]
        apart, whole = (sum(column) for column in zip(*self.control.all_gather(mine), strict=True))
        return float((apart / whole) ** 0.5) if whole else 0.0

    # ------------------------------------------------------------------ checkpoints

    @property
    def placements(self) -> Mapping[str, Placement]:
        kinds = (WEIGHTS, RESULT, SENT, *self.exchange.state.named())
        return {**dict.fromkeys(kinds, Placement.SHARDED), LOSS_SCALE: Placement.REPLICATED}

    def entries(self) -> Iterator[StateEntry]:
        """This worker's own weights, and the state of its exchanges."""
        assert self._pending is None or self._pending.future is None, "an exchange is under way"
        held = {WEIGHTS: self.layout.read() if self._own is None else self._own}
        if self._pending is not None and self._pending.result is not None:
            held[RESULT] = self._pending.result
            if self.delay > 1:
                held[SENT] = self._pending.sent
        held |= self.exchange.state.named()
        for kind, buckets in held.items():
            for name, view in self.layout.views(buckets).items():
                yield StateEntry(kind, name, view)
        scale = self.inner.loss_scale
        if scale is not None and self.inner.world.at["pp"] == 0:
            values = torch.tensor(list(scale.state().values()), dtype=torch.float64)
            yield StateEntry(LOSS_SCALE, "numbers", values)

    def expects(self, kind: str, key: str) -> bool:
        if kind == LOSS_SCALE:
            return self.inner.loss_scale is not None
        return kind in self.placements and key in self.layout.parameters

    def load_entry(self, entry: StateEntry) -> None:
        kind, key, value = entry
        self._loaded.add(kind)
        if kind == LOSS_SCALE:
            scale = self.inner.loss_scale
            assert scale is not None
            scale.load(dict(zip(scale.state(), value.tolist(), strict=True)))
        elif kind == WEIGHTS:
            self.layout.parameters[key].local.detach().copy_(value)
        elif kind in (RESULT, SENT):
            self._restored(kind)[key].copy_(value)
        else:
            self.exchange.views()[kind][key].copy_(value)

    def _restored(self, kind: str) -> dict[str, torch.Tensor]:
        """The buffers of an exchange whose result was saved before it was applied."""
        if self._pending is None:
            self._pending = _PendingExchange(
                due=0, sent=self.layout.zeros(), result=self.layout.zeros()
            )
        result = self._pending.result
        assert result is not None
        return self.layout.views(result if kind == RESULT else self._pending.sent)

    def state(self) -> dict[str, Any]:
        self._settle()
        due, unused = (
            (None, 0) if self._pending is None else (self._pending.due, self._pending.bytes)
        )
        resolved = {"rounds": self._rounds, "sent_bytes": self._sent_bytes, "unused_bytes": unused}
        return {**resolved, "due": due}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the workers' own weights if they were loaded, else from the average, which
        the parameters hold."""
        loaded, self._loaded = self._loaded, set()
        names = ("rounds", "sent_bytes", "unused_bytes")
        resolved = {name: state.get(name, 0) for name in names}
        for name, value in resolved.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}")
        self._rounds, self._sent_bytes = resolved["rounds"], resolved["sent_bytes"]
        self.inner.weights_changed()
        if WEIGHTS not in loaded:
            self.weights_changed()
            return
        due = state.get("due")
        if RESULT not in loaded:
            self._pending = None
        elif type(due) is not int or self._pending is None:
            raise ValueError(f"an exchange was saved whose result is due at step {due!r}")
        else:
            self._pending.due, self._pending.bytes = due, resolved["unused_bytes"]
            if SENT not in loaded:
                self._pending.sent = self.layout.read()
        if self.exchange.state.anchor and "anchor" not in loaded:
            self.exchange.state.anchor = self.layout.read()
