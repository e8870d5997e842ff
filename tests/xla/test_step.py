"""The step as it is built: what the backward pass saves, blocks that are one function or a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.models.build import build_meta_model
from gristmill.models.spec import Execution
from gristmill.strategies.precision import DTYPES

jax = pytest.importorskip("jax", reason="needs JAX; `make test-xla` installs it and runs this")

import jax.numpy as jnp  # noqa: E402

from gristmill.strategies.xla.device import Placing  # noqa: E402
from gristmill.strategies.xla.step import CHANGING, Controls, Programs  # noqa: E402

pytestmark = pytest.mark.xla
VOCAB, SAMPLES, WIDTH, LAYERS, SEQUENCE = 61, 3, 32, 3, 64
RUN = f"""
name = "tiny"
[model]
layers = {LAYERS}
heads = 2
width = {WIDTH}
context = {SEQUENCE}
[data]
paths = "none"
[train]
until = "10 steps"
batch = 4
[runtime]
device = "xla"
"""
MODERN = (
    *('model.positions="rotary"', 'model.norm="rmsnorm"', 'model.activation="swiglu"'),
    *("model.bias=false", "model.value_embeddings=1", "model.window=8"),
)


def programs(*settings: str) -> Programs:
    config = load_text(RUN, settings, place="run.toml")
    compute = DTYPES[config.precision.compute] if config.precision.compute != "auto" else None
    execution = Execution(compute or DTYPES["fp32"])
    model = build_meta_model(config.model, vocab=VOCAB, execution=execution)
    return Programs(config, model, Placing(Mesh(), model))


def shaped(shapes: Any) -> Any:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def batch_like(*before: int) -> dict[str, Any]:
    shape = (*before, SAMPLES, SEQUENCE)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens_BT", "targets_BT")}


def values_of(made: Programs) -> tuple[Any, Any, Any]:
    """Weights, buffers and a batch."""
    rng = np.random.default_rng(1)
    weights, buffers = (
        {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
        for shapes in (made.shapes, made.buffers)
    )
    batch = {
        name: rng.integers(0, VOCAB, one.shape, np.int32) for name, one in batch_like().items()
    }
    return weights, buffers, batch


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        *((("model.dropout=0.2",), "none"), (("model.dropout=0.2",), "full")),
        *((MODERN, "none"), (MODERN, "selective")),
    ],
    ids=["gpt2", "gpt2-full", "modern", "modern-selective"],
)
def test_a_loop_over_blocks_computes_the_same(model: tuple[str, ...], recompute: str) -> None:
    found = []
    ways = [("none", None), (recompute, None), (recompute, "blocks")]
    for kind, compiled in dict.fromkeys(ways):
        more = (f'train.recompute="{kind}"',)
        more += (f'runtime.compile="{compiled}"',) if compiled else ()
        made = programs(*model, *more)
        weights, buffers, batch = values_of(made)
        loss = made._loss(batch_like(), training=True)
        context = made._context(key=jax.random.key(3), recompute=made._policy_of)
        run = jax.jit(
            jax.value_and_grad(lambda *args, c=context, f=loss: f(*args, context=c)),
        )
        text = run.lower(weights, buffers, batch).as_text()
        assert ("while" in text.split("func.func private")[0]) or compiled is None
        found.append(run(weights, buffers, batch))
    (value, gradients), *others = found
    for other_value, other_gradients in others:
        assert float(other_value) == pytest.approx(float(value), rel=1e-6)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(other_gradients[name], gradient, atol=2e-3, err_msg=name)


@pytest.mark.parametrize(
    ("model", "most"),
    [
        # The inputs of two norms and of six products, with the inner width four times the width;
        # the activation's input. Attention saves its inputs, its result and how it is needed next.
        (('model.activation="gelu"',), 2 * (2 + 2 + 3 + 2 + 4 + 4)),
        (('model.norm="rmsnorm"', "model.bias=false"), 2 * (2 + 2 + 3 + 2 + 4 + 4)),
    ],
    ids=["layernorm", "rmsnorm"],
)
def test_what_the_backward_pass_saves_is_in_half_precision(
    model: tuple[str, ...], most: int
) -> None:
    made = programs(*model, 'precision.compute="bf16"', 'runtime.xla_attention="blocked"')
    loss = made._loss(batch_like(), training=True)
    saved = jax.eval_shape(
        lambda weights, buffers, batch: jax.vjp(
            lambda weights: loss(weights, buffers, batch, context=made._context()), weights
        )[1],
        *(shaped(made.shapes), shaped(made.buffers), batch_like()),
    )
    tokens = SAMPLES * SEQUENCE
    of_tokens = [one for one in jax.tree.leaves(saved) if one.size % (tokens * WIDTH) == 0]
    wide = [one for one in of_tokens if one.dtype == jnp.float32]
    assert not wide, f"saved in fp32: {wide}"
    everywhere = sum(one.size * one.dtype.itemsize for one in of_tokens) / (tokens * WIDTH)
    around = 2 * 4  # the embedding, and the loss's own
    assert everywhere <= LAYERS * (most + 2) + around


def test_a_step_overwrites_weights_and_state_and_traces_a_block_once() -> None:
    made = programs('precision.compute="bf16"')
    weights, state = shaped(made.shapes), shaped(made.state_shapes)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    groups = made._optimizer({name: _meta(shape) for name, shape in made.shapes.items()})
    controls = Controls(
        settings=[
            {name: scalar for name in CHANGING if name in group} for group in groups.param_groups
        ],
        loss_tokens=scalar,
        limits=jax.ShapeDtypeStruct((2,), jnp.float32),
        key=jax.eval_shape(lambda: jax.random.key(0)),
        signals=jax.ShapeDtypeStruct((1,), jnp.float32),
    )
    batches = batch_like(3)
    lowered = made.step(batches, controls).lower(
        weights, state, shaped(made.buffers), batches, controls
    )
    # Forward and backward, or fewer where one is part of the other.
    products = lowered.as_text().count("dot_general")
    assert products < LAYERS * 4 * 3, f"{products} products for {LAYERS} equal blocks"
    memory = lowered.compile().memory_analysis()
    sizes = (one.size * 4 for one in (*weights.values(), *state.values()))
    assert memory.alias_size_in_bytes == sum(sizes)


def _meta(shape: tuple[int, ...]) -> Any:
    from gristmill.strategies.xla.graph import meta

    return meta(shape)
