"""Builds the stream of samples from settings and token sets. Each order is a row of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.config.mixture import Stage, by_source, source_names
from gristmill.config.schema import DataConfig
from gristmill.data.blend import (
    Blend,
    Greedy,
    Rotation,
    fused_here,
    greedy_by_weight,
    greedy_exhaustive,
    proportional,
)
from gristmill.data.dataset import DatasetSplit, Mixture
from gristmill.data.index_cache import Arrays, cached
from gristmill.data.loader import JOINED, DocumentRules
from gristmill.data.megatron_order import MegatronOrder, build_indices, plan_epochs
from gristmill.data.mixture import MixturePlan, plan_identity, plan_mixture
from gristmill.data.sampling import (
    PackedShuffled,
    RandomWindows,
    SampleIndex,
    SequentialWindows,
    ShuffledWindows,
    Windows,
)
from gristmill.data.stream import SampleStream

MIXTURE = "data.stage (order)"
"""The key of a run's identity that may change for samples that are not consumed yet."""
SURPLUS = 0.005
"""Megatron builds each set's index for this share of samples more than the weights need."""
WORTH_CACHING = 1 << 20
"""Indices with fewer entries are built at every start, which takes less than a second."""


@dataclass(frozen=True)
class OrderSpec:
    """The inputs of a run's sample order, besides its data."""

    sequence: int
    seed: int
    samples: int
    """Samples for which Megatron's order is built."""
    cache: Path | None
    """Folder for indices that take long to build; None caches nothing."""
    end: int = 0
    """Samples of the whole run."""
    stages: tuple[Stage, ...] = ()
    """The stages of the mixture, if it changes over the run."""


_WINDOWS: dict[str, type[Windows]] = {
    "shuffled": ShuffledWindows,
    "random": RandomWindows,
    "sequential": SequentialWindows,
}


def build_stream(config: DataConfig, train: Mixture, spec: OrderSpec) -> SampleStream:
    """The samples of a run, in its order."""
    if config.by_rows:
        return _megatron_stream(config, train, spec)
    # With the same seed, sets of equal length would be read at the same positions.
    indices = tuple(
        _index(config, split, spec, seed=spec.seed + number)
        for number, split in enumerate(train.splits)
    )
    epochs = [index.epoch for index in indices]
    blend: Blend | None = None
    if (plan := build_plan(config, train, spec)) is not None:
        blend = plan.blend
    elif config.blend == "exhaustive":
        blend = Rotation(tuple(epochs))
    elif len(indices) > 1:
        blend = proportional(train.weights or epochs)
    sets = tuple(split.source for split in train.splits)
    return SampleStream(sets, indices, blend, spec.sequence)


def build_plan(config: DataConfig, train: Mixture, spec: OrderSpec) -> MixturePlan | None:
    """The plan by which stages and limits mix the sources; None for a run with neither."""
    if config.stage is None and config.max_epochs is None:
        return None
    stages = spec.stages
    if not stages:
        weights = tuple(map(float, train.weights or epochs_of(config, train, spec)))
        stages = (Stage(0, spec.end, weights),)
    limits = epoch_limits(config, epochs_of(config, train, spec))
    return plan_mixture(stages, limits, names=source_names(config.sources))


def epochs_of(config: DataConfig, train: Mixture, spec: OrderSpec) -> list[int]:
    """Samples of each set in one epoch of it."""
    return [_index(config, split, spec, seed=0).epoch for split in train.splits]


def epoch_limits(config: DataConfig, epochs: Sequence[int]) -> list[int | None]:
    """The most samples of each set that may be read, given the samples of an epoch."""
    limits = config.max_epochs
    if not isinstance(limits, dict):
        return [None if limits is None else int(limits * epoch) for epoch in epochs]
    found = by_source(limits, config.sources)
    return [
        int(found[number] * epoch) if number in found else None
        for number, epoch in enumerate(epochs)
    ]


def _index(config: DataConfig, split: DatasetSplit, spec: OrderSpec, *, seed: int) -> SampleIndex:
    if split.packing is not None:
        return PackedShuffled(split.packing, seed)
    return _WINDOWS[config.order](split.tokens, spec.sequence, seed)


def build_rules(config: DataConfig, *, end_of_text: int) -> DocumentRules:
    """How document boundaries are treated."""
    masked = config.documents == "masked"
    by_ids = config.reset_attention or config.reset_positions
    if not (masked or by_ids or config.mask_end_of_text):
        return JOINED
    return DocumentRules(
        doc_starts="files" if masked else "ids" if by_ids else "none",
        attention=masked or config.reset_attention,
        positions=masked or config.reset_positions,
        unweighted=config.mask_end_of_text,
        end_of_text=end_of_text,
    )


