"""Training steps on XLA devices.

One process drives all devices of its host, which hold weights and optimizer state as JAX arrays.
The model and the optimizer that the rest of the program sees are on the host, and are synchronized
with the devices only when needed: at the start, for checkpoints, and for samples.

    accumulate          puts the micro-batches on the devices
    update              dispatches the whole step, one compiled function, and does not wait for it
    published_weights   copies weights and optimizer state to the host, to be saved
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import jax
import numpy as np
import torch

from gristmill.base.errors import UserError
from gristmill.base.units import Progress, format_seconds
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World
from gristmill.models.build import build_meta_model, initialise, materialise
from gristmill.models.spec import CausalLM, Execution
from gristmill.optim.build import build_optimizer
from gristmill.optim.spec import ParameterOptimizer
from gristmill.strategies.precision import DTYPES
from gristmill.strategies.sharding import ShardedParameter, whole_parameters
from gristmill.strategies.step import divide_batches, pad_batch, step_seed
from gristmill.strategies.strategy import CompiledStep, StepLimits, StepResult
from gristmill.strategies.xla.device import Placing, XlaDevice
from gristmill.strategies.xla.step import CHANGING, Batches, Controls, Programs, State, Weights

_INPUTS = ("tokens_BT", "targets_BT", "loss_weights_BT", "positions_BT", "documents_BT")
Form = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the arrays of a step's batches."""


