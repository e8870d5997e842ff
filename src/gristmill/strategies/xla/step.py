"""A whole training step as one function for XLA to compile.

    weights         cast to the dtype of the computation, once for all micro-batches
    micro-batches   forward and backward, one after the other in a scan; gradients summed in fp32
    decision        `strategies/step.py`: norm, clipping, skipping
    update          the step of the run's own optimizer

Weights and optimizer state are donated: a step overwrites them. Everything that changes from step
to step is an input (learning rates, limits, the key of dropout), so a step is compiled once for
each set of batch shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.func import functional_call

from gristmill.base.units import Progress
from gristmill.config.schema import RunConfig
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms, training_terms
from gristmill.models.recompute import Recompute
from gristmill.models.spec import CausalLM
from gristmill.optim.build import build_optimizer
from gristmill.optim.spec import ParameterOptimizer
from gristmill.strategies.step import decide
from gristmill.strategies.strategy import StepLimits
from gristmill.strategies.xla.attention import SAVED
from gristmill.strategies.xla.device import Placing
from gristmill.strategies.xla.graph import marked_blocks, meta, replaced, trace
from gristmill.strategies.xla.lower import ALL, Context, Lowered

Weights = dict[str, jax.Array]
State = dict[tuple[str, str], jax.Array]
"""Optimizer state by kind and parameter."""
Batches = dict[str, jax.Array]
"""By the name of the model's argument; micro-batches are the first dimension."""

CHANGING = ("lr", "momentum")
"""Settings of a parameter group that the schedule sets."""


class Controls(NamedTuple):
    """The scalars that change from step to step."""

    settings: list[dict[str, jax.Array]]
    """The settings of each parameter group that change."""
    loss_tokens: jax.Array
    """Counted tokens, at least 1."""
    limits: jax.Array
    """Loss and norm above which the step is skipped."""
    key: jax.Array
    """The key of the random numbers of dropout."""
    signals: jax.Array
    """For every device, whether its process was asked to stop: the values of such a process add up
    to 1."""


