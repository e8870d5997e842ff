"""Faults while token sets are merged and converted, and while a cluster of Ray prepares them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_data import products, write_corpus
from fault_kit import (
    ERRORS,
    WRITES,
    Ended,
    Operations,
    Verdict,
    count_operations,
    die,
    fresh,
    gristmill,
    refuse,
)

from gristmill.base.errors import Exit

_STARTS = 4
"""How often a cluster of Ray may be started before it counts as one that cannot be had."""
COPIES = {
    "merge": ("tokens", "merge", "sets/a", "sets/b", "-o", "out/set"),
    "convert": ("tokens", "convert", "sets/a", "-o", "out/set", "--format", "megatron"),
}


@dataclass(frozen=True)
class KilledCopies:
    """SIGKILL at random moments and at file operations of `tokens merge` and `tokens convert`, and
    a refusing disk: the same command then yields the same bytes, and the sources are untouched."""

    name: str = "merging and converting killed, or refused by the disk"
    count: int = 120

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        out, sets = folder / "out", folder / "sets"
        for seed, name in enumerate("ab"):
            write_corpus(folder / name, files=2 + seed, documents=3000)
            made = gristmill(folder, "prepare", name, "-o", f"sets/{name}", "--tokenizer", "bytes")
            assert made.code == 0, made.output
        before = products(sets)
        references, totals, durations = {}, {}, {}
        for name, words in COPIES.items():
            fresh(out)
            totals[name] = count_operations(folder, *words)
            references[name] = products(out)
            fresh(out)
            began = time.monotonic()
            gristmill(folder, *words)
            durations[name] = time.monotonic() - began
        for number in range(count):
            name = rng.choice(list(COPIES))
            words, total = COPIES[name], totals[name]
            fresh(out)
            if number % 3 == 0:
                after = rng.uniform(0, durations[name])
                fault = f"{name} killed after {after:.3f} s"
                ended = gristmill(folder, *words, after=after)
            else:
                at, why, kill = rng.randrange(total), rng.choice(list(ERRORS)), number % 3 == 1
                act = die if kill else refuse(ERRORS[why])
                names = Operations().names if kill else WRITES
                fault = f"{name}: {'killed' if kill else why} at operation {at} of {total}"
                ended = gristmill(folder, *words, before=Operations(names, at=at, act=act).install)
            again = ended if ended.code == 0 else gristmill(folder, *words)
            # Refused, if everything was in place before the kill.
            done = again.code == 0 or (again.code == Exit.REFUSED and "already" in again.output)
            lost = "" if done else f"the same command ends with {again.code}"
            left = [path.name for path in out.iterdir() if path.name.startswith(".")]
            yield Verdict(
                fault,
                lost=lost or ("" if products(sets) == before else "a source has changed"),
                different="" if not done or products(out) == references[name] else "other bytes",
                unclear=again.unclear or (f"leaves {left}" if done and left else ""),
            )


@dataclass(frozen=True)
class LostNodes:
    """A cluster of Ray of a head and two nodes, of which one is killed at a random moment of a
    preparation in parts: its parts run again elsewhere, to the same bytes."""

    name: str = "a node of Ray killed while it prepares"
    count: int = 6

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        if importlib.util.find_spec("ray") is None:
            print("    ray is not installed: pip install 'gristmill[ray]'", file=sys.stderr)
            return
        write_corpus(folder / "text", files=4, documents=8000)
        whole = gristmill(folder, *_prepare("one/set"))
        assert whole.code == 0, whole.output
        reference = products(folder / "one")
        for _ in range(count):
            fresh(folder / "many")
            with _cluster() as (address, nodes, remove):
                words = _prepare("many/set", "--parts", "6", "--engine", "ray")
                process = _start(folder, *words, "--ray-address", address)
                # From the start of Python to the end of the last part.
                after = rng.uniform(2, 20)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(after)
                fault = f"node {rng.randrange(2)} lost after {after:.1f} s"
                remove(nodes[int(fault.split()[1])])
                output = process.communicate(timeout=600)[0]
                ended = Ended(process.returncode, output)
            yield Verdict(
                fault,
                lost="" if ended.code == 0 else f"ends with {ended.code}: {output.strip()[-200:]}",
                different="" if products(folder / "many") == reference else "other bytes",
                unclear=ended.unclear,
            )


def _prepare(name: str, *more: str) -> tuple[str, ...]:
    return ("prepare", "text", "-o", name, "--tokenizer", "bytes", *more)


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gristmill", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, list[Any], Any]]:
    """A head without room for parts and two nodes; how to kill one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = None
    for attempt in range(_STARTS):
        try:
            made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
            nodes = [made.add_node(num_cpus=1) for _ in range(2)]
            break
        except Exception:
            # Ray gives a node 30 seconds to start, which is too little on a busy machine.
            if made is not None:
                made.shutdown()
            if attempt == _STARTS - 1:
                sys.exit("no cluster of Ray can be started here; try again when less runs")
    assert made is not None
    try:
        yield made.address, nodes, lambda node: made.remove_node(node, allow_graceful=False)
    finally:
        made.shutdown()


GROUPS = (KilledCopies(), LostNodes())