class Xla:
    """Runs training steps of one model on all XLA devices."""

    tensors = None
    distance = None

    def __init__(
        self,
        config: RunConfig,
        *,
        model: CausalLM,
        meta_model: CausalLM,
        world: World,
        control: ControlGroup,
    ) -> None:
        """`model` is on the host, `meta_model` the same model on the meta device."""
        assert isinstance(world.device, XlaDevice)
        self.model, self.world, self.control, self.device = model, world, control, world.device
        self.parameters = _shared_out(model, world)
        optimizer = build_optimizer(
            config.optim, model, parameters=dict(model.named_parameters()), compiled=False
        )
        assert isinstance(optimizer, ParameterOptimizer)
        self.optimizer = optimizer
        self.seed, self.drops = config.train.seed, config.model.drops
        self.placing = Placing(world.layout, meta_model)
        self.programs = Programs(config, meta_model, self.placing)
        self.compiled = CompiledStep()
        self._steps: dict[Form, Any] = {}
        self._evaluations: dict[Form, Any] = {}
        self._weights: Weights | None = None
        """The weights on the devices; None, like the state, if those on the host are newer."""
        self._state: State | None = None
        self._buffers: Weights = {}
        self._on_host = {"weights": True, "state": True}
        """Whether the host holds the same values as the devices."""
        self._batches: tuple[Batches, float, Progress] | None = None

    # -------------------------------------------------------------- steps

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult:
        """Put the batches on the devices. The loss is known after the update."""
        ranks = self.world.mesh.data
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        if any(batch.loss_weights_BT is not None for batch in batches):
            loss_tokens = sum(self.control.all_gather(loss_tokens))
        else:
            loss_tokens *= ranks
        stacked = _stacked(batches)
        arrays = {
            name: self.placing.put_local(value, self.placing.micro_batches)
            for name, value in stacked.items()
        }
        self._batches = (arrays, max(loss_tokens, 1.0), progress)
        return StepResult(
            samples=ranks * sum(batch.samples for batch in batches),
            tokens=ranks * sum(batch.tokens for batch in batches),
            loss=torch.full((), torch.nan),
        )

    def update(
        self, result: StepResult, *, signals: int = 0, limits: StepLimits | None = None
    ) -> StepResult:
        """Dispatch the step."""
        assert self._batches is not None, "called after accumulate"
        (batches, loss_tokens, progress), self._batches = self._batches, None
        weights, state = self._placed()
        controls = self._controls(loss_tokens, progress, signals=signals, limits=limits)
        step, notes = self._compiled_step(weights, state, batches, controls)
        self._weights, self._state, scalars = step(weights, state, self._buffers, batches, controls)
        self._on_host = {"weights": False, "state": False}
        loss, norm, skipped, signalled = self.device.expect(scalars)
        return dataclasses.replace(
            result, loss=loss, grad_norm=norm, skipped=skipped, signals=signalled, notes=notes
        )

    def _controls(
        self, loss_tokens: float, progress: Progress, *, signals: int, limits: StepLimits | None
    ) -> Controls:
        def scalar(value: float) -> Any:
            return np.float32(value)

        seed = step_seed(self.seed, progress.steps, ()) if self.drops else 0
        words: Any = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
        ceilings: Any = np.array(limits or (np.inf, np.inf), np.float32)
        local = np.full(jax.local_device_count(), signals / jax.local_device_count(), np.float32)
        return Controls(
            settings=[
                {name: scalar(group[name]) for name in CHANGING if name in group}
                for group in self.optimizer.param_groups
            ],
            loss_tokens=scalar(loss_tokens),
            limits=ceilings,
            key=jax.random.wrap_key_data(words),
            signals=self.placing.put_local(local, self.placing.per_device),
        )

    def _compiled_step(
        self, weights: Weights, state: State, batches: Batches, controls: Controls
    ) -> tuple[Any, tuple[str, ...]]:
        """The step for batches of this form, and what the log should say about it."""
        form = _form(batches)
        if form in self._steps:
            return self._steps[form], ()
        begun = time.monotonic()
        program = self.programs.step(batches, controls)
        compiled = program.lower(weights, state, self._buffers, batches, controls).compile()
        seconds = time.monotonic() - begun
        before = [dict(step) for step in self._steps]
        self._steps[form] = compiled
        self.compiled = CompiledStep(
            versions=len(self._steps),
            seconds=self.compiled.seconds + seconds,
            flops=_flops(compiled),
        )
        why = _difference(dict(form), before[-1]) if before else "the first one"
        shape = " x ".join(map(str, dict(form)["tokens_BT"]))
        return compiled, (
            f"compiled the step for {shape} tokens in {format_seconds(seconds)} ({why})",
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the counted tokens of all batches."""
        weights, _ = self._placed(state=False)
        total, loss_tokens, largest = 0.0, 0.0, 0
        for batch in divide_batches(batches, rank=self.world.rank, ranks=self.world.mesh.data):
            loss_tokens += batch.loss_tokens
            # A smaller last batch would be another form, which would be compiled for itself; and
            # all devices have as many samples.
            shards = self.world.data_shards_here
            largest = max(largest, -(-batch.samples // shards) * shards)
            whole = pad_batch(batch, batch.samples, largest)
            arrays = {
                name: self.placing.put_local(value[0], self.placing.micro_batch)
                for name, value in _stacked([whole]).items()
            }
            form = _form(arrays)
            if form not in self._evaluations:
                program = self.programs.evaluation(arrays)
                self._evaluations[form] = program.lower(weights, self._buffers, arrays).compile()
            total += float(self._evaluations[form](weights, self._buffers, arrays))
        return total / sum(self.control.all_gather(loss_tokens))

    # -------------------------------------------------------------- between host and devices

    def _placed(self, *, state: bool = True) -> tuple[Weights, State]:
        """Weights and state on the devices, copied from the host if that has newer ones."""
        place = self.placing
        if self._weights is None:
            named = self.model.named_parameters()
            self._weights = {name: place.put(one, place.weights[name]) for name, one in named}
            self._buffers = {
                name: place.put(one, place.replicated) for name, one in self.model.named_buffers()
            }
        if self._state is None and state:
            held = {(entry.kind, entry.key): entry.value for entry in self.optimizer.entries()}
            shardings = self.programs.state_shardings()
            self._state = {}
            for key, shape in self.programs.state_shapes.items():
                # State of a different structure belongs to other settings, and is initialised anew.
                fits = key in held and tuple(held[key].shape) == shape
                new = place.put(held[key], shardings[key]) if fits else None
                self._state[key] = place.zeros(shape, shardings[key]) if new is None else new
        return self._weights, self._state or {}

    def _fetch_weights(self) -> None:
        """Give the model on the host the weights of the devices."""
        if self._on_host["weights"]:
            return
        assert self._weights is not None
        with torch.no_grad():
            for name, value in self.placing.on_host(self._weights).items():
                self.model.get_parameter(name).copy_(value)
        self._on_host["weights"] = True

    def _fetch_state(self) -> None:
        if self._on_host["state"]:
            return
        assert self._state is not None
        for (kind, name), value in self.placing.on_host(self._state).items():
            self.optimizer.state[self.optimizer.parameters[name]][kind] = value
        self._on_host["state"] = True

    @contextlib.contextmanager
    def published_weights(self) -> Iterator[None]:
        """All devices have the same model; it is copied to the host."""
        self._fetch_weights()
        self._fetch_state()
        yield

    def gather_full_model(self) -> CausalLM | None:
        self._fetch_weights()
        return self.model if self.world.is_rank0 else None

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        self.weights_changed()

    def weights_changed(self) -> None:
        self._weights = self._state = None
        self._on_host = {"weights": True, "state": True}

    def close(self) -> None:
        """Nothing to close: all processes end after the same step."""


def build_xla(config: RunConfig, *, vocab: int, world: World, control: ControlGroup) -> Xla:
    """The strategy of a run on XLA devices, with initial weights."""
    hosts, data = world.mesh.processes, world.layout.data
    if data % hosts:
        raise UserError(
            f"dp_replicate x dp_shard = {data} is not a multiple of the {hosts} hosts, each of "
            "which reads its own part of the batch",
            where="parallel",
            remedy="let tp divide the devices of one host only",
        )
    execution = Execution(DTYPES[config.precision.compute])
    host, meta_model = (
        build_meta_model(config.model, vocab=vocab, execution=execution, pad_for=world.layout.tp)
        for _ in range(2)
    )
    names = [name for name, _ in host.named_parameters()]
    materialise(host, world.device.torch_device)
    host.tie()
    host.reset_buffers()
    initialise(host, config.train.seed, names)
    return Xla(config, model=host, meta_model=meta_model, world=world, control=control)


def _shared_out(model: CausalLM, world: World) -> dict[str, ShardedParameter]:
    """Every process has all parameters on its host, and saves a part of them."""
    processes = world.mesh.processes
    return {
        name: dataclasses.replace(held, owned=crc32(name.encode()) % processes == world.rank)
        for name, held in whole_parameters(model).items()
    }


def _stacked(batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """The micro-batches of a step, stacked in one array for each of their inputs."""
    found = {}
    for name in _INPUTS:
        parts = [getattr(batch, name) for batch in batches]
        if any(part is not None for part in parts):
            stacked = torch.stack(parts)
            whole = stacked.float() if stacked.is_floating_point() else stacked.int()
            found[name] = whole.numpy()
    return found


def _form(arrays: Mapping[str, jax.Array]) -> Form:
    return tuple((name, tuple(array.shape)) for name, array in arrays.items())


def _difference(form: Mapping[str, tuple[int, ...]], before: Mapping[str, tuple[int, ...]]) -> str:
    """A message why the step for these arrays differs from the one before."""
    changed = [
        f"{name} was {before.get(name, 'not there')} and is {form.get(name, 'not there')}"
        for name in {**before, **form}
        if before.get(name) != form.get(name)
    ]
    return "; ".join(changed)


def _flops(compiled: Any) -> float | None:
    """The floating-point operations of a step on one device, as XLA counts them."""
    analysis = compiled.cost_analysis()
    found = analysis[0] if isinstance(analysis, list) else analysis or {}
    return found.get("flops")
