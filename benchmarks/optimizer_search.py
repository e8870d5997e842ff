"""The search that tunes every row of `optimizers.py`, by the same procedure and as many trials.

A row has two settings to tune, each on a grid of its own: value(k) = start x factor^k, or for decay
rates 1 - value(k) = (1 - start) / factor^k. The search begins at k = 0 for both and goes on:

    round 0    the rate: one step up; while it improves, further up. Only if the first step did not
               improve, one step down, and further down while it improves
               then the other setting, in the same way from the best so far
    round 1    both again with steps of half the size: factor^0.5; then a quarter, and so on

until the trials are used up. Which setting comes next follows from the losses so far and nothing
else, so a search that was interrupted goes on where it was. A run that diverges is worse than any
other; while none has a loss, the rate goes down.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

Position = tuple[float, ...]
"""For each setting the number of steps from its start."""


@dataclass(frozen=True)
class Knob:
    """One setting to tune."""

    setting: str
    """Its name within optim."""
    start: float
    factor: float
    memory: bool = False
    """Whether the factor is that of 1 - value."""

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.factor > 1 and (self.start < 1 or not self.memory)):
            raise ValueError(
                f"{self.setting} cannot start at {self.start:g} and move by factors of "
                f"{self.factor:g}"
            )

    def at(self, steps: float) -> float:
        """The value so many steps from the start, in three digits."""
        if self.memory:
            return round(1 - float(f"{(1 - self.start) / self.factor**steps:.3g}"), 9)
        return float(f"{self.start * self.factor**steps:.3g}")


@dataclass(frozen=True)
class Candidate:
    """Values of the settings that are tuned."""

    values: Mapping[str, float]

    @property
    def words(self) -> list[str]:
        """As on the command line."""
        return [f"optim.{setting}={value:g}" for setting, value in self.values.items()]

    @property
    def text(self) -> str:
        """For tables: the last parts of the names will do."""
        return str(self).replace("=", " ").replace(",", ", ")

    def __str__(self) -> str:
        named = ((setting.rpartition(".")[2], value) for setting, value in self.values.items())
        return ",".join(f"{name}={value:g}" for name, value in named)


def candidate_at(knobs: Sequence[Knob], position: Position) -> Candidate:
    pairs = zip(knobs, position, strict=True)
    return Candidate({knob.setting: knob.at(steps) for knob, steps in pairs})


def positions(settings: int) -> Generator[Position, float, None]:
    """Where to look, one position after the other; the loss of each is sent back."""
    known: dict[Position, float] = {}

    def loss_at(position: Position) -> Generator[Position, float, float]:
        if position not in known:
            known[position] = yield position
        return known[position]

    best: Position = (0.0,) * settings
    lowest = yield from loss_at(best)
    for number in count():
        size = 0.5**number
        for axis in range(settings):
            for sign in (1, -1):
                improved = False
                while True:
                    moved = list(best)
                    moved[axis] += sign * size
                    loss = yield from loss_at(tuple(moved))
                    lost = math.isinf(lowest) and axis == 0 and sign < 0
                    if not (loss < lowest or lost):
                        break
                    best, lowest, improved = tuple(moved), loss, True
                if improved:
                    break


def path(knobs: Sequence[Knob], losses: Mapping[str, float], *, trials: int) -> list[Candidate]:
    """The candidates of a search in its order, up to the first one of which no loss is known."""
    search, found = positions(len(knobs)), list[Candidate]()
    position = next(search)
    while len(found) < trials:
        candidate = candidate_at(knobs, position)
        found.append(candidate)
        if str(candidate) not in losses:
            break
        position = search.send(losses[str(candidate)])
    return found


def next_candidate(
    knobs: Sequence[Knob], losses: Mapping[str, float], *, trials: int
) -> Candidate | None:
    """What to try next, given the losses of candidates by their names; None if the trials are used
    up."""
    last = path(knobs, losses, trials=trials)[-1]
    return None if str(last) in losses else last


def best_candidate(
    knobs: Sequence[Knob], losses: Mapping[str, float], *, trials: int
) -> Candidate | None:
    """The one of the search with the lowest loss; None if none has a loss."""
    found = path(knobs, losses, trials=trials)
    finite = [one for one in found if math.isfinite(losses.get(str(one), math.inf))]
    return min(finite, key=lambda one: losses[str(one)], default=None)
