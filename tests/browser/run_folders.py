"""Run folders as training leaves them while it goes on, made up in a moment.

python tests/browser/run_folders.py FOLDER      six runs, then `gristmill watch FOLDER`
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

from gristmill.track.folder import RunFolder
from gristmill.track.metrics import to_json
from gristmill.track.records import (
    EvaluationRecord,
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
)

SETTINGS = """\
name = "{name}"
preset = "gpt2-small"

[train]
until = "{until} steps"
batch = 480
seed = {seed}

[optim]
type = "adamw"
lr = {lr}
"""
TOKENS = 480 * 1024
SECONDS = 2.4
HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><b>In 1850"
TEXTS = (
    " the the, of and and the a to\n of the the in",
    " a man who was in the house of the king, and he said that the king was the king",
    " a miller who lived by the river. Every morning he opened the gate, and the wheel\n"
    "began to turn, slowly at first, then faster, until the whole house hummed.",
)


class GrowingRun:
    """A run folder that a test lets grow."""

    def __init__(
        self, path: Path, *, lr: float = 6e-4, seed: int = 1, until: int = 2000, start: float = 0
    ) -> None:
        self.folder = RunFolder(path)
        self.folder.create()
        self.lr, self.seed, self.until = lr, seed, until
        self.step = 0
        self._dice = random.Random(f"{lr} {seed}")
        self._skipped = 0
        self._best = math.inf
        self.time = start or time.time() - 6 * 3600
        name = path.name
        text = SETTINGS.format(name=name, until=until, lr=lr, seed=seed)
        self.folder.settings.write_text(text, "utf-8")
        self.folder.metrics.touch()
        about = {
            "device": "NVIDIA H200",
            "host": "node01",
            "parameters": 124439808,
            "started": "2026-11-18T21:30:00+00:00",
            "torch": "2.9.1",
            "flops_per_token": 8.6e8,
        }
        self.folder.environment.write_text(json.dumps(about))
        self.state("running")
        self.write(self.event("started on 4 devices, 124M parameters"))
        self.log(f"started {name} on 4 devices")

    def state(self, state: Any, **facts: Any) -> None:
        """Write the state of the run."""
        self.folder.write_status(state, step=self.step, **facts)

    def log(self, text: str) -> None:
        """Add a line to the log."""
        with self.folder.log.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def write(self, *records: Record) -> None:
        """Add records."""
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(to_json(record) + "\n" for record in records))

    @property
    def stamp(self) -> dict[str, Any]:
        """When it is, for a record."""
        step = self.step
        return {"step": step, "samples": step * 480, "tokens": step * TOKENS, "time": self.time}

    def event(self, text: str, level: Any = "info") -> EventRecord:
        """Something that happens now."""
        return EventRecord(**self.stamp, level=level, text=text)

    def clean_loss(self) -> float:
        """The loss without noise."""
        rate = 8.3 * (1 + self.step * self.lr / 0.02) ** -0.55
        return 2.62 + rate + 0.02 * math.sin(self.seed)

    def grow(self, steps: int, *, every: int = 200) -> None:
        """Train so many steps: records, and a validation, samples and scores now and then."""
        records: list[Record] = []
        for _ in range(steps):
            records += self._one_step(every)
        self.write(*records)
        self.state("running")

    def _one_step(self, every: int) -> list[Record]:
        self.step += 1
        dice, step = self._dice, self.step
        seconds = SECONDS * dice.uniform(0.97, 1.05)
        self.time += seconds
        spike = 0.9 * math.exp(-abs(step - 0.62 * self.until) / 8) if self.seed == 1 else 0.0
        self._skipped += spike > 0.88
        loss = self.clean_loss() + spike + dice.gauss(0, 0.05)
        records: list[Record] = [self._step_record(loss, spike, seconds)]
        if step % 25 == 0:
            records.append(self._system_record())
        if step % every == 0:
            records += self._checks()
        if spike > 0.899:
            text = f"skipped step {step}: the gradient norm is 21.3, above 4 times the usual"
            records.append(self.event(text, "warning"))
        return records

    def _step_record(self, loss: float, spike: float, seconds: float) -> StepRecord:
        step, dice = self.step, self._dice
        part = 0.5 + 0.5 * math.cos(math.pi * min(1, step / self.until))
        return StepRecord(
            **self.stamp,
            loss=loss,
            lr=self.lr * min(1, step / 100) * (0.1 + 0.9 * part),
            grad_norm=(0.35 + 3 * math.exp(-step / 80)) * dice.lognormvariate(0, 0.18) + 20 * spike,
            tokens_per_second=TOKENS / seconds,
            step_seconds=seconds,
            tflops=150 / seconds * 2.4,
            tflops_causal=140 / seconds * 2.4,
            mfu=0.48 / seconds * 2.4,
            mfu_causal=0.45 / seconds * 2.4,
            memory_bytes=int(31.5 * 2**30) if step > 3 else 29 * 2**30,
            skipped=self._skipped,
            data_wait=0.001 * dice.lognormvariate(0, 0.5),
            sync_wait=dice.uniform(0, 0.2),
        )

    def _system_record(self) -> SystemRecord:
        dice = self._dice
        return SystemRecord(
            **self.stamp,
            host="node01",
            cpu_use=dice.uniform(0.1, 0.2),
            ram_bytes=int(64e9),
            disk_read=dice.uniform(1e6, 4e7),
            disk_write=dice.uniform(1e5, 1e6),
            disk_free=int(900e9 - self.step * 1e7),
            net_sent=dice.uniform(1e8, 2e8),
            net_received=dice.uniform(1e8, 2e8),
            gpus=4,
            gpu_use=dice.uniform(0.9, 0.99),
            gpu_memory_bytes=int(70e9),
            gpu_watts=dice.uniform(2300, 2500),
            gpu_celsius=dice.uniform(61, 66),
            gpu_mhz=dice.uniform(1900, 1980),
            gpu_throttled=None,
        )

    def _checks(self) -> list[Record]:
        loss = self.clean_loss() + 0.06 + self._dice.gauss(0, 0.008)
        self._best = min(self._best, loss)
        text = TEXTS[min(len(TEXTS) * self.step // self.until, len(TEXTS) - 1)]
        accuracy = 0.25 + 0.12 * self.step / self.until + self._dice.gauss(0, 0.004)
        name = f"step-{self.step:08d}"
        checkpoint = self.folder.checkpoints / name
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "model.safetensors").write_bytes(bytes(4096))
        return [
            ValidationRecord(
                **self.stamp,
                loss=loss,
                perplexity=math.exp(loss),
                windows=512,
                seconds=21.5,
                best=loss <= self._best,
                bits_per_byte=loss / 3.1,
            ),
            EvaluationRecord(
                **self.stamp,
                name="hellaswag",
                metric="acc",
                value=accuracy,
                stderr=0.0047,
                items=10042,
                seconds=30,
            ),
            *(
                SampleRecord(**self.stamp, prompt=prompt, text=text)
                for prompt in ("Once upon a time there was", HOSTILE)
            ),
            self.event(f"saved checkpoint {name} (475 MiB)"),
        ]

    def mix(self) -> None:
        """Let what is recorded be of a mixture, and validated on two more sets."""
        lines = []
        for text in self.folder.metrics.read_text().splitlines():
            record = json.loads(text)
            if record["kind"] == "step":
                record["sources"] = {
                    "web": {"loss": record["loss"] + 0.2, "tokens": record["tokens"] * 3 // 4},
                    "code": {"loss": record["loss"] - 0.6, "tokens": record["tokens"] // 4},
                }
            elif record["kind"] == "validation":
                record["sets"] = {
                    name: {"loss": record["loss"] + more, "perplexity": 20.0, "windows": 64}
                    for name, more in (("news", 0.1), ("proofs", 0.4))
                }
            lines.append(json.dumps(record) + "\n")
        self.folder.metrics.write_text("".join(lines))

    def slow_process(self, rank: int = 2) -> None:
        """One process becomes slow."""
        self.write(
            StragglerRecord(
                **self.stamp,
                rank=rank,
                host="node01",
                phase="data",
                ratio=1.31,
                seconds=0.42,
                cause="slow storage",
            )
        )

    def account(self) -> None:
        """Where the time went, in two attempts."""
        first = {"start": 41.0, "compile": 65.0, "compute": 2900.0, "communication": 260.0}
        first |= {"optimizer": 210.0, "data": 40.0, "validation": 95.0, "save": 31.0}
        began = self.time - 9000
        again = {**first, "compute": 3600.0}
        kept = {name: seconds * 8 / 9 for name, seconds in first.items()}
        lines = [
            {"began": began, "first": 0, "step": 800, "parts": kept, "joules": 7.2e6},
            {"began": began, "first": 0, "step": 900, "parts": first, "joules": 8.1e6},
            {"began": began + 3800, "first": 800, "step": 1700, "parts": again, "joules": 9.2e6},
        ]
        rest = {"queued": None, "end": None}
        path = self.folder.path / "time.jsonl"
        path.write_text("".join(json.dumps({**rest, **line}) + "\n" for line in lines))

    def processes(self, *, lost: int | None = None) -> None:
        """What every process does just now."""
        parts = {"data": 0.01, "compute": 2.1, "wait": 0.2, "optimizer": 0.1}
        rows = [
            {
                "rank": rank,
                "host": "node01",
                "phase": "step",
                "step": self.step,
                "state": "lost" if rank == lost else "alive",
                "seconds": 1.2,
                "silence": 64.0 if rank == lost else 0.4,
                "step_seconds": 2.41,
                "parts": parts,
            }
            for rank in range(4)
        ]
        path = self.folder.path / "processes.json"
        path.write_text(json.dumps({"written": time.time(), "processes": rows}))


def write_example(where: Path) -> list[GrowingRun]:
    """Six runs: three learning rates with two seeds each; one is ahead, one failed, one is done."""
    runs = []
    for lr in (3e-4, 6e-4, 1.2e-3):
        for seed in (1, 2):
            run = GrowingRun(where / f"small-lr{lr:g}-s{seed}", lr=lr, seed=seed)
            run.account()
            run.grow(1240 + 120 * seed + int(lr * 2e5))
            run.processes()
            for step in range(1, 41):
                run.log(f"step {run.step - 40 + step}/2000 | loss 3.2{step:02d} | grad 0.410")
            runs.append(run)
    runs[1].slow_process()
    runs[3].grow(runs[3].until - runs[3].step)
    runs[3].state("done")
    runs[5].write(
        runs[5].event("the loss is not finite: went back to step 1400", "warning"),
        runs[5].event("resumed from step-00001400"),
    )
    runs[5].state("failed", reason="the loss was not finite three times in a row")
    return runs


if __name__ == "__main__":
    write_example(Path(sys.argv[1]))
