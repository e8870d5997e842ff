"""Faults while a run trains, saves, stops and resumes; damage to what it left; poisoned batches."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fault_kit import (
    DAMAGE,
    ERRORS,
    POLITE,
    WRITES,
    Ended,
    Operations,
    Verdict,
    count_operations,
    cut,
    die,
    difference,
    flip,
    fresh,
    garbage,
    gristmill,
    refuse,
    remove,
    steps_of,
)

RUN = """
name = "victim"
folder = "victim"
[model]
layers = 2
heads = 2
width = 16
context = 24
dropout = 0.1
[data]
paths = "tokens"
split = "90,10"
[train]
until = "{steps} steps"
batch = 4
[optim]
lr = 1e-2
[validate]
every = "4 steps"
windows = 4
[checkpoint]
every = "3 steps"
[runtime]
device = "cpu"
threads = 1
"""
WORDS = "the mill turns and grinds the corn into flour while water runs below the wheel".split()
EVERY = 3
TRAIN = ("train", "run.toml")


def write_text(path: Path, *, words: int = 4000, seed: int = 5) -> None:
    rng = random.Random(seed)
    lines = (" ".join(rng.choices(WORDS, k=20)) for _ in range(words // 20))
    path.write_text("\n".join(lines))


def start(folder: Path, *, steps: int = 12) -> Path:
    """Token files, a run file, and an undisturbed run to compare with."""
    write_text(folder / "text.txt")
    made = gristmill(folder, "prepare", "text.txt", "-o", "tokens", "--tokenizer", "bytes")
    assert made.code == 0, made.output
    (folder / "run.toml").write_text(RUN.format(steps=steps))
    ended = gristmill(folder, *TRAIN)
    assert ended.code == 0, ended.output
    return (folder / "victim").rename(folder / "undisturbed")


def complete(folder: Path, reference: Path, fault: str, ended: Ended) -> Verdict:
    """Start the run again after a fault, until it is done, and compare."""
    unclear = "" if ended.code in (-signal.SIGKILL, 75) else ended.unclear
    again = gristmill(folder, *TRAIN)
    different = ""
    if again.code == 0:
        different = difference(folder / "victim", reference)
    return Verdict(
        fault,
        lost="" if again.code == 0 else f"the restart ended with {again.code}",
        different=different,
        unclear=unclear or again.unclear,
    )


@dataclass(frozen=True)
class Interruptions:
    """Signals at random moments, again and again, until the run is done. After SIGKILL at most the
    steps since the last checkpoint are gone, after the others none."""

    name: str
    count: int
    signals: tuple[signal.Signals, ...]

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder, steps=40)
        began = time.monotonic()
        gristmill(folder, *TRAIN)
        duration = time.monotonic() - began
        run, done = folder / "victim", 0
        shutil.rmtree(run)
        while done < count or run.exists():
            before = newest_step(run)
            send, after = rng.choice(self.signals), rng.uniform(0, duration * 0.7)
            ended = gristmill(folder, *TRAIN, after=after if done < count else None, send=send)
            if ended.code == 0:
                different = difference(run, reference)
                shutil.rmtree(run)
                if different:
                    yield Verdict("the end of a chain", different=different)
                continue
            done += 1
            newest, reached = newest_step(run), last_step(run)
            lost = "" if newest >= before else f"checkpoint {before}"
            if (
                reached - newest > (2 * EVERY if send == signal.SIGKILL else 0)
                and ended.code != 130
            ):
                lost = f"{reached - newest} steps"
            expected = (-send,) if send == signal.SIGKILL else (75, 130)
            unclear = "" if ended.code in expected else ended.unclear or f"status {ended.code}"
            yield Verdict(f"{send.name} after {after:.3f} s", lost=lost, unclear=unclear)


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max(steps_of(run), default=0) if run.exists() else 0


def last_step(run: Path) -> int:
    """The last step in the metrics."""
    if not (run / "metrics.jsonl").is_file():
        return 0
    for line in reversed((run / "metrics.jsonl").read_bytes().splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


@dataclass(frozen=True)
class KilledOperations:
    """SIGKILL right before a file operation: in every phase of starting, saving and thinning."""

    name: str = "training killed at a file operation"
    count: int = 240

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        total = count_operations(folder, *TRAIN)
        for _ in range(count):
            shutil.rmtree(folder / "victim", ignore_errors=True)
            at = rng.randrange(total)
            ended = gristmill(folder, *TRAIN, before=Operations(at=at, act=die).install)
            yield complete(folder, reference, f"killed before operation {at} of {total}", ended)


@dataclass(frozen=True)
class FullDisk:
    """The disk refuses an operation once, or everything above a size."""

    name: str = "disk full, over quota, failing"
    count: int = 120

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        total = count_operations(folder, *TRAIN, names=WRITES)
        for number in range(count):
            shutil.rmtree(folder / "victim", ignore_errors=True)
            if number % 4 == 3:
                size = rng.randrange(200, 80_000)
                fault = f"files of at most {size} bytes"
                before = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
            else:
                why, at = rng.choice(list(ERRORS)), rng.randrange(total)
                fault = f"{why} at write {at} of {total}"
                before = Operations(WRITES, at=at, act=refuse(ERRORS[why])).install
            yield complete(folder, reference, fault, gristmill(folder, *TRAIN, before=before))


@dataclass(frozen=True)
class FullFileSystem:
    """A small file system that is really full, and then has room again; needs root."""

    name: str = "a full file system"
    count: int = 24

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        run = folder / "victim"
        run.mkdir()
        for number in range(count):
            by_inodes = number % 4 == 3
            size = (
                f"nr_inodes={rng.randrange(8, 60)}"
                if by_inodes
                else f"size={4 * rng.randrange(8, 250)}k"
            )
            mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(run)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                print("  not tried: mounting a file system needs root")
                return
            try:
                ended = gristmill(folder, *TRAIN)
                larger = ["mount", "-o", "remount,size=64m,nr_inodes=100000", str(run)]
                subprocess.run(larger, check=True)
                yield complete(folder, reference, f"a file system of {size}", ended)
            finally:
                subprocess.run(["umount", str(run)], check=True)


@dataclass(frozen=True)
class DamagedCheckpoints:
    """The newest checkpoint is damaged in any way: the one before it is used."""

    name: str = "damaged checkpoints"
    count: int = 300

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        half = stopped_run(folder)
        for _ in range(count):
            run = folder / "victim"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(half, run)
            newest = run / "checkpoints" / f"step-{max(steps_of(run)):08d}"
            file = rng.choice(sorted(newest.iterdir()))
            how = rng.choice([*DAMAGE, swap_with_older])(file, rng)
            ended = gristmill(folder, *TRAIN)
            yield Verdict(
                f"{newest.name}/{file.name}: {how}",
                noticed="skipped damaged checkpoint" in ended.output,
                lost="" if ended.code == 0 else f"status {ended.code}",
                different=difference(run, reference) if ended.code == 0 else "",
                unclear=ended.unclear,
            )


def stopped_run(folder: Path) -> Path:
    """A run that was stopped after step 9."""
    ended = gristmill(folder, *TRAIN, before=partial(stop_after, 9))
    assert ended.code == 75, ended.output
    return (folder / "victim").rename(folder / "half")


def stop_after(steps: int) -> None:
    """Ask the run of this process to stop after a step."""
    call_after(steps, lambda: os.kill(os.getpid(), signal.SIGTERM))


def call_after(steps: int, act: Callable[[], object]) -> None:
    """Do something after a step of this process's run."""
    from gristmill.train.stop import StopRequest

    seen = 0

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal seen
        seen += 1
        if seen == steps:
            act()

    StopRequest.check_time = check  # type: ignore[method-assign]


