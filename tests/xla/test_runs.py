"""Whole runs on XLA devices against the same runs on the CPU.

The first number in each comparison is a tolerance: AdamW came within 5e-7 of the CPU's losses over
20 steps, and Muon, which orthogonalises small matrices, within 4e-6.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("jax", reason="needs JAX; `make test-xla` installs it and runs these tests")

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = [pytest.mark.xla, pytest.mark.timeout(1500)]
CPU = 'runtime.device="cpu"'
GPT2: tuple[str, ...] = ()
MODERN = (
    *('model.positions="rotary"', 'model.norm="rmsnorm"', "model.norm_gain=false"),
    *("model.qk_norm=true", "model.kv_heads=1", "model.bias=false", 'model.activation="relu2"'),
    *("model.tie_head=false", "model.embedding_norm=true", "model.value_embeddings=1"),
    *("model.logit_cap=15.0", 'optim.type="muon"', 'optim.normalise="neurons"', "optim.lr=0.02"),
)


@pytest.mark.parametrize(
    ("model", "tolerance", "layout"),
    [
        (GPT2, 1e-5, ("parallel.dp_shard=2", "parallel.tp=2", "train.micro_batch=2")),
        (MODERN, 1e-4, ("parallel.dp_replicate=4", "train.micro_batch=1")),
    ],
    ids=["gpt2", "modern"],
)
def test_losses_are_those_of_the_cpu(
    runner: Runner, model: tuple[str, ...], tolerance: float, layout: tuple[str, ...]
) -> None:
    runner.train(*model, CPU, "train.micro_batch=4", name="cpu")
    said = runner.train(*model, "train.micro_batch=4", name="one")
    assert "compiled the step for 2 x 4 x 24 tokens" in said
    runner.train(*model, *layout, name="four", devices=4)
    expected = runner.losses("cpu")
    assert len(expected) == 23
    assert runner.losses("one") == pytest.approx(expected, abs=tolerance)
    assert runner.losses("four") == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    "optim",
    [
        ('optim.type="sgd"', "optim.nesterov=true", "optim.weight_decay=0.1", "optim.lr=0.1"),
        ('optim.type="adam"', "optim.weight_decay=0.1", 'model.activation="relu"'),
    ],
    ids=["sgd", "adam"],
)
def test_packed_documents_and_weights_are_those_of_the_cpu(
    runner: Runner, optim: tuple[str, ...]
) -> None:
    words = ('data.documents="masked"', "data.mask_end_of_text=true", "train.micro_batch=2", *optim)
    short = 'train.until="10 steps"'
    runner.train(*words, short, CPU, name="cpu")
    runner.train(*words, short, "parallel.dp_shard=2", name="two", devices=2)
    assert runner.losses("two") == pytest.approx(runner.losses("cpu"), abs=1e-5)


def test_a_run_goes_from_device_to_device_and_to_another_mesh(runner: Runner) -> None:
    # The schedule must not depend on where a run stops.
    common = (
        *MODERN,
        'precision.compute="bf16"',
        'train.recompute="full"',
        'schedule.type="constant"',
    )
    places = [
        (5, CPU, 1),
        (10, "parallel.dp_shard=4", 4),
        (15, "parallel.dp_replicate=1", 1),
        (20, CPU, 1),
    ]
    for step, where, devices in places:
        until = () if step == 20 else (f'train.until="{step} steps"',)
        runner.train(*common, *until, where, name="moved", devices=devices)
    runner.train(CPU, *common, name="stayed")
    moved, stayed = runner.losses("moved"), runner.losses("stayed")
    assert {key for key in moved if key[0] == "step"} == {("step", n) for n in range(1, 21)}
    steps = {key: loss for key, loss in stayed.items() if key[0] == "step"}
    assert {key: moved[key] for key in steps} == pytest.approx(steps, abs=0.03)


def test_killed_and_resumed_it_ends_with_the_same_bits(runner: Runner) -> None:
    words = ("model.dropout=0.1", 'train.until="40 steps"')
    runner.train(*words, name="whole")
    process = runner.start(*words, name="killed")
    kill_after(runner, "killed", process, step=5)
    process.communicate()
    said = runner.train(*words, name="killed")
    assert "resuming from step-000000" in said
    assert_same_end(runner, "killed", "whole")


def test_a_lost_host_is_named_and_both_resume_to_the_same_bits(runner: Runner) -> None:
    words = ("parallel.dp_shard=2", "train.micro_batch=2", 'train.until="30 steps"')
    whole = runner.start_hosts(*words, name="whole")
    said = [process.communicate(timeout=1200)[0] for process in whole]
    assert [process.returncode for process in whole] == [0, 0], "\n".join(said)
    host = socket.gethostname()
    lost = {
        1: rf"error: rank 1 on {host} died without reporting an error; last seen in phase \w+ .*",
        0: rf"error: rank 0 on {host}, which hosts the store at \S+, is gone; last seen .*",
    }
    for victim, step in ((1, 5), (0, 15)):
        both = runner.start_hosts(*words, name="lost")
        kill_after(runner, "lost", both[victim], step=step)
        said = [process.communicate(timeout=120)[0] for process in both]
        assert both[1 - victim].returncode == 76, said[1 - victim]
        assert re.fullmatch(lost[victim], said[1 - victim].splitlines()[-1]), said[1 - victim]
        assert "Traceback" not in said[1 - victim]
    last = runner.start_hosts(*words, name="lost")
    said = [process.communicate(timeout=1200)[0] for process in last]
    assert [process.returncode for process in last] == [0, 0], "\n".join(said)
    assert "resuming from step-000000" in said[0]
    assert_same_end(runner, "lost", "whole")


def kill_after(runner: Runner, name: str, process: subprocess.Popen[str], *, step: int) -> None:
    """Kill a process when a checkpoint is there."""
    checkpoint = runner.folder / name / "checkpoints" / f"step-{step:08}"
    while not checkpoint.is_dir():
        if process.poll() is not None:
            pytest.fail(f"it ended before it could be killed: {process.communicate()[0]}")
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)


def assert_same_end(runner: Runner, *names: str) -> None:
    """Equal losses at every step, equal bits in the last checkpoint."""
    one, two = names
    assert runner.losses(one) == runner.losses(two)
    ends = [max((runner.folder / name / "checkpoints").glob("step-*")) for name in names]
    assert ends[0].name == ends[1].name
    tensors = [sorted(end.glob("*.safetensors")) for end in ends]
    assert [file.name for file in tensors[0]] == [file.name for file in tensors[1]] != []
    assert [file.read_bytes() for file in tensors[0]] == [file.read_bytes() for file in tensors[1]]


def test_a_polite_stop_saves_and_a_growing_batch_says_why_it_compiles(runner: Runner) -> None:
    ramp = ("train.ramp.start=4", "train.ramp.by=4", 'train.ramp.over="8 samples"')
    process = runner.start(*ramp, "train.micro_batch=4", 'train.until="100k steps"', name="stopped")
    metrics = runner.folder / "stopped" / "metrics.jsonl"
    while not metrics.is_file() or '"step": 6' not in metrics.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=1200)
    assert "stopped and saved at step" in said
    assert "(tokens_BT was (1, 4, 24) and is (2, 4, 24); targets_BT" in said


def test_two_processes_drive_four_devices(runner: Runner) -> None:
    # With weights, so that both have to agree on how many tokens count.
    words = ("parallel.dp_shard=2", "train.micro_batch=2", "data.mask_end_of_text=true")
    words += ('train.until="6 steps"',)
    runner.train(*words, name="together", devices=4)
    processes = runner.start_hosts(*words, name="apart")
    said = [process.communicate(timeout=1200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert runner.losses("apart") == pytest.approx(runner.losses("together"), abs=1e-5)
    # Both wrote their share of a checkpoint, with which one process goes on.
    more = runner.train(CPU, 'train.until="8 steps"', name="apart")
    assert "resuming from step-00000006" in more


def test_without_the_devices_it_says_so(runner: Runner) -> None:
    said = runner.train("parallel.tp=2", "parallel.dp_replicate=1", name="none", fails=78)
    assert "tp 2 asks for 2 devices, and there is 1" in said
    process = runner.start(name="none", JAX_PLATFORMS="tpu")
    said, _ = process.communicate(timeout=1200)
    assert process.returncode == 78
    assert "JAX finds no device: " in said
    assert "Traceback" not in said


def test_bench_and_validation_run_there_too(runner: Runner) -> None:
    figures = runner.folder / "figures.json"
    options = ["--steps=3", "--warm-up=2", f"--json={figures}"]
    command, env = runner.command("bench", name="bench", options=options), runner.environment(1)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the whole step compiled" in done.stdout
    found = json.loads(figures.read_text())["compiled_step"]
    assert found["versions"] == 1
    assert found["flops"] > 1e6
    short = 'train.until="5 steps"'
    runner.train(short, name="run")
    command = runner.command("train", short, name="run", options=["--validate-only"])
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{runner.losses('run')['validation', 5]:.4f}" in done.stdout
