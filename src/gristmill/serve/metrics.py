"""Counts for Prometheus, in its text format.

# TYPE gristmill_requests_total counter
gristmill_requests_total{route="/v1/completions",status="200"} 17
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gristmill.web.call import CLIENT_LEFT

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass
class Histogram:
    """How often values were at most so large."""

    bounds: Sequence[float]
    total: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str) -> Iterator[str]:
        """It in Prometheus's format."""
        below = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {below}"


@dataclass(frozen=True)
class ModelState:
    """A loaded model, at the moment."""

    name: str
    slots: int
    active: int
    waiting: int


class Metrics:
    """What a server counts."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generated = 0
        self.loads = 0
        """Models that were loaded, also newer checkpoints."""
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_BETWEEN)

    def token_times(self, seconds: float, count: int, first: bool) -> None:
        """So many tokens came so long after those before them, or after the request."""
        if first:
            self.first_token.add(seconds)
        else:
            self.between_tokens.add(seconds / count, count)

    def text(
        self,
        models: Sequence[ModelState],
        *,
        requests: Mapping[tuple[str, int], int],
        running: int,
    ) -> str:
        """All of it, for Prometheus; so many requests were answered by route and status, and
        `running` are being answered."""
        return "\n".join([*_request_lines(requests), *self._lines(models, running), ""])

    def _lines(self, models: Sequence[ModelState], running: int) -> Iterator[str]:
        for name, kind, what, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens generated.", self.generated),
            ("model_loads_total", "counter", "Models loaded.", self.loads),
            ("requests_running", "gauge", "Requests that are being answered.", running),
            ("models_loaded", "gauge", "Models in memory.", len(models)),
        ):
            yield from _head(f"gristmill_{name}", kind, what)
            yield f"gristmill_{name} {value}"
        for name, what in (
            ("slots", "Sequences that a model continues at once."),
            ("slots_used", "Slots that are taken."),
            ("queue", "Sequences that wait for a slot."),
        ):
            yield from _head(f"gristmill_{name}", "gauge", what)
            key = {"slots": "slots", "slots_used": "active", "queue": "waiting"}[name]
            for model in models:
                label = _escaped(model.name)
                yield f'gristmill_{name}{{model="{label}"}} {getattr(model, key)}'
        for name, what, histogram in (
            ("time_to_first_token_seconds", "From a request to its first token.", self.first_token),
            ("inter_token_seconds", "From one token to the next.", self.between_tokens),
        ):
            yield from _head(f"gristmill_{name}", "histogram", what)
            yield from histogram.lines(f"gristmill_{name}")


def _request_lines(requests: Mapping[tuple[str, int], int]) -> Iterator[str]:
    name = "gristmill_requests_total"
    yield from _head(name, "counter", f"Requests; status {CLIENT_LEFT}: the client left.")
    for (route, status), count in sorted(requests.items()):
        yield f'{name}{{route="{route}",status="{status}"}} {count}'


def _head(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