def swap_with_older(file: Path, rng: random.Random) -> str:
    older = sorted(file.parent.parent.glob("step-*"))[0]
    shutil.copyfile(older / file.name, file)
    return f"that of {older.name}"


@dataclass(frozen=True)
class DamagedSideFiles:
    """Everything else in a run folder may be damaged or gone: the run goes on all the same."""

    name: str = "damaged side files"
    count: int = 240

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        half = stopped_run(folder)
        best = (reference / "checkpoints" / "best.json").read_text()
        names = ["checkpoints/best.json", "metrics.jsonl", "run.toml"] * 3
        names += ["status.json", "origin.txt", "environment.json", "train.log"]
        names += [str(p.relative_to(half)) for p in (half / "tokenizer").rglob("*") if p.is_file()]
        for _ in range(count):
            run = folder / "victim"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(half, run)
            file = run / rng.choice(names)
            how = rng.choice([flip, flip, flip, cut, garbage, remove])(file, rng)
            ended = gristmill(folder, *TRAIN)
            different = difference(run, reference, history=False) if ended.code == 0 else ""
            if ended.code == 0 and (run / "checkpoints" / "best.json").read_text() != best:
                different = "another best.json"
            yield Verdict(
                f"{file.relative_to(run)}: {how}",
                lost="" if ended.code == 0 else f"the run is blocked, status {ended.code}",
                different=different,
                unclear=ended.unclear,
            )


