"""How long a checkpoint stops training, takes until it is on the disk, and takes to load.

    python benchmarks/checkpoints.py --gigabytes 3.4

The same tensors, weights and two moments of AdamW, are saved and loaded by:

    gristmill          copied to page-locked memory; written, flushed, compared in the background;
                       loading verifies every checksum first
    torch.save         one file, then fsync; torch.load with weights_only
    DCP                torch.distributed.checkpoint.save, files flushed
    DCP, async         its async_save with page-locked staging

"stall" is the time that training would wait, "durable" the time until everything is flushed. Ways
take turns; the first round, in which buffers are allocated, is shown apart. Before loading, files
leave the page cache. `dd` is the rate of writing zeros to the same disk with conv=fsync.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gristmill.base.units import Progress
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.state import TrainState, capture, restore, state_bytes
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.model import Role
from gristmill.config.optim import AdamWConfig
from gristmill.config.schema import CheckpointConfig
from gristmill.optim.adamw import AdamW

WIDTH = 1024


@dataclass
class Times:
    """Seconds of each round."""

    stall: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


class Ours:
    """Our own writer and reader."""

    def __init__(self, state: TrainState, device: torch.device) -> None:
        self.state, self.device = state, device
        self.writer: CheckpointWriter | None = None

    def save(self, folder: Path) -> Callable[[], None]:
        if self.writer is None:
            self.writer = self._open(folder)
            self.writer.host.reserve(state_bytes(self.state))
            time.sleep(2)
        self.writer.folder = CheckpointFolder(folder)
        self.writer.save(capture(self.state, self.writer.host))
        return self.writer.finish

    def load(self, folder: Path) -> None:
        found = CheckpointFolder(folder).newest_intact()
        assert found.path is not None, found.damaged
        restore(self.state, found.path)

    def _open(self, folder: Path) -> CheckpointWriter:
        return CheckpointWriter(
            CheckpointFolder(folder),
            CheckpointConfig(),
            progress_at=lambda step: Progress(step, step, step),
            say=lambda text: None,
            warn=print,
            device=self.device,
        )


class TorchSave:
    """torch.save and torch.load."""

    def __init__(self, state: TrainState, device: torch.device) -> None:
        self.state, self.device = state, device

    def save(self, folder: Path) -> Callable[[], None]:
        folder.mkdir()
        with (folder / "all.pt").open("wb") as file:
            torch.save(tensors_of(self.state), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def load(self, folder: Path) -> None:
        found = torch.load(folder / "all.pt", map_location=self.device, weights_only=True)
        for name, tensor in tensors_of(self.state).items():
            tensor.copy_(found[name])


class Dcp:
    """torch.distributed.checkpoint."""

    def __init__(self, state: TrainState, *, asynchronous: bool) -> None:
        self.state, self.stager = state, None
        if asynchronous:
            from torch.distributed.checkpoint.staging import BlockingAsyncStager

            # It keeps its page-locked copy from one save to the next, as ours does.
            self.stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self, folder: Path) -> Callable[[], None]:
        writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=8)
        if self.stager is None:
            dcp.save(tensors_of(self.state), storage_writer=writer, no_dist=True)
            return lambda: None
        pending: Any = dcp.async_save(
            tensors_of(self.state), storage_writer=writer, async_stager=self.stager, no_dist=True
        )
        done: Future[Any] = getattr(pending, "upload_completion", pending)
        return lambda: done.result() and None

    def load(self, folder: Path) -> None:
        dcp.load(tensors_of(self.state), storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    state = make_state(options.gigabytes, device)
    size = sum(one.nbytes for one in tensors_of(state).values())
    ways: dict[str, Any] = {
        "gristmill": Ours(state, device),
        "torch.save": TorchSave(state, device),
        "DCP": Dcp(state, asynchronous=False),
        "DCP, async": Dcp(state, asynchronous=True),
    }
    times = {way: Times() for way in ways}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rates = [dd(folder, size) for _ in range(2)]
        for number in range(options.rounds + 1):
            for way, act in ways.items():
                measure(act, times[way], folder / f"{way}-{number}", device, state)
    report(times, size=size, rate=max(rates), device=device)


def measure(act: Any, times: Times, folder: Path, device: torch.device, state: TrainState) -> None:
    """Save once, load once, and check that the same numbers came back."""
    before = checksums(state)
    os.sync()
    synchronize(device)
    began = time.perf_counter()
    finish = act.save(folder)
    times.stall.append(time.perf_counter() - began)
    finish()
    times.durable.append(time.perf_counter() - began)
    for file in folder.rglob("*"):
        if file.is_file():
            forget(file)
    for tensor in tensors_of(state).values():
        tensor.zero_()
    synchronize(device)
    began = time.perf_counter()
    act.load(folder)
    synchronize(device)
    times.load.append(time.perf_counter() - began)
    assert before == checksums(state)
    shutil.rmtree(folder)


def report(times: dict[str, Times], *, size: int, rate: float, device: torch.device) -> None:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{size / 2**30:.2f} GiB on {where}, torch {torch.__version__}, dd {rate / 1e9:.2f} GB/s")
    print("seconds       stall (first)    durable   GB/s   of dd     load   GB/s")
    for way, one in times.items():
        stall, durable, load = (
            statistics.median(some[1:]) for some in (one.stall, one.durable, one.load)
        )
        print(
            f"{way:<12} {stall:6.3f} ({one.stall[0]:6.3f}) {durable:9.2f} "
            f"{size / durable / 1e9:6.2f} {size / durable / rate:7.2f} {load:8.2f} "
            f"{size / load / 1e9:6.2f}"
        )
    ours = times["gristmill"]
    for way, one in times.items():
        if way != "gristmill":
            ratios = [
                statistics.median(theirs[1:]) / statistics.median(mine[1:])
                for theirs, mine in (
                    (one.stall, ours.stall),
                    (one.durable, ours.durable),
                    (one.load, ours.load),
                )
            ]
            words = ", ".join(
                f"{name} {ratio:.2f}"
                for name, ratio in zip(("stall", "durable", "load"), ratios, strict=True)
            )
            print(f"{way} over gristmill: {words}")


def make_state(gigabytes: float, device: torch.device) -> TrainState:
    """Weights and moments of this size in all, in matrices of different sizes."""
    left = round(gigabytes * 1e9 / 12 / WIDTH)
    layers = []
    while left > 0:
        rows = min(left, (1024, 3072, 4096)[len(layers) % 3])
        layers.append(nn.Linear(WIDTH, rows, bias=False, device=device))
        left -= rows
    model = nn.ModuleList(layers)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    parameters = dict(model.named_parameters())
    optimizer = AdamW(AdamWConfig(), parameters, roles=dict.fromkeys(parameters, Role.MATRIX))
    optimizer.step(divisor=torch.ones((), device=device), skip=torch.zeros((), device=device))
    return TrainState(model, optimizer, {}, {}, progress=Progress(1, 1, 1))


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Weights and moments, by name."""
    entries = state.optimizer.entries()
    weights = {name: one.local.detach() for name, one in state.parameters.items()}
    return weights | {f"{kind}/{key}": value for kind, key, value in entries}


def checksums(state: TrainState) -> dict[str, float]:
    return {name: float(one.double().sum()) for name, one in tensors_of(state).items()}


def forget(file: Path) -> None:
    """Let a file leave the page cache."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def dd(folder: Path, size: int) -> float:
    """Bytes a second that `dd` writes and flushes."""
    file, blocks = folder / "zeros", max(1, size // 2**24)
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=16M", f"count={blocks}", "conv=fsync"]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - began
    file.unlink()
    return blocks * 2**24 / taken


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="weights and moments in all")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write, if not the folder for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
