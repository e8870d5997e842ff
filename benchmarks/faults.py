"""Inject faults of every kind, seeded, and count what was noticed, lost, different or unclear.

    python benchmarks/faults.py                        all groups
    python benchmarks/faults.py --part 1/3             a third of them, in about ten minutes
    python benchmarks/faults.py --group damaged --count 20 --seed 7

For each fault real commands run: `gristmill prepare`, `tokens verify`, `train`. Afterwards the same
command is started again, with nothing cleaned up by hand, and what it ends with is compared bit for
bit with an undisturbed run. The status is 1 if any fault went unnoticed, lost something, changed a
bit, or ended in a traceback; those are listed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path

# Children of this process compute with one thread, and must not inherit others.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import fault_commands
import fault_data
import fault_hostile
import fault_sets
import fault_settings
import fault_training
from fault_kit import Group, Verdict, fresh

GROUPS: tuple[Group, ...] = (
    *fault_training.GROUPS,
    *fault_data.GROUPS,
    *fault_sets.GROUPS,
    *fault_settings.GROUPS,
    *fault_hostile.GROUPS,
    *fault_commands.GROUPS,
)


USED = ("gristmill.cli.main", "gristmill.train.run", "gristmill.text.prepare.prepare")


def main() -> None:
    options = parse()
    for name in USED:
        # Once, for all children.
        importlib.import_module(name)
    part, parts = map(int, options.part.split("/"))
    chosen = [
        one
        for number, one in enumerate(GROUPS)
        if number % parts == part - 1 and any(word in one.name for word in options.group)
    ]
    print(f"seed {options.seed}, {len(chosen)} groups of faults\n")
    print("| faults | tried | noticed | lost | other bits | unclear | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    total, bad = 0, list[tuple[str, Verdict]]()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for group in chosen:
            verdicts, seconds = run(group, Path(name) / "group", options.count, options.seed)
            total += len(verdicts)
            bad += [(group.name, one) for one in verdicts if one.bad]
            counts = [
                len(verdicts),
                sum(one.noticed for one in verdicts),
                *(sum(bool(getattr(one, f)) for one in verdicts) for f in FIELDS),
            ]
            print(f"| {group.name} | {' | '.join(map(str, counts))} | {seconds:.0f} |", flush=True)
    print(f"\n{total} faults, {len(bad)} of them bad")
    for name, one in bad[:40]:
        print(f"  {name}: {one}")
    sys.exit(bool(bad))


FIELDS = ("lost", "different", "unclear")


def run(group: Group, folder: Path, count: int | None, seed: int) -> tuple[list[Verdict], float]:
    rng, started = random.Random(f"{seed}:{group.name}"), time.monotonic()
    found = list(group.faults(fresh(folder), rng, count or group.count))
    return found, time.monotonic() - started


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default="1/1", help="which part of the groups, such as 2/3")
    parser.add_argument("--group", nargs="*", default=[""], help="only groups with such a name")
    parser.add_argument("--count", type=int, help="faults of each group; its own number otherwise")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