@dataclass(frozen=True)
class LostProcesses:
    """One of several processes is killed, frozen, or slowed. Three and more show in which order
    sums are made."""

    name: str
    count: int
    processes: int
    settings: tuple[str, ...] = ()

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder, steps=150)
        shutil.rmtree(reference)
        words = ["train", "run.toml", f"--processes={self.processes}", "parallel.timeout=5s"]
        words += ["train.batch=12", *self.settings]
        command = [sys.executable, "-m", "gristmill", *words]
        began = time.monotonic()
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        duration = time.monotonic() - began
        run = folder / "victim"
        run.rename(reference)
        for number in range(count):
            what = ("killed", "frozen", "slowed")[number % 3]
            shutil.rmtree(run, ignore_errors=True)
            with (folder / "errors.txt").open("wb") as errors:
                job = subprocess.Popen(command, cwd=folder, stdout=errors, stderr=errors)
            time.sleep(rng.uniform(0.6, 0.95) * duration)
            place = rng.randrange(self.processes)
            done = _disturb(job, place, what)
            code = job.wait()
            said = (folder / "errors.txt").read_text()
            fault = f"rank {place} {what}"
            if what == "slowed" or not done:
                yield Verdict(fault, unclear="" if code == 0 else f"status {code}: {said[-200:]}")
                continue
            named = f"rank {place} " in (said.strip().splitlines() or [""])[-1]
            unclear = "" if code in (0, 76) else f"status {code}: {said[-200:]}"
            again = subprocess.run(command, cwd=folder, capture_output=True, check=False)
            yield Verdict(
                fault,
                noticed=named or code == 0,
                lost="" if again.returncode == 0 else f"status {again.returncode}",
                different=difference(run, reference) if again.returncode == 0 else "",
                unclear=unclear,
            )


