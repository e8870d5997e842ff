"""Workers on a GPU: exchanges on a stream of their own, or through host memory."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.rules import check_mesh
from gristmill.data.loader import JOINED, make_batch
from gristmill.distributed.world import open_world
from gristmill.models.build import build_model
from gristmill.strategies.decentralized.workers import all_workers
from gristmill.train.build import build_strategy

Crowd = Callable[..., list[Any]]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RUN = """
name = "workers"
model = { layers = 2, heads = 2, width = 32, context = 32 }
data.paths = "none"
train = { until = "20 steps", batch = 8, seed = 5 }
optim = { lr = 1e-3, eps = 1e-4 }
precision = { compute = "fp32", tf32 = false }
"""


def train(device: str, on_host: bool | None, words: list[str], steps: int) -> dict[str, Any]:
    config = load_text(RUN, [*words, f'runtime.device="{device}"'], place="workers.toml")
    place = ProcessInfo.current()
    mesh = check_mesh(config, processes=place.world)
    world = open_world(config.runtime, tf32=False, mesh=mesh, parallel=config.parallel, place=place)
    workers = all_workers(world, config.parallel)
    if on_host is not None:
        workers = dataclasses.replace(workers, on_host=on_host)
    strategy: Any = build_strategy(
        config,
        vocab=61,
        world=world,
        control=world.control_group("test"),
        resolved=resolve(config, vocab=61, mesh=mesh),
        workers=workers,
    )
    start = build_model(config.model, vocab=61, device=torch.device("cpu"))
    start.initialise(1)  # the same on every device
    with torch.no_grad():
        for name, one in strategy.parameters.items():
            one.local.copy_(start.get_parameter(name))
    strategy.weights_changed()
    rng, progress = np.random.default_rng(0), Progress()
    for _ in range(steps):
        ids = (rng.zipf(1.3, (8, 33)) % 61).reshape(place.world, -1, 33)[place.rank]
        batches = [make_batch(ids, rules=JOINED)]
        result = strategy.update(strategy.accumulate(batches, progress))
        progress = progress.after(samples=result.samples, tokens=result.tokens)
    validation = strategy.evaluate([make_batch((np.arange(66) % 61).reshape(2, 33), rules=JOINED)])
    weights = {name: one.local.detach().cpu().numpy() for name, one in strategy.parameters.items()}
    strategy.close()
    return {"weights": weights, "validation": validation, "distance": strategy.distance}


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.gossip.topology=ring"],
        ["parallel.gossip.topology=ring", "parallel.exchange.delay=0"],
        ['parallel.local.every="3 steps"', "parallel.exchange.delay=2"],
        ["parallel.gossip.topology=complete", "parallel.exchange.send=int8"],
    ],
)
def test_workers_on_a_gpu_compute_what_workers_on_the_cpu_do(
    crowd: Crowd, words: list[str]
) -> None:
    expected = crowd(2, train, "cpu", None, words, 8)
    exact = "parallel.exchange.send=int8" not in words
    through_host = crowd(2, train, "cuda", True, words, 8)
    # Gloo sums tensors on a GPU, but gathers none.
    ways = [through_host, crowd(2, train, "cuda", False, words, 8)] if exact else [through_host]
    for answers in ways:
        for answer, wanted in zip(answers, expected, strict=True):
            for name, value in answer["weights"].items():
                np.testing.assert_allclose(value, wanted["weights"][name], atol=1e-3)
            assert answer["validation"] == pytest.approx(wanted["validation"], abs=2e-3)


def test_elastic_workers_share_a_gpu_and_survive_a_kill(tokens: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
name = "elastic"
folder = "{tmp_path}/run"
model = {{ layers = 2, heads = 2, width = 64, context = 64 }}
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "1500 steps", batch = 12 }}
validate = {{ every = "500 steps", windows = 8 }}
checkpoint.every = "500 steps"
runtime = {{ device = "cuda", compile = false }}
[parallel]
elastic = true
timeout = "10s"
gossip.topology = "ring"
exchange.send = "bf16"
"""
    )
    command = [sys.executable, "-m", "gristmill", "train", str(file)]
    supervisor = subprocess.Popen([*command, "--processes=2", "--restarts=2"])
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if metrics.exists() and metrics.read_bytes().count(b'"kind": "step"') > 50:
            break
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert supervisor.wait(240) == 0
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [one["step"] for one in records if one["kind"] == "step"]
    assert steps == sorted(set(steps)) and steps[-1] == 1500
    texts = " ".join(one["text"] for one in records if one["kind"] == "event")
    assert "worker 1 is gone" in texts
