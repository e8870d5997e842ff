"""Training on a CUDA device through XLA, beside torch on the same device.

Runs are processes of their own, since torch and JAX would share the memory of the device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="needs JAX for CUDA")

import jax.numpy as jnp  # noqa: E402

from gristmill.strategies.xla.attention import attend  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda,cpu"}
XLA, CUDA = 'runtime.device="xla"', 'runtime.device="cuda"'
MODEL = (
    *("model.width=128", "model.heads=2", "model.context=128", "train.batch=8"),
    *("optim.lr=1e-3", 'schedule.type="constant"', 'checkpoint.every="5 steps"'),
)


@pytest.fixture(autouse=True)
def _with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("needs JAX for CUDA")


def gristmill(verb: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", verb, *words],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {one["step"]: one["loss"] for one in records if one["kind"] == "step"}


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        # Sums in another order, over 20 steps of AdamW.
        (('precision.compute="fp32"', "precision.tf32=false"), 1e-3),
        # Each result is rounded to 8 bits, at other places in the two.
        (('precision.compute="bf16"',), 0.03),
        (('precision.compute="bf16"', 'runtime.compile="blocks"'), 0.03),
    ],
    ids=["fp32", "bf16", "bf16-blocks"],
)
def test_from_one_checkpoint_both_have_the_same_losses(
    settings: tuple[str, ...], tolerance: float, run_text: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(run_text())

    def train(name: str, device: str, steps: int) -> Path:
        folder = tmp_path / name
        words = (*MODEL, *settings, device, f'folder="{folder}"', f'train.until="{steps} steps"')
        gristmill("train", str(file), *words)
        return folder

    start = train("torch", CUDA, 5)
    shutil.copytree(start, tmp_path / "xla")
    torch_losses, xla_losses = (
        losses(train(name, device, 25)) for name, device in (("torch", CUDA), ("xla", XLA))
    )
    assert set(xla_losses) == set(range(1, 26))
    assert xla_losses == pytest.approx(torch_losses, abs=tolerance)
    assert xla_losses[25] < xla_losses[1] - 0.1, "nothing was learned"


@pytest.mark.parametrize(
    ("implementation", "dtype", "groups", "width", "tolerance"),
    [
        ("cudnn", jnp.bfloat16, 12, 64, 0.02),
        ("cudnn", jnp.bfloat16, 4, 128, 0.02),
        ("blocked", jnp.bfloat16, 4, 64, 0.02),
        ("blocked", jnp.float32, 12, 64, 1e-4),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_that_saves_no_scores_is_plain_attention(
    implementation: str, dtype: Any, groups: int, width: int, tolerance: float, causal: bool
) -> None:
    """Within a share of the largest number."""
    keys = jax.random.split(jax.random.key(1), 3)
    inputs = [
        jax.random.normal(key, (2, heads, 512, width), jnp.float32).astype(dtype)
        for key, heads in zip(keys, (12, groups, groups), strict=True)
    ]

    def run(implementation: str) -> Any:
        settings = {"causal": causal, "scale": width**-0.5, "implementation": implementation}
        function = partial(attend, mask=None, dropout=0.0, **settings)

        def total(*inputs: Any) -> Any:
            found = function(*inputs)
            weights = jnp.cos(jnp.arange(found.size, dtype=jnp.float32)).reshape(found.shape)
            return jnp.sum(found.astype(jnp.float32) * weights), found

        with jax.default_matmul_precision("highest"):
            gradients, found = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*inputs)
        return [np.asarray(one.astype(jnp.float32)) for one in (found, *gradients)]

    for ours, plain in zip(run(implementation), run("plain"), strict=True):
        np.testing.assert_allclose(ours, plain, atol=tolerance * np.abs(plain).max())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_step_takes_hardly_more_memory_than_in_torch(precision: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'name = "memory"\npreset = "gpt2-small"\n[data]\npaths = "none"\n'
        '[train]\nuntil = "100 steps"\nbatch = 16\nmicro_batch = 16\n'
    )

    def memory(device: str) -> float:
        figures = tmp_path / "figures.json"
        words = ("--random-tokens", "--steps=3", "--warm-up=2", f"--json={figures}")
        gristmill("bench", str(file), device, f'precision.compute="{precision}"', *words)
        found: float = json.loads(figures.read_text())["speed"]["memory"]
        return found

    assert memory(XLA) <= 1.3 * memory(CUDA)