def _disturb(job: subprocess.Popen[bytes], place: int, what: str) -> bool:
    """Do something to one of the processes of a job; whether it was still there."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    if len(children) <= place:
        return False
    victim = int(children[place])
    try:
        if what == "killed":
            os.kill(victim, signal.SIGKILL)
        elif what == "frozen":
            os.kill(victim, signal.SIGSTOP)
        else:
            for _ in range(5):
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.3)
                os.kill(victim, signal.SIGCONT)
                time.sleep(0.1)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class MovedFolders:
    """The run folder is moved or deleted while the run trains: it stops, and makes no other. Where
    it was moved, the run goes on."""

    name: str = "run folders moved and deleted"
    count: int = 40

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        run, away = folder / "victim", folder / "away"
        for number in range(count):
            for path in (run, away):
                shutil.rmtree(path, ignore_errors=True)
            deleted, step = number % 4 == 3, rng.randrange(1, 12)
            take = partial(shutil.rmtree, run) if deleted else partial(os.rename, run, away)
            ended = gristmill(folder, *TRAIN, before=partial(call_after, step, take))
            made = run.exists()
            again = gristmill(folder, *TRAIN, *([] if deleted else ["folder=away"]))
            different = difference(run if deleted else away, reference) if again.code == 0 else ""
            yield Verdict(
                f"{'deleted' if deleted else 'moved'} after step {step}",
                noticed="moved or deleted" in ended.output,
                lost="a folder was made in its place" if made else "",
                different=different or ("" if again.code == 0 else f"status {again.code}"),
                unclear=ended.unclear or again.unclear,
            )


@dataclass(frozen=True)
class PoisonedBatches:
    """Some batches are noise. The guard skips them, or goes back and passes over them, and a run
    that is stopped and resumed meanwhile decides alike."""

    name: str = "poisoned batches"
    count: int = 16

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        for number in range(count):
            action = ("skip", "rollback")[number % 2]
            fresh(folder)
            length = 1 if action == "skip" else 4
            first = rng.randrange(50, 75)
            steps = range(first, first + length)
            _poisoned_text(folder / "text.txt", steps, rng)
            gristmill(folder, "prepare", "text.txt", "-o", "tokens", "--tokenizer", "bytes")
            (folder / "run.toml").write_text(RUN.format(steps=100))
            words = [
                *TRAIN,
                "data.split=100,0",
                "data.order=sequential",
                "model.dropout=0",
                "schedule.type=constant",
                f"train.guard.action={action}",
                "train.guard.window=32",
                "checkpoint.every=10 steps",
            ]
            whole = gristmill(folder, *words)
            reference = (folder / "victim").rename(folder / "undisturbed")
            found = skipped_batches(reference)
            wanted = set(steps)
            noticed = wanted <= found and len(found) <= len(wanted) + 3
            stop = gristmill(folder, *words, after=rng.uniform(0.2, 1.0), send=signal.SIGTERM)
            again = gristmill(folder, *words)
            ok = whole.code == again.code == 0 and stop.code in (0, 75)
            yield Verdict(
                f"{action}, noise at steps {list(steps)}, found at {sorted(found)}",
                noticed=noticed,
                different=difference(folder / "victim", reference) if ok else "",
                unclear=whole.unclear or again.unclear or ("" if ok else stop.unclear or "status"),
            )


def _poisoned_text(path: Path, steps: range, rng: random.Random) -> None:
    write_text(path, words=3000, seed=rng.randrange(10**6))
    text, per_step = path.read_text(), 4 * 24
    noise = "".join(chr(rng.randrange(33, 126)) for _ in range(len(steps) * per_step))
    begin, end = (steps.start - 1) * per_step, (steps.stop - 1) * per_step
    path.write_text(text[:begin] + noise + text[end:])


def skipped_batches(run: Path) -> set[int]:
    """The steps whose samples were skipped, from the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    ranges = json.loads((newest / "state.json").read_text())["health"]["passed_over"]
    return {sample // 4 + 1 for begin, end in ranges for sample in range(begin, end)}


GROUPS = (
    Interruptions("training killed at random moments", 240, (signal.SIGKILL,)),
    KilledOperations(),
    Interruptions("TERM, INT, USR1 and HUP at random moments", 80, POLITE),
    LostProcesses("one of three replicas killed, frozen, slowed", 12, 3),
    LostProcesses(
        "one of four processes with K-FAC killed, frozen, slowed",
        6,
        4,
        ('optim.preconditioner.type="kfac"', "parallel.dp_shard=2"),
    ),
    MovedFolders(),
    DamagedCheckpoints(),
    DamagedSideFiles(),
    FullDisk(),
    FullFileSystem(),
    PoisonedBatches(),
)
