"""Whole runs on XLA devices against the same runs on the CPU.

The first number in each comparison is a tolerance: AdamW came within 5e-7 of the CPU's losses over
20 steps, and Muon, which orthogonalises small matrices, within 4e-6.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("jax", reason="needs JAX; `make test-xla` installs it and runs these tests")

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = [pytest.mark.xla, pytest.mark.timeout(1500)]
CPU = 'runtime.device="cpu"'
GPT2 = ""
MODERN = """
positions = "rotary"
norm = "rmsnorm"
norm_gain = false
qk_norm = true
kv_heads = 1
bias = false
activation = "relu2"
tie_head = false
embedding_norm = true
value_embeddings = 1
logit_cap = 15.0
[optim]
type = "muon"
normalise = "neurons"
lr = 0.02
"""


@pytest.mark.parametrize(
    ("model", "tolerance", "layout"),
    [
        (GPT2, 1e-5, ("parallel.dp_shard=2", "parallel.tp=2", "train.micro_batch=2")),
        (MODERN, 1e-4, ("parallel.dp_replicate=4", "train.micro_batch=1")),
    ],
    ids=["gpt2", "modern"],
)
def test_losses_are_those_of_the_cpu(
    runner: Runner, model: str, tolerance: float, layout: tuple[str, ...]
) -> None:
    file = runner.write(model)
    runner.train(file, CPU, "train.micro_batch=4", name="cpu")
    said = runner.train(file, "train.micro_batch=4", name="one")
    assert "compiled the step for 2 x 4 x 24 tokens" in said
    runner.train(file, *layout, name="four", devices=4)
    expected = runner.losses("cpu")
    assert len(expected) == 23
    assert runner.losses("one") == pytest.approx(expected, abs=tolerance)
    assert runner.losses("four") == pytest.approx(expected, abs=tolerance)


def test_a_run_goes_from_device_to_device_and_to_another_mesh(runner: Runner) -> None:
    file = runner.write(MODERN)
    # The schedule must not depend on where a run stops.
    common = ('precision.compute="bf16"', 'train.recompute="full"', 'schedule.type="constant"')
    places = [
        (5, CPU, 1),
        (10, "parallel.dp_shard=4", 4),
        (15, "parallel.dp_replicate=1", 1),
        (20, CPU, 1),
    ]
    for step, where, devices in places:
        until = () if step == 20 else (f'train.until="{step} steps"',)
        runner.train(file, *common, *until, where, name="moved", devices=devices)
    runner.train(file, CPU, *common, name="stayed")
    moved, stayed = runner.losses("moved"), runner.losses("stayed")
    assert {key for key in moved if key[0] == "step"} == {("step", n) for n in range(1, 21)}
    steps = {key: loss for key, loss in stayed.items() if key[0] == "step"}
    assert {key: moved[key] for key in steps} == pytest.approx(steps, abs=0.03)


def test_killed_and_resumed_it_ends_with_the_same_bits(runner: Runner) -> None:
    file, words = runner.write(GPT2), ("model.dropout=0.1", 'train.until="40 steps"')
    runner.train(file, *words, name="whole")
    process = runner.start(file, *words, name="killed")
    checkpoint = runner.folder / "killed" / "checkpoints" / "step-00000005"
    while not checkpoint.is_dir():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    said = runner.train(file, *words, name="killed")
    assert "resuming from step-000000" in said
    assert runner.losses("killed") == runner.losses("whole")
    ends = [runner.folder / name / "checkpoints/step-00000040" for name in ("killed", "whole")]
    for tensors in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / tensors).read_bytes() == (ends[1] / tensors).read_bytes()


def test_a_polite_stop_saves_and_a_growing_batch_says_why_it_compiles(runner: Runner) -> None:
    file = runner.write(GPT2)
    ramp = ("train.ramp.start=4", "train.ramp.by=4", 'train.ramp.over="8 samples"')
    process = runner.start(
        file, *ramp, "train.micro_batch=4", 'train.until="100k steps"', name="stopped"
    )
    metrics = runner.folder / "stopped" / "metrics.jsonl"
    while not metrics.is_file() or '"step": 6' not in metrics.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=1200)
    assert "stopped and saved at step" in said
    assert "(tokens_BT was (1, 4, 24) and is (2, 4, 24); targets_BT" in said


def test_two_processes_drive_four_devices(runner: Runner) -> None:
    file = runner.write(GPT2)
    words = ("parallel.dp_shard=2", "train.micro_batch=2", 'train.until="6 steps"')
    runner.train(file, *words, name="together", devices=4)
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    processes = [
        runner.start(
            file,
            *words,
            name="apart",
            devices=2,
            **{**place, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=1200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert runner.losses("apart") == pytest.approx(runner.losses("together"), abs=1e-5)
    # Both wrote their share of a checkpoint, with which one process goes on.
    more = runner.train(file, CPU, 'train.until="8 steps"', name="apart")
    assert "resuming from step-00000006" in more


def test_without_the_devices_it_says_so(runner: Runner) -> None:
    file = runner.write(GPT2)
    said = runner.train(file, "parallel.tp=2", "parallel.dp_replicate=1", name="none", fails=78)
    assert "tp 2 asks for 2 devices, and there is 1" in said
    process = runner.start(file, name="none", JAX_PLATFORMS="tpu")
    said, _ = process.communicate(timeout=1200)
    assert process.returncode == 78
    assert "JAX finds no device: " in said
    assert "Traceback" not in said


def test_bench_and_validation_run_there_too(runner: Runner) -> None:
    file = runner.write(GPT2)
    figures = runner.folder / "figures.json"
    words = ["bench", str(file), "--steps=3", "--warm-up=2", f"--json={figures}"]
    command = [sys.executable, "-m", "gristmill", *words]
    env = runner.environment(1)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the whole step compiled" in done.stdout
    found = json.loads(figures.read_text())["compiled_step"]
    assert found["versions"] == 1
    assert found["flops"] > 1e6
    runner.train(file, 'train.until="5 steps"', name="run")
    command = [sys.executable, "-m", "gristmill", "train", str(file), "--validate-only"]
    done = subprocess.run(
        [*command, 'train.until="5 steps"'], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{runner.losses('run')['validation', 5]:.4f}" in done.stdout
