"""Wrong settings and wrong command lines: refused in one clear message, before anything is made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fault_kit import Verdict, gristmill
from fault_training import RUN, write_text

from gristmill.base.errors import Exit
from gristmill.config.invalid import setting_paths

WRONG = (
    "[[1, 2], [3]]",
    "{ deep = { deeper = 1 } }",
    "1979-05-27T07:32:00Z",
    '"\\u0000"',
    "-1e400",
    "nan",
)
"""Values that no setting can have."""

SETTINGS = (
    "train.until=0 steps",
    "train.until=-5 steps",
    "train.until=ten steps",
    "train.until=10",
    "train.batch=0",
    "train.batch=-4",
    "train.batch=3.5",
    "train.micro_batch=3",
    "train.clip=-1",
    "train.seed=-1",
    "train.guard.threshold=0",
    "train.guard.window=3",
    "train.guard.patience=2",
    "train.guard.action=explode",
    "model.heads=3",
    "model.width=0",
    "model.width=20000000",
    "model.layers=-1",
    "model.context=0",
    "model.vocab=3",
    "model.kv_heads=5",
    "optim.lr=-1",
    "optim.lr=abc",
    "optim.type=adamm",
    "optim.beta1=1.5",
    "schedule.type=linea",
    "schedule.warmup=2.0",
    "data.paths=nowhere",
    "data.split=1,2,3,4",
    "data.split=0,0",
    "data.split=a,b",
    "data.order=backwards",
    "data.sequence=100000",
    "data.tokenizer=nowhere",
    "precision.compute=fp12",
    'precision.fp8=["tail"]',
    "runtime.device=tpu",
    "runtime.threads=0",
    "runtime.threads=100000",
    "runtime.offload=weights",
    "parallel.tp=2",
    "parallel.pp=3",
    "parallel.dp_shard=auto2",
    "parallel.timeout=1s",
    "parallel.compare=3 steps",
    "checkpoint.keep=1",
    "checkpoint.every=0 steps",
    "validate.windows=0",
    "sample.every=5",
    "track.every=often",
    "name=../up",
    "name=",
    "folder=run.toml",
    "preset=gpt5",
    "no equals sign",
    "=5",
    "a..b=5",
    "train=5",
    "model=[]",
)

COMMANDS = (
    ("train",),
    ("train", "nowhere.toml"),
    ("train", "tokens.bin"),
    ("train", "run.toml", "--from", "7"),
    ("train", "run.toml", "--from", "best"),
    ("train", "run.toml", "--processes", "0"),
    ("train", "run.toml", "--no-such-option"),
    ("replay", "run.toml", "5"),
    ("evaluate", "nowhere"),
    ("generate", "nowhere", "text"),
    ("export", "nowhere", "out"),
    ("report", "nowhere"),
    ("config", "nowhere.toml"),
    ("prepare", "nowhere.txt", "-o", "out"),
    ("prepare", "", "-o", "out"),
    ("prepare", "text.txt"),
    ("prepare", "text.txt", "-o", "out", "--tokenizer", "nowhere"),
    ("prepare", "text.txt", "-o", "out", "--format", "zip"),
    ("prepare", "text.txt", "-o", "out", "--split", "1"),
    ("prepare", "text.txt", "-o", "tokens", "--tokenizer", "bytes", "--documents", "line"),
    ("tokens", "verify", "nowhere"),
    ("tokens", "inspect", "text.txt"),
    ("tokens", "convert", "tokens", "-o", "tokens"),
    ("tokenizer", "train", "nowhere", "-o", "out"),
    ("unknown",),
)


@dataclass(frozen=True)
class WrongSettings:
    """Every setting with a misspelled name or an impossible value, and many that are wrong in ways
    of their own."""

    name: str = "wrong settings and command lines"
    count: int = 900

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        write_text(folder / "text.txt")
        made = gristmill(folder, "prepare", "text.txt", "-o", "tokens", "--tokenizer", "bytes")
        assert made.code == 0, made.output
        (folder / "run.toml").write_text(RUN.format(steps=3))
        names = [".".join(path) for path in setting_paths()]
        chosen: list[tuple[str, ...]] = [("train", "run.toml", one) for one in SETTINGS]
        chosen += COMMANDS
        while len(chosen) < count:
            name = rng.choice(names)
            if rng.random() < 0.5:
                at = rng.randrange(len(name) + 1)
                word = f"{name[:at]}{rng.choice('xyzq')}{name[at:]}=1"
            else:
                word = f"{name}={rng.choice(WRONG)}"
            chosen.append(("train", "run.toml", word))
        rng.shuffle(chosen)
        before = sorted(path.name for path in folder.iterdir())
        for words in chosen[:count]:
            ended = gristmill(folder, *words)
            left = sorted(path.name for path in folder.iterdir())
            yield Verdict(
                " ".join(words),
                noticed=ended.code not in (Exit.DONE, Exit.STOPPED),
                lost=f"made or removed: {set(left) ^ set(before)}" if left != before else "",
                unclear=ended.unclear,
            )


GROUPS = (WrongSettings(),)
