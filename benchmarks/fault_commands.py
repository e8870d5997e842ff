"""Commands of other programs that ask for the impossible, and other runs that cannot be gone on
from."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fault_kit import Verdict, cut, difference, flip, garbage, gristmill, remove, sha256, steps_of
from fault_training import RUN, TRAIN, start, stopped_run

MEGATRON = {
    "--num-layers": "2", "--hidden-size": "64", "--num-attention-heads": "4",
    "--seq-length": "32", "--max-position-embeddings": "32", "--micro-batch-size": "2",
    "--global-batch-size": "8", "--train-iters": "50", "--lr": "3e-4", "--save-interval": "10",
    "--data-path": "tokens",
}  # fmt: skip
IMPOSSIBLE = [
    *(
        {name: value}
        for name in MEGATRON
        if name != "--data-path"
        for value in ("-5", "0", "x", "1e999", "nan")
    ),
    {"--num-attention-heads": "7"},
    {"--hidden-size": "63"},
    {"--max-position-embeddings": "16"},
    {"--micro-batch-size": "3"},
    {"--min-lr": "1"},
    {"--lr-warmup-iters": "60"},
    {"--lr-warmup-fraction": "2"},
    {"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "60"},
    {"--lr-warmup-init": "1", "--lr-warmup-iters": "5"},
    {"--decoupled-lr": "1e-4", "--decoupled-min-lr": "1"},
    {"--attention-dropout": "1.5"},
    {"--hidden-dropout": "-0.1"},
    {"--split": "0,0,0"},
    {"--split": "abc"},
    {"--rotary-percent": "0.01", "--position-embedding-type": "rope"},
    {"--step-batch-size-schedule": "0:2 64:8 999999:8"},
    {"--vocab-file": "alone.json"},
]
"""Values that no run can have, in the place of those above or beside them."""


@dataclass(frozen=True)
class ImpossibleCommands:
    """Options of Megatron whose values no run can have: refused, with the name of an option."""

    name: str = "impossible commands of Megatron"
    count: int = len(IMPOSSIBLE)

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        gristmill(folder, "translate")
        before = sorted(folder.iterdir())
        for change in rng.sample(IMPOSSIBLE, min(count, len(IMPOSSIBLE))):
            words = [word for pair in (MEGATRON | change).items() for word in pair]
            ended = gristmill(folder, "translate", "megatron", "--", *words)
            named = any(name in ended.output for name in MEGATRON | change)
            yield Verdict(
                " ".join(f"{name} {value}" for name, value in change.items()),
                noticed=ended.code != 0,
                lost="" if sorted(folder.iterdir()) == before else "a file was made",
                unclear=ended.unclear or ("" if named else "no option is named"),
            )


@dataclass(frozen=True)
class DamagedOtherRun:
    """A run begins from a checkpoint of another one that is damaged: an older one is used, and the
    other run stays as it is."""

    name: str = "another run to go on from is damaged"
    count: int = 40

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        reference = start(folder)
        half = stopped_run(folder)
        other, run = folder / "other", folder / "victim"
        text = RUN.format(steps=12)
        (folder / "run.toml").write_text(
            text.replace("[checkpoint]\n", '[checkpoint]\nload = "other"\n')
        )
        for _ in range(count):
            for path in (other, run):
                shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(half, other)
            newest = other / "checkpoints" / f"step-{max(steps_of(other)):08d}"
            file = rng.choice(sorted(newest.iterdir()))
            how = rng.choice([flip, cut, garbage, remove])(file, rng)
            before = _content(other)
            ended = gristmill(folder, *TRAIN)
            different = ""
            if ended.code == 0:
                different = difference(run, reference, history=False)
            yield Verdict(
                f"{newest.name}/{file.name}: {how}",
                noticed="passed over the damaged checkpoint" in ended.output,
                lost="" if _content(other) == before else "the other run was changed",
                different=different or ("" if ended.code == 0 else f"status {ended.code}"),
                unclear=ended.unclear,
            )


def _content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): sha256(path) for path in files}


GROUPS = (ImpossibleCommands(), DamagedOtherRun())
