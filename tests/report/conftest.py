"""A run folder as training would leave it, made up in a moment.

To look at the page: `python tests/report/conftest.py FOLDER` writes two runs and both reports.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.report.page import write_report
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import to_json
from gristmill.track.records import EventRecord, Record, SampleRecord, StepRecord, ValidationRecord

SETTINGS = """\
name = "{name}"
preset = "gpt2-small"

[data]
paths = {{ "tokens/owt" = 0.9, "tokens/wiki" = 0.1 }}
split = "969,30,1"

# 0.5M tokens a step
[train]
until = "{steps} steps"
batch = 480
seed = 1337

[optim]
type = "adamw"
lr = {lr}

[schedule]
type = "cosine"
warmup = "200 steps"

[precision]
compute = "{compute}"
"""
TOKENS = 480 * 1024
TEXTS = (
    " the the, of and and the a to\n of the the in",
    " a man who was in the house of the king, and he said that the king was the king",
    " a miller who lived by the river. Every morning he opened the gate, and the wheel\n"
    "began to turn, slowly at first, then faster, until the whole house hummed.",
)


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Give tests the function that writes a run folder."""
    return write_run


def write_run(
    folder: Path,
    *,
    steps: int = 3000,
    lr: float = 6e-4,
    seed: int = 0,
    half: bool = False,
    workers: bool = False,
) -> Path:
    """Write a run of so many steps, in float16 with a loss scale if `half`, with exchanges between
    workers if there are any."""
    run = RunFolder(folder)
    run.create()
    compute = "fp16" if half else "bf16"
    run.settings.write_text(
        SETTINGS.format(name=folder.name, steps=steps, lr=lr, compute=compute), "utf-8"
    )
    records = _records(steps, lr=lr, seed=seed, half=half, workers=workers)
    run.metrics.write_text("".join(to_json(record) + "\n" for record in records), "utf-8")
    run.environment.write_text(json.dumps(_environment(seed)))
    run.write_status("done" if seed == 0 else "stopped", step=steps)
    return folder


def _environment(seed: int) -> dict[str, object]:
    return {
        "gristmill": "0.1.0",
        "python": "3.11.9",
        "torch": "2.9.1",
        "platform": "Linux-6.8-x86_64",
        "host": f"node{seed:02d}",
        "device": "NVIDIA A100-SXM4-80GB",
        "commit": "4f2c9e0a7be51d" if seed == 0 else None,
        "threads": 16,
        "parameters": 124439808,
        "planned": {
            "tokens_per_second": 215e3,
            "step_seconds": 2.29,
            "mfu": 0.5,
            "memory_bytes": 39 * 2**30,
            "with": "constants of a100-80gb",
        },
        "started": "2025-06-01T09:30:00+02:00",
    }


def _records(steps: int, *, lr: float, seed: int, half: bool, workers: bool) -> list[Record]:
    dice = random.Random(seed)
    records: list[Record] = []
    now, best, skipped = 1_748_763_000.0, math.inf, 0
    for step in range(1, steps + 1):
        seconds = 2.4 * dice.uniform(0.97, 1.05) + (35 if step == 1 else 0)
        now += seconds
        at = {"step": step, "samples": step * 480, "tokens": step * TOKENS, "time": now}
        clean = 2.62 + 8.3 * (1 + step * lr / 0.02) ** -0.55
        spike = 0.9 * math.exp(-abs(step - 0.62 * steps) / 8) if seed == 0 else 0.0
        overflow = half and step % 1000 == 500
        skipped += overflow
        records.append(
            StepRecord(
                **at,
                loss=math.nan if overflow else clean + spike + dice.gauss(0, 0.05),
                lr=_rate(step, steps, lr),
                grad_norm=(0.35 + 3 * math.exp(-step / 80)) * dice.lognormvariate(0, 0.18)
                + 20 * spike,
                tokens_per_second=TOKENS / seconds,
                step_seconds=seconds,
                tflops=150 / seconds * 2.4,
                tflops_causal=140 / seconds * 2.4,
                mfu=0.48 / seconds * 2.4,
                mfu_causal=0.45 / seconds * 2.4,
                memory_bytes=int(31.5 * 2**30) if step > 3 else 29 * 2**30,
                loss_scale=65536.0 / 2 ** (step // 1000) if half else None,
                skipped=skipped,
                nan=skipped,
                data_wait=0.001,
                sync_wait=dice.uniform(0, 0.2),
                sent_bytes=step * 497_759_232 if workers else None,
                mixing=(_rate(step, steps, lr) / lr) ** 0.5 if workers else None,
            )
        )
        if step % max(steps // 12, 1) == 0:
            loss = clean + 0.06 + dice.gauss(0, 0.008)
            records.append(
                ValidationRecord(
                    **at,
                    loss=loss,
                    perplexity=math.exp(loss),
                    windows=512,
                    seconds=21.5,
                    best=loss < best,
                    consensus_distance=0.02 * _rate(step, steps, lr) / lr if workers else None,
                )
            )
            best = min(best, loss)
            text = TEXTS[min(len(TEXTS) * step // steps, len(TEXTS) - 1)]
            records += [
                SampleRecord(**at, prompt=prompt, text=text)
                for prompt in ("Once upon a time there was", "</script><b>In 1850")
            ]
    first, last = records[0], records[-1]
    begin = {name: getattr(first, name) for name in ("step", "samples", "tokens", "time")}
    end = {name: getattr(last, name) for name in ("step", "samples", "tokens", "time")}
    return [
        EventRecord(**begin, level="info", text="started on 8 devices, 124M parameters"),
        *records,
        EventRecord(**end, level="warning", text="W&B takes no more records; training goes on"),
        EventRecord(**end, level="info", text=f"saved checkpoints/step-{steps:08d}"),
    ]


def _rate(step: int, steps: int, lr: float) -> float:
    if step <= 200:
        return lr * step / 200
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 200) / max(steps - 200, 1))))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    both = [
        write_run(where / "gpt2-small-owt", steps=6000),
        write_run(
            where / "gpt2-small-fp16-gossip", steps=4500, lr=3e-4, seed=1, half=True, workers=True
        ),
    ]
    print(write_report(both[:1], where / "one.html"))
    print(write_report(both[1:], where / "gossip.html"))
    print(write_report(both, where / "two.html"))
