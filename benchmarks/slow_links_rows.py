"""What `slow_links.py` compares: models, ways to train together, and the links they train over."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from network_namespaces import Network, Rate, parse_rate, rate_name

MODELS = {
    "tiny": {"layers": 2, "heads": 2, "width": 64, "context": 32},
    "small": {"layers": 4, "heads": 4, "width": 256, "context": 32},
    "medium": {"layers": 7, "heads": 4, "width": 256, "context": 64},
}
"""With 0.1M, 3.3M and 5.7M parameters. All-reduce among 4 sends 6 bytes for each, in every step."""
EVERY = 10
"""Steps between two exchanges of DiLoCo."""
WINDOW = 4
"""Steps that are timed on each kind of links, where all steps are alike."""


@dataclass(frozen=True)
class Row:
    """A way to train together; `{node}` in its settings is half of the workers."""

    name: str
    settings: tuple[str, ...] = ()
    period: int = 1
    """Steps after which everything repeats."""

    def words(self, workers: int) -> list[str]:
        return [word.format(node=max(1, workers // 2)) for word in self.settings]


def _gossip(topology: str, *more: str, name: str = "") -> Row:
    return Row(name or f"gossip-{topology}", (f"parallel.gossip.topology={topology}", *more))


def _diloco(name: str, *more: str) -> Row:
    return Row(name, (f"parallel.local.every={EVERY} steps", *more), period=EVERY)


ROWS = (
    Row("ddp"),
    Row("ddp-bf16", ("precision.reduce=bf16",)),
    *map(_gossip, ("complete", "ring", "exp", "alternating-exp-ring", "random")),
    _gossip("hierarchical", "parallel.gossip.workers_per_node={node}"),
    _gossip("ring", "optim.type=accum-adamw", "optim.accum=4", name="gossip-ring-accum"),
    _diloco("local-average", "parallel.local.outer=sgd", "parallel.local.outer_lr=1.0"),
    _diloco("diloco"),
    _diloco("diloco-delay-5", "parallel.exchange.delay=5"),
    _diloco("diloco-int8", "parallel.exchange.send=int8"),
    _diloco("diloco-top-k", "parallel.exchange.send=top-k"),
)


@dataclass(frozen=True)
class Links:
    """The links of all workers, and whether the last one is slower than the others."""

    rate: Rate
    slow: str = ""

    @classmethod
    def parse(cls, text: str) -> Links:
        rate, _, slow = text.partition("+")
        if slow not in ("", "slow-link", "slow-cpu") or (rate == "unlimited" and "link" in slow):
            raise argparse.ArgumentTypeError(f"{text!r} is not a rate with +slow-link or +slow-cpu")
        return cls(parse_rate(rate), slow)

    def __str__(self) -> str:
        return rate_name(self.rate) + (f"+{self.slow}" if self.slow else "")

    def apply(self, network: Network) -> None:
        last = self.rate / 10 if self.slow == "slow-link" and self.rate else self.rate
        network.set_rates([*[self.rate] * (network.workers - 1), last])
        network.slow = (network.workers - 1, 0.2) if self.slow == "slow-cpu" else None


@dataclass(frozen=True)
class Stretch:
    """Steps that are timed on the same links."""

    links: Links
    first: int
    """The first step of these, counted from 0."""
    end: int


def stretches(row: Row, links: Sequence[Links], *, workers: int) -> list[Stretch]:
    """One after the other. Where all steps are alike, some come first that are not timed, until a
    slow worker has slowed all others down. Where exchanges are rare, links change between two."""
    if row.period > 1:
        starts = [row.period // 2 + row.period * number for number in range(len(links))]
        return [Stretch(one, at, at + row.period) for one, at in zip(links, starts, strict=True)]
    warm = 1 + workers // 2
    ends = [(warm + WINDOW) * (number + 1) for number in range(len(links))]
    return [Stretch(one, at - WINDOW, at) for one, at in zip(links, ends, strict=True)]
