"""What the records of steps tell of each source of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.config.mixture import source_names
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Loader


@dataclass(frozen=True)
class RunSources:
    """The sources of a run, by name."""

    names: tuple[str, ...]
    taken: Callable[[int], list[int]]
    """How many of the first samples are from each."""
    sequence: int

    def told(self, samples: int, by_source: Sequence[float]) -> dict[str, dict[str, Any]]:
        """What is recorded of a step after which so many samples are done, given the sum of losses
        and the counted tokens of each source."""
        count = len(self.names)
        losses, counted = by_source[:count], by_source[count:]
        read = self.taken(samples)
        return {
            name: {
                "loss": losses[number] / counted[number] if counted[number] else None,
                "tokens": read[number] * self.sequence,
            }
            for number, name in enumerate(self.names)
        }


def run_sources(config: RunConfig, loader: Loader) -> RunSources | None:
    """The sources of a run, if their losses are recorded."""
    if not loader.notes_sources:
        return None
    stream = loader.stream
    return RunSources(source_names(config.data.sources), stream.taken, stream.sequence)