class Programs:
    """The functions of a run, before they are compiled."""

    def __init__(self, config: RunConfig, meta_model: CausalLM, placing: Placing) -> None:
        self.config, self.meta_model, self.placing = config, meta_model, placing
        self.buffers = {name: tuple(one.shape) for name, one in meta_model.named_buffers()}
        self.shapes = {
            name: tuple(parameter.shape) for name, parameter in meta_model.named_parameters()
        }
        self.state_shapes = self._state_shapes()
        terms = training_terms(config.train, Progress(), meta(), mtp=False)
        known = terms._replace(scale=None, sampled=None)
        assert known == PLAIN_LOSS, "the loss in JAX (`loss.py`) knows no other terms"
        self._recompute = Recompute(config.train.recompute, config.train.recompute_every or 1)

    # -------------------------------------------------------------- traced

    def _loss(self, batch: Mapping[str, Any], *, training: bool) -> Lowered:
        """The summed loss of a micro-batch like this one."""
        model = self.meta_model
        model.train(training)

        def loss(
            weights: dict[str, Any], buffers: dict[str, Any], batch: dict[str, Any]
        ) -> torch.Tensor:
            tokens = batch["tokens_BT"]
            others = {
                name: value for name, value in batch.items() if name not in ("tokens_BT", *floats)
            }
            others["terms"] = LossTerms(loss_weights_BT=batch.get("loss_weights_BT"))
            return functional_call(model, {**weights, **buffers}, (tokens,), others).total

        floats = ("loss_weights_BT",)
        inputs = {
            name: meta(one.shape, torch.float32 if name in floats else torch.int64)
            for name, one in batch.items()
        }
        weights = {name: meta(shape) for name, shape in self.shapes.items()}
        buffers = {name: meta(shape) for name, shape in self.buffers.items()}
        with marked_blocks(model):
            return Lowered(trace(loss, weights, buffers, inputs))

    def _optimizer(self, weights: Mapping[str, torch.Tensor]) -> ParameterOptimizer:
        parameters = {name: nn.Parameter(value) for name, value in weights.items()}
        optimizer = build_optimizer(
            self.config.optim, self.meta_model, parameters=parameters, compiled=False
        )
        assert isinstance(optimizer, ParameterOptimizer)
        return optimizer

    def _state_shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The shapes of all optimizer state, from a step on the meta device."""
        weights = {name: meta(shape) for name, shape in self.shapes.items()}
        optimizer = self._optimizer(weights)
        with replaced():
            for parameter in optimizer.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(divisor=meta(), skip=meta())
        return {(entry.kind, entry.key): tuple(entry.value.shape) for entry in optimizer.entries()}

    def _update(self, settings: Sequence[Mapping[str, Any]]) -> Lowered:
        """The decision about a step, and the step of the optimizer."""
        clip = self.config.train.clip

        def update(
            weights: dict[str, torch.Tensor],
            gradients: dict[str, torch.Tensor],
            state: dict[tuple[str, str], torch.Tensor],
            settings: list[dict[str, torch.Tensor]],
            loss: torch.Tensor,
            squares: torch.Tensor,
            limits: torch.Tensor,
        ) -> Any:
            above: Any = StepLimits(*limits.unbind())  # type: ignore[arg-type]
            decision = decide(loss, squares, scale=None, clip=clip, limits=above)
            optimizer = self._optimizer(weights)
            for name, parameter in optimizer.parameters.items():
                parameter.grad = gradients[name]
            for (kind, name), value in state.items():
                optimizer.state[optimizer.parameters[name]][kind] = value
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)
            optimizer.step(divisor=decision.divisor, skip=decision.skip)
            moved = {name: parameter.detach() for name, parameter in optimizer.parameters.items()}
            after = {(entry.kind, entry.key): entry.value for entry in optimizer.entries()}
            return moved, after, decision.norm, decision.skip

        weights, gradients = (
            {name: meta(shape) for name, shape in self.shapes.items()} for _ in range(2)
        )
        state = {key: meta(shape) for key, shape in self.state_shapes.items()}
        changing = [{name: meta() for name in group} for group in settings]
        scalars = (meta(), meta(), meta((2,)))
        return Lowered(trace(update, weights, gradients, state, changing, *scalars))

    # -------------------------------------------------------------- in JAX

    def step(self, batches: Batches, controls: Controls) -> Any:
        """One step over micro-batches of these shapes, to be compiled. It returns weights, state,
        and a vector of loss, gradient norm, skipped and signals."""
        first = {
            name: jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype)
            for name, batch in batches.items()
        }
        loss = self._loss(first, training=True)
        update = self._update(controls.settings)
        place, count = self.placing, next(iter(batches.values())).shape[0]
        context = partial(self._context, recompute=self._policy_of)

        def micro_loss(
            weights: Weights, buffers: Weights, batch: Batches, scale: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            total = loss(weights, buffers, batch, context=context(key=key))
            return total * scale, total

        gradient = jax.grad(micro_loss, has_aux=True)

        def sharded(gradients: Weights) -> Weights:
            return jax.lax.with_sharding_constraint(gradients, place.weights)

        def run(
            weights: Weights, state: State, buffers: Weights, batches: Batches, controls: Controls
        ) -> Any:
            scale = 1.0 / controls.loss_tokens

            used = _cast(weights, loss.casts())

            def one(number: Any, batch: Batches) -> tuple[Weights, jax.Array]:
                key = jax.random.fold_in(controls.key, number)
                found, total = gradient(used, buffers, batch, scale, key)
                wide = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), found)
                return sharded(wide), total

            def add(carry: Any, piece: Any) -> Any:
                gradients, total = carry
                more, loss = one(*piece)
                return (sharded(jax.tree.map(jnp.add, gradients, more)), total + loss), None

            if count == 1:
                gradients, total = one(0, {name: batch[0] for name, batch in batches.items()})
            else:
                start = (jax.tree.map(jnp.zeros_like, weights), jnp.zeros((), jnp.float32))
                pieces = (jnp.arange(count), batches)
                (gradients, total), _ = jax.lax.scan(add, start, pieces)
            mean = total / controls.loss_tokens
            squares = sum(jnp.sum(jnp.square(gradient)) for gradient in gradients.values())
            weights, state, norm, skip = update(
                weights, gradients, state, controls.settings, mean, squares, controls.limits
            )
            return weights, state, jnp.stack([mean, norm, skip, jnp.sum(controls.signals)])

        return jax.jit(run, donate_argnums=(0, 1), out_shardings=self._results())

    def _results(self) -> Any:
        place = self.placing
        return place.weights, self.state_shardings(), place.replicated

    def state_shardings(self) -> dict[tuple[str, str], Any]:
        """State with the shape of its parameter is sharded like it."""
        return {
            (kind, name): self.placing.weights[name]
            if shape == self.shapes[name]
            else self.placing.replicated
            for (kind, name), shape in self.state_shapes.items()
        }

    def evaluation(self, batch: Batches) -> Any:
        """The summed loss of one batch, to be compiled."""
        loss = self._loss(batch, training=False)
        context = self._context()

        def run(weights: Weights, buffers: Weights, batch: Batches) -> jax.Array:
            return loss(weights, buffers, batch, context=context)

        return jax.jit(run, out_shardings=self.placing.replicated)

    def _context(self, **more: Any) -> Context:
        layout = self.placing.layout
        return Context(
            shards=layout.data,
            tp=layout.tp,
            attention=self.config.runtime.xla_attention,
            attention_sharding=self.placing.attention_sharding,
            scan=self.config.runtime.compile == "blocks",
            **more,
        )

    def _policy_of(self, block: int) -> Any:
        """The policy for `jax.checkpoint` of a block; None for a block that saves everything."""
        if not self._recompute.concerns(block):
            return None
        return ALL if self._recompute.kind == "full" else _is_kept


def _cast(weights: Weights, dtypes: Sequence[Any]) -> Weights:
    """Weights cast to the only dtype in which a graph uses them, once for all micro-batches."""
    leaves, spec = jax.tree.flatten(weights)
    pairs = zip(leaves, dtypes[: len(leaves)], strict=True)
    return jax.tree.unflatten(
        spec, [leaf if dtype is None else leaf.astype(dtype) for leaf, dtype in pairs]
    )


def _is_kept(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """Selective recomputation saves matrix products and attention."""
    if jax.checkpoint_policies.dots_saveable(primitive, *inputs, **parameters):
        return True
    # cuDNN's attention is an operation of its own; the others name the tensors to save.
    named = primitive.name == "name" and parameters.get("name") == SAVED
    return named or primitive.name.startswith("dot_product_attention_fwd")
