"""The breakdown of step records by source of a mixture."""

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
    """Returns how many of the first samples are from each source."""
    sequence: int

    def told(self, samples: int, by_source: Sequence[float]) -> dict[str, dict[str, Any]]:
        """The breakdown in the record of a step, after which `samples` are consumed. `by_source`:
        the sums of losses, followed by the counted tokens, of each source."""
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
