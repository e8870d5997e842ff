"""The implementations of attention on XLA devices, against each other and on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from gristmill.base.errors import UserError

jax = pytest.importorskip("jax", reason="needs JAX; `make test-xla` installs it and runs this")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

from gristmill.strategies.xla import attention  # noqa: E402
from gristmill.strategies.xla.attention import (  # noqa: E402
    AttentionCall,
    AttentionSharding,
    attend,
    blocked,
    choose_implementation,
    plain,
    splash,
)

pytestmark = pytest.mark.xla
SHAPES = (2, 4, 2, 24, 8)
"""Samples, heads, groups, positions, width."""


def draw(shapes: tuple[int, ...] = SHAPES, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    samples, heads, groups, positions, width = shapes
    keys = jax.random.split(jax.random.key(1), 3)
    return tuple(
        jax.random.normal(key, (samples, count, positions, width), jnp.float32).astype(dtype)
        for key, count in zip(keys, (heads, groups, groups), strict=True)
    )


def with_gradients(implementation: Any, inputs: Any) -> list[Any]:
    """The result and the gradients of a weighted sum of it."""

    def total(*inputs: Any) -> Any:
        found = implementation(*inputs)
        weights = jnp.cos(jnp.arange(found.size, dtype=jnp.float32)).reshape(found.shape)
        return jnp.sum(found.astype(jnp.float32) * weights), found

    gradients, found = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [found, *gradients]


def assert_equal(ours: Any, theirs: Any, within: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=within)


@pytest.mark.parametrize(
    ("positions", "allowance", "kind"),
    [
        *((24, 2**28, "causal"), (3, 2**28, "causal"), (23, 2000, "causal"), (23, 2000, "none")),
        *((24, 2000, "mask"), (23, 2000, "masks")),
    ],
)
def test_blocked_is_plain(
    positions: int, allowance: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", allowance)
    inputs = draw((*SHAPES[:3], positions, 8))
    shape = {"mask": (positions, positions), "masks": (2, 1, positions, positions)}.get(kind)
    mask = None
    if shape is not None:
        mask = jax.random.bernoulli(jax.random.key(2), 0.5, shape) | jnp.eye(positions, dtype=bool)
    settings = {"mask": mask, "dropout": 0.0, "causal": kind == "causal", "scale": 0.3}
    ours, theirs = (
        with_gradients(partial(implementation, **settings), inputs)
        for implementation in (blocked, plain)
    )
    assert_equal(ours, theirs, within=1e-5)


def test_blocked_attention_drops_weights_and_its_gradient_drops_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2000)
    settings = {"mask": None, "dropout": 0.4, "causal": True, "scale": 0.3}
    inputs = draw()
    implementation = partial(blocked, **settings, key=jax.random.key(5))
    ours = with_gradients(implementation, inputs)
    other = with_gradients(partial(blocked, **settings, key=jax.random.key(6)), inputs)
    assert not np.allclose(ours[0], other[0], atol=0.1)
    # The derivative that JAX finds by itself.
    monkeypatch.setattr(attention, "_blocked", lambda *args: attention._blocked_forward(*args)[0])
    assert_equal(ours, with_gradients(implementation, inputs), within=1e-5)


def test_blocked_attention_saves_no_scores() -> None:
    shapes = (1, 2, 2, 512, 8)
    settings = {"mask": None, "dropout": 0.0, "causal": True, "scale": 0.3}

    def saved(implementation: Any) -> int:
        found = jax.eval_shape(
            lambda *args: jax.vjp(partial(implementation, **settings), *args)[1], *inputs
        )
        return sum(one.size for one in jax.tree.leaves(found))

    inputs = draw(shapes)
    small = sum(one.size for one in inputs)
    assert saved(plain) > 2 * 512 * 512
    assert saved(blocked) <= 2 * small  # with the result, sums and positions


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_splash_is_plain(causal: bool, groups: int) -> None:
    """As JAX imitates a TPU's kernel on the CPU."""
    inputs = draw((1, 2, groups, 256, 64))
    mesh = jax.make_mesh((1, 1), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    sharding = AttentionSharding(mesh, ("data",), "tp")
    implementation = partial(splash, scale=0.125, causal=causal, sharding=sharding, interpret=True)
    theirs = with_gradients(
        partial(plain, mask=None, dropout=0.0, causal=causal, scale=0.125), inputs
    )
    assert_equal(with_gradients(implementation, inputs), theirs, within=2e-5)


CALL = AttentionCall(
    (2, 4, 256, 64), (2, 2, 256, 64), jnp.bfloat16, has_mask=False, has_dropout=False, causal=True
)


def choose(setting: str, changed: dict[str, Any], backend: str) -> str:
    call = CALL._replace(**changed)
    return choose_implementation(setting, call, AttentionSharding(), backend=backend)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU with cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    gpu = type("Gpu", (), {"compute_capability": "9.0"})()
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(kernels, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(kernels, "is_cuda_compute_capability_equal", lambda _: False)
    attention._check_shapes.cache_clear()


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    ("backend", "changed", "implementation"),
    [
        ("cpu", {}, "plain"),
        ("gpu", {}, "cudnn"),
        ("gpu", {"causal": False}, "cudnn"),
        ("gpu", {"dtype": jnp.float32}, "blocked"),
        ("gpu", {"has_mask": True}, "blocked"),
        ("gpu", {"has_dropout": True}, "blocked"),
        ("gpu", {"query": (2, 4, 256, 60), "key": (2, 2, 256, 60)}, "blocked"),
        ("tpu", {}, "splash"),
        ("tpu", {"dtype": jnp.float32}, "splash"),
        ("tpu", {"has_mask": True}, "blocked"),
        ("tpu", {"query": (2, 4, 100, 64), "key": (2, 2, 100, 64)}, "blocked"),
    ],
)
def test_auto_takes_the_kernel_of_the_device(
    backend: str, changed: dict[str, Any], implementation: str
) -> None:
    assert choose("auto", changed, backend) == implementation
    for setting in ("plain", "blocked"):
        assert choose(setting, changed, backend) == setting


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    ("setting", "backend", "changed", "why"),
    [
        ("cudnn", "cpu", {}, "it needs an NVIDIA GPU"),
        ("cudnn", "gpu", {"dtype": jnp.float32}, "only bf16"),
        ("cudnn", "gpu", {"query": (2, 4, 256, 60), "key": (2, 2, 256, 60)}, "head dim must be"),
        ("splash", "gpu", {}, "it needs a TPU"),
        ("splash", "tpu", {"has_dropout": True}, "no dropout"),
        ("splash", "tpu", {"has_mask": True}, "no mask"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(
    setting: str, backend: str, changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why) as said:
        choose(setting, changed, backend)
    assert said.value.problems[0].where == "runtime.xla_attention"


@pytest.mark.usefixtures("like_a_gpu")
def test_cudnn_saves_inputs_result_and_one_number_for_each_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step for a GPU is lowered here, but cannot run."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    inputs = draw((2, 4, 2, 256, 64), jnp.bfloat16)
    implementation = partial(attend, mask=None, dropout=0.0, causal=True, scale=0.125)
    saved = jax.eval_shape(lambda *args: jax.vjp(implementation, *args)[1], *inputs)
    found = sum(one.size for one in jax.tree.leaves(saved))
    assert found <= sum(one.size for one in (*inputs, inputs[0])) + 2 * 4 * 256
    gradient = jax.jit(jax.grad(lambda *args: implementation(*args).astype(jnp.float32).sum()))
    text = gradient.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmax(") == 1, text
    assert text.count("__cudnn$fmhaSoftmaxBackward(") == 1
    assert "256x256" not in text, "no scores are computed outside of the kernel"