# ------------------------------------------------------------------ Megatron's order


def _megatron_stream(config: DataConfig, train: Mixture, spec: OrderSpec) -> SampleStream:
    requested = _requested_samples(config, train, spec.samples)
    indices = tuple(
        _megatron_index(split, spec, samples=samples, order=config.order)
        for split, samples in zip(train.splits, requested, strict=True)
    )
    blend: Blend | None = None
    if not _is_single(config, train):
        epochs = [index.epoch for index in indices]
        blend = _megatron_blend(config, train.weights, epochs=epochs, spec=spec)
    sets = tuple(split.source for split in train.splits)
    return SampleStream(sets, indices, blend, spec.sequence)


def _is_single(config: DataConfig, train: Mixture) -> bool:
    """Whether Megatron sees no blend. It treats a single path with a weight as one, except next to
    separate validation files."""
    return len(train.splits) == 1 and (train.weights is None or config.validation is not None)


def _requested_samples(config: DataConfig, train: Mixture, samples: int) -> list[int | None]:
    """The samples requested from each set; None is one epoch."""
    if _is_single(config, train):
        return [samples]
    if train.weights is None:
        return [None] * len(train.splits)
    weights = _normalized(train.weights)
    if config.order == "megatron-deepspeed":
        return [math.ceil(samples * weight * (1 + SURPLUS)) for weight in weights]
    return [math.ceil(math.ceil(samples * weight) * (1 + SURPLUS)) for weight in weights]


def _normalized(weights: Sequence[float]) -> list[float]:
    numbers = np.array(weights, np.float64)
    return list((numbers / numbers.sum()).tolist())


def _megatron_blend(
    config: DataConfig, weights: Sequence[float] | None, *, epochs: list[int], spec: OrderSpec
) -> Blend:
    fused, exhaustive = fused_here(), config.blend == "exhaustive"
    if exhaustive or weights is None:
        shares, size = _normalized(epochs), sum(epochs)
        size = size if exhaustive else min(spec.samples, size)
    else:
        once = _normalized(weights)
        # Megatron normalizes its weights twice, which can change the last digit.
        shares, size = _normalized(once), sum(math.ceil(spec.samples * w) for w in once)
    facts = {"sizes": epochs} if exhaustive else {"weights": shares, "size": size}

    def build() -> Arrays:
        if exhaustive:
            return {"choices": greedy_exhaustive(epochs, fused=fused)}
        return {"choices": greedy_by_weight(shares, size=size, fused=fused)}

    key = {"kind": "blend", "fused": fused, **facts}
    arrays = cached(spec.cache if size >= WORTH_CACHING else None, key, build)
    return Greedy(arrays["choices"], sets=len(epochs))


def _megatron_index(
    split: DatasetSplit, spec: OrderSpec, *, samples: int | None, order: str
) -> MegatronOrder:
    table, rows = split.source.rows, split.rows
    assert table is not None and rows is not None, "this order splits sets by rows"
    epochs = plan_epochs(len(split.tokens), sequence=spec.sequence, samples=samples, order=order)
    facts = {"sequence": spec.sequence, "seed": spec.seed}
    key = {
        "kind": "megatron order",
        "content": split.reader.info.fingerprint,
        "rows": [rows.start, rows.stop, len(table)],
        **facts,
        "epochs": str(epochs),
    }

    def build() -> Arrays:
        return build_indices(table.lengths, epochs, rows=rows, **facts)

    large = epochs.number * len(rows) + epochs.samples >= WORTH_CACHING
    return MegatronOrder(table, **cached(spec.cache if large else None, key, build))


def order_identity(config: DataConfig, train: Mixture, spec: OrderSpec) -> dict[str, Any]:
    """What else, besides content and order, determines the samples."""
    facts: dict[str, Any] = {}
    if (plan := build_plan(config, train, spec)) is not None:
        # Only the samples already consumed must stay the same: see `same_until`.
        return {MIXTURE: plan_identity(plan)}
    several = len(train.splits) > 1
    if several:
        facts["data.blend"] = config.blend or "proportion"
        facts["data.paths (weights)"] = None if train.weights is None else list(train.weights)
    if config.by_rows:
        requested = _requested_samples(config, train, spec.samples)
        facts["data.samples (epochs)"] = [
            str(
                plan_epochs(
                    len(split.tokens), sequence=spec.sequence, samples=samples, order=config.order
                )
            )
            for split, samples in zip(train.splits, requested, strict=True)
        ]
        if several:
            facts["data.blend (rounding)"] = "once" if fused_here() else "twice"
    return facts
