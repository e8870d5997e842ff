"""Our Megatron order against the real megatron-core package, where that is installed.

pip install megatron-core==0.16.1    into an environment of its own, then run this file there
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gristmill.config.schema import DataConfig
from gristmill.data.blend import Greedy, choose, fused_here, greedy_by_weight, greedy_exhaustive
from gristmill.data.build import OrderSpec, build_rules, build_stream
from gristmill.data.dataset import open_data
from gristmill.data.loader import Loader
from gristmill.data.megatron_order import MegatronOrder, build_indices, plan_epochs
from gristmill.data.stream import SampleStream

pytest.importorskip("megatron.core")

from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    _build_document_index,
    _build_shuffle_index,
)
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import from_numpy

VOCABULARY, END = 500, 499
_NUMBERS = itertools.count()


def write(prefix: Path, lengths: list[list[int]], *, seed: int = 0) -> Path:
    """A set in Megatron's own format: documents of several sequences, some of them empty."""
    draw = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sequences in lengths:
        ids = draw.integers(0, VOCABULARY - 1, sum(sequences)).astype(np.uint16)
        if len(ids):
            ids[-1] = END
        builder.add_document(from_numpy(ids.astype(np.int64)), sequences)
    builder.finalize(f"{prefix}.idx")
    return prefix


def theirs(
    prefixes: list[Path],
    *,
    split: str,
    sequence: int,
    seed: int,
    samples: int | None,
    weights: list[float] | None = None,
    cache: Path | None = None,
    masks: tuple[bool, bool, bool] = (False, False, False),
) -> Any:
    tokenizer = SimpleNamespace(
        vocab_size=VOCABULARY, eod=END, pad=-7, unique_identifiers=OrderedDict(name="test")
    )
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence,
        blend=([str(prefix) for prefix in prefixes], weights),
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=masks[0],
        reset_attention_mask=masks[1],
        eod_mask_loss=masks[2],
        path_to_cache=None if cache is None else str(cache / str(next(_NUMBERS))),
    )
    sizes = [samples, None, None] if samples is None or weights is None else [samples, 1, 1]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def ours(paths: Any, *, sequence: int, seed: int, samples: int, **settings: Any) -> SampleStream:
    config = DataConfig(paths=paths, order="megatron", **settings)
    parts = open_data(config, sequence=sequence)
    return build_stream(config, parts.train, OrderSpec(sequence, seed, samples, cache=None))


def lengths_of(kind: str, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    match kind:
        case "short":
            return [[draw.randint(1, 9)] for _ in range(2500)]
        case "long":
            return [[draw.randint(50, 400)] for _ in range(600)]
        case "sequences":
            return [[draw.randint(1, 40) for _ in range(draw.randint(1, 4))] for _ in range(600)]
        case "empty":
            return [[draw.choice([0, 0, 5, 30])] for _ in range(1500)] + [[40]]
        case _:
            return [[100]] * 600


@pytest.mark.parametrize("kind", ["short", "long", "sequences", "empty", "equal"])
@pytest.mark.parametrize("sequence", [7, 16, 100])
@pytest.mark.parametrize("split", ["949,50,1", "98,2,0", "70,20,10"])
def test_the_three_indices_and_the_tokens_are_the_same(
    tmp_path: Path, kind: str, sequence: int, split: str
) -> None:
    prefix = write(tmp_path / "set", lengths_of(kind, 5))
    config = DataConfig(paths=str(prefix), order="megatron", split="90,10,0")
    tokens = len(open_data(config, sequence=1).train.splits[0].reader)
    rest = random.Random(f"{kind} {sequence} {split}")
    whole = tokens // sequence
    for samples in {1, whole, *(rest.randint(1, 4 * whole) for _ in range(4))}:
        seed = rest.choice([0, 1234, 2**32 - 1])
        reference = theirs(
            [prefix], split=split, sequence=sequence, seed=seed, samples=samples, cache=tmp_path
        )
        stream = ours(str(prefix), sequence=sequence, seed=seed, samples=samples, split=split)
        index = stream.indices[0]
        assert isinstance(index, MegatronOrder)
        for mine, other in (
            (index.documents, reference.document_index),
            (index.samples, reference.sample_index),
            (index.shuffle, reference.shuffle_index),
        ):
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other)
        some = np.array([rest.randrange(len(reference)) for _ in range(20)])
        found = stream.read(some).ids_BS
        for row, number in zip(found, some.tolist(), strict=True):
            assert row[:-1].tolist() == reference[number]["tokens"].tolist()
            assert row[1:].tolist() == reference[number]["labels"].tolist()


