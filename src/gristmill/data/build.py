"""From settings and opened token sets to the stream of samples: each order is a row of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.config.schema import DataConfig
from gristmill.data.blend import (
    Blend,
    Rotation,
    build_greedy,
    fused_here,
    greedy_by_weight,
    greedy_exhaustive,
    proportional,
)
from gristmill.data.dataset import Mixture, Part
from gristmill.data.documents import JOINED, DocumentRules
from gristmill.data.index_cache import Arrays, cached
from gristmill.data.megatron_order import Indices, MegatronOrder, build_indices, plan_epochs
from gristmill.data.sampling import (
    RandomWindows,
    SequentialWindows,
    ShuffledWindows,
    Windows,
)
from gristmill.data.stream import SampleStream, Source

SURPLUS = 0.005
"""Megatron makes this many more samples of each set than the weights of a blend ask for."""
WORTH_KEEPING = 1 << 20
"""Indices with fewer entries are built at every start, which takes less than a second."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of the order of one run."""

    sequence: int
    seed: int
    samples: int
    """Samples that Megatron's order is made for."""
    cache: Path | None
    """Folder for indices that take long to build; None keeps nothing."""


def build_stream(config: DataConfig, train: Mixture, wanted: Wanted) -> SampleStream:
    """The samples of a run, in its order."""
    return _ORDERS[config.order](config, train, wanted)


def build_rules(config: DataConfig, *, end_of_text: int) -> DocumentRules:
    """What is done about the borders of documents."""
    masked = config.documents == "masked"
    by_ids = config.reset_attention or config.reset_positions
    if not (masked or by_ids or config.mask_end_of_text):
        return JOINED
    return DocumentRules(
        marks="files" if masked else "ids" if by_ids else "none",
        attention=masked or config.reset_attention,
        positions=masked or config.reset_positions,
        unweighted=config.mask_end_of_text,
        end_of_text=end_of_text,
    )


_Order = Callable[[DataConfig, Mixture, Wanted], SampleStream]


def _windows(kind: type[Windows]) -> _Order:
    def build(config: DataConfig, train: Mixture, wanted: Wanted) -> SampleStream:
        # Sets of equal length would otherwise be read at the same places.
        sources = tuple(
            Source(part.text, kind(part.stretch, wanted.sequence, wanted.seed + number))
            for number, part in enumerate(train.parts)
        )
        epochs = [source.index.epoch for source in sources]
        blend: Blend | None = None
        if config.blend == "exhaustive":
            blend = Rotation(tuple(epochs))
        elif len(sources) > 1:
            blend = proportional(train.weights or epochs)
        return SampleStream(sources, blend, wanted.sequence)

    return build


# ------------------------------------------------------------------ Megatron's order


def _megatron(config: DataConfig, train: Mixture, wanted: Wanted) -> SampleStream:
    asked = _asked_of_each(config, train, wanted.samples)
    sources = tuple(
        Source(part.text, _megatron_index(part, wanted, samples=samples))
        for part, samples in zip(train.parts, asked, strict=True)
    )
    blend = None
    if not _single(config, train):
        epochs = [source.index.epoch for source in sources]
        blend = _megatron_blend(config, train.weights, epochs=epochs, wanted=wanted)
    return SampleStream(sources, blend, wanted.sequence)


def _single(config: DataConfig, train: Mixture) -> bool:
    """Whether Megatron sees no blend: it takes a single path with a weight for one, except beside
    separate files for validation."""
    return len(train.parts) == 1 and (train.weights is None or config.validation is not None)


def _asked_of_each(config: DataConfig, train: Mixture, samples: int) -> list[int | None]:
    """Samples that each set makes; None is one epoch."""
    if _single(config, train):
        return [samples]
    if train.weights is None:
        return [None] * len(train.parts)
    return [
        math.ceil(math.ceil(samples * weight) * (1 + SURPLUS))
        for weight in _normalised(train.weights)
    ]


def _normalised(weights: Sequence[float]) -> list[float]:
    numbers = np.array(weights, np.float64)
    return list((numbers / numbers.sum()).tolist())


def _megatron_blend(
    config: DataConfig, weights: Sequence[float] | None, *, epochs: list[int], wanted: Wanted
) -> Blend:
    fused = fused_here()
    key: dict[str, Any] = {"kind": "blend", "fused": fused}
    if config.blend == "exhaustive":
        size, key["sizes"] = sum(epochs), epochs
    elif weights is None:
        size, shares = min(wanted.samples, sum(epochs)), _normalised(epochs)
        key |= {"weights": shares, "size": size}
    else:
        once = _normalised(weights)
        # Megatron adds its weights up to one twice, which can change the last digit.
        size, shares = sum(math.ceil(wanted.samples * w) for w in once), _normalised(once)
        key |= {"weights": shares, "size": size}

    def build() -> Arrays:
        if config.blend == "exhaustive":
            return {"choices": greedy_exhaustive(epochs, fused=fused)}
        return {"choices": greedy_by_weight(shares, size=size, fused=fused)}

    arrays = _kept(wanted.cache, key, build, entries=size)
    return build_greedy(arrays["choices"], sets=len(epochs))


def _megatron_index(part: Part, wanted: Wanted, *, samples: int | None) -> MegatronOrder:
    assert part.rows is not None, "this order divides sets by rows"
    rows = part.rows
    epochs = plan_epochs(len(part.stretch), sequence=wanted.sequence, samples=samples)
    key = {
        "kind": "megatron order",
        "content": part.reader.info.fingerprint,
        "rows": [rows.numbers.begin, rows.numbers.end, len(rows.table)],
        "sequence": wanted.sequence,
        "seed": wanted.seed,
        "epochs": str(epochs),
    }

    def build() -> Arrays:
        return vars(
            build_indices(
                rows.table.lengths,
                rows=rows.numbers,
                sequence=wanted.sequence,
                seed=wanted.seed,
                samples=samples,
            )
        )

    entries = epochs.number * len(rows.numbers) + epochs.samples
    return MegatronOrder(rows.table, Indices(**_kept(wanted.cache, key, build, entries=entries)))


def _kept(
    cache: Path | None, key: Mapping[str, Any], build: Callable[[], Arrays], *, entries: int
) -> Arrays:
    if cache is None or entries < WORTH_KEEPING:
        return build()
    return cached(cache, key, build)


_ORDERS: Mapping[str, _Order] = {
    "shuffled": _windows(ShuffledWindows),
    "random": _windows(RandomWindows),
    "sequential": _windows(SequentialWindows),
    "megatron": _megatron,
}


def order_identity(config: DataConfig, train: Mixture, wanted: Wanted) -> dict[str, Any]:
    """What else than content and order must stay the same for the samples to stay the same."""
    facts: dict[str, Any] = {}
    several = len(train.parts) > 1
    if several:
        facts["data.blend"] = config.blend or "proportion"
        facts["data.paths (weights)"] = None if train.weights is None else list(train.weights)
    if config.order == "megatron":
        asked = _asked_of_each(config, train, wanted.samples)
        facts["data.samples (epochs)"] = [
            str(plan_epochs(len(part.stretch), sequence=wanted.sequence, samples=samples))
            for part, samples in zip(train.parts, asked, strict=True)
        ]
        if several:
            facts["data.blend (rounding)"] = "once" if fused_here() else "twice"
    return facts