def test_many_sizes_and_epochs() -> None:
    """The pieces of the algorithm against the library's own functions, over many random cases."""
    draw = random.Random(1)
    seen = set()
    for _ in range(400):
        rows = draw.randint(1, 60)
        lengths = np.array([draw.randint(0, 50) for _ in range(rows)], np.int32)
        lengths[-1] = 60
        first = draw.randint(0, rows - 1)
        part = lengths[first:]
        tokens, sequence = int(part.sum()), draw.randint(2, 59)
        samples = draw.choice([None, draw.randint(1, 6 * tokens // sequence)])
        seed = draw.randrange(2**32)
        epochs = plan_epochs(tokens, sequence=sequence, samples=samples)
        seen.add((epochs.last_separate, epochs.number > 1))
        state = np.random.RandomState(seed)
        numbers = np.arange(first, rows, dtype=np.int32)
        documents = _build_document_index(numbers, epochs.number, state, epochs.last_separate)
        index = helpers.build_sample_idx(
            lengths, documents, sequence, epochs.number, tokens, True, True
        )
        shuffle = _build_shuffle_index(epochs.first_samples, len(index) - 1, state)
        found = build_indices(
            lengths, epochs, rows=range(first, rows), sequence=sequence, seed=seed
        )
        assert np.array_equal(found["documents"], documents)
        assert np.array_equal(found["samples"], index)
        assert np.array_equal(found["shuffle"], shuffle)
    assert seen == {(False, False), (False, True), (True, True)}


WEIGHTS = [
    [0.5, 0.3, 0.2],
    [10.0, 1.0, 1.0],
    [1.0, 1.0, 1.0],
    [0.9, 0.1],
    [0.1, 0.2, 0.3, 0.4],
    [0.7, 0.2, 0.1],
    [0.333, 0.667],
    [1.0] * 20,
    [3.0, 0.001, 1.0],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("size", [1, 100, 30_000])
def test_the_greedy_blend_is_the_same(weights: list[float], size: int) -> None:
    normal = (np.array(weights) / np.sum(weights)).tolist()
    sets, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(sets, numbers, normal, len(normal), size, False)
    found = greedy_by_weight(normal, size=size, fused=fused_here())
    assert np.array_equal(found, sets)


@pytest.mark.parametrize("sizes", [[5, 3], [100, 1, 30], [7000, 20000, 11], [1, 1, 1, 1]], ids=str)
def test_the_exhaustive_blend_is_the_same(sizes: list[int]) -> None:
    total = sum(sizes)
    sets, numbers = np.zeros(total, np.int16), np.zeros(total, np.int64)
    helpers.build_exhaustive_blending_indices(sets, numbers, np.array(sizes), len(sizes))
    assert np.array_equal(greedy_exhaustive(sizes, fused=fused_here()), sets)


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [10, 1, 1], None, "exhaustive"], ids=str)
def test_blends_of_whole_sets_are_the_same(tmp_path: Path, weights: Any) -> None:
    kinds = ("short", "long", "sequences")
    prefixes = [write(tmp_path / kind, lengths_of(kind, 3), seed=n) for n, kind in enumerate(kinds)]
    names = [str(prefix) for prefix in prefixes]
    given = weights if isinstance(weights, list) else None
    paths = dict(zip(names, given, strict=True)) if given else names
    for samples in (1, 150, 900):
        reference = theirs(
            prefixes,
            split="90,10,0",
            sequence=16,
            seed=7,
            samples=None if weights == "exhaustive" else samples,
            weights=None if given is None else [float(weight) for weight in given],
        )
        stream = ours(
            paths,
            sequence=16,
            seed=7,
            samples=samples,
            split="90,10,0",
            blend="exhaustive" if weights == "exhaustive" else None,
        )
        assert isinstance(stream.blend, Greedy)
        assert np.array_equal(stream.blend.choices, reference.dataset_index)
        choice = choose(stream.blend, np.arange(len(reference)))
        assert np.array_equal(choice.sets, reference.dataset_index)
        assert np.array_equal(choice.samples, reference.dataset_sample_index)
        rows = stream.read(np.arange(len(reference))).ids_BS
        for number in range(0, len(reference), 7):
            assert rows[number, :-1].tolist() == reference[number]["tokens"].tolist()


def test_a_single_path_with_a_weight_is_a_blend_of_one(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", lengths_of("short", 3))
    reference = theirs([prefix], split="90,10,0", sequence=16, seed=7, samples=900, weights=[2.0])
    stream = ours({str(prefix): 2.0}, sequence=16, seed=7, samples=900, split="90,10,0")
    rows = stream.read(np.arange(len(reference))).ids_BS
    for number in range(len(reference)):
        assert rows[number, :-1].tolist() == reference[number]["tokens"].tolist()


@pytest.mark.parametrize("masks", list(itertools.product([False, True], repeat=3)), ids=str)
def test_masks_positions_and_weights_are_the_same(
    tmp_path: Path, masks: tuple[bool, bool, bool]
) -> None:
    prefix = write(tmp_path / "set", lengths_of("short", 2))
    reference = theirs(
        [prefix], split="98,2,0", sequence=32, seed=3, samples=40, cache=tmp_path, masks=masks
    )
    config = DataConfig(
        paths=str(prefix),
        order="megatron",
        split="98,2,0",
        reset_positions=masks[0],
        reset_attention=masks[1],
        mask_end_of_text=masks[2],
    )
    parts = open_data(config, sequence=32)
    stream = build_stream(config, parts.train, OrderSpec(32, 3, 40, cache=None))
    loader = Loader(stream, 8, 1, rules=build_rules(config, end_of_text=END))
    (batch,) = loader.step_batches(0)
    for row in range(8):
        other = reference[row]
        positions = np.arange(32) if batch.positions_BT is None else batch.positions_BT[row].numpy()
        assert positions.tolist() == other["position_ids"].tolist()
        weights = (
            np.ones(32) if batch.loss_weights_BT is None else batch.loss_weights_BT[row].numpy()
        )
        assert weights.tolist() == other["loss_mask"].tolist()
        sees = np.tril(np.ones((32, 32), bool))
        if batch.documents_BT is not None:
            documents = batch.documents_BT[row].numpy()
            sees &= documents[:, None] == documents[None, :]
        assert np.array_equal(~sees, other["attention_mask"][0].numpy())
