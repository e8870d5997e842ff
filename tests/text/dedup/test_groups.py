"""Groups of records, against a plain union of sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gristmill.text.dedup import groups
from gristmill.text.dedup.groups import DropCode, Grouping
from gristmill.text.dedup.sorting import Rows

MEMORY = 100_000


def firsts_of(edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The first of the group of each record that is not the first itself."""
    parent: dict[int, int] = {}

    def find(node: int) -> int:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for one, other in edges:
        low, high = sorted((find(one), find(other)))
        parent[high] = low
    return {node: find(node) for node in sorted(parent) if find(node) != node}


def random_edges(seed: int) -> list[tuple[int, int]]:
    chance = np.random.default_rng(seed)
    nodes = int(chance.integers(5, 1500))
    if seed % 4 == 0:
        # One long chain, the worst case for passing on what is the smallest.
        order = chance.permutation(nodes).tolist()
        pairs = list(itertools.pairwise(order))
    else:
        count = int(chance.integers(1, 2 * nodes))
        pairs = [tuple(pair) for pair in chance.integers(0, nodes, (count, 2)).tolist()]
    return [(max(pair), min(pair)) for pair in pairs if pair[0] != pair[1]]


@pytest.mark.parametrize("seed", range(8))
def test_components(tmp_path: Path, seed: int) -> None:
    edges = random_edges(seed)
    np.array(edges, np.uint64).tofile(tmp_path / "first")
    np.array(edges[::3], np.uint64).tofile(tmp_path / "second")
    grouping = Grouping(tmp_path, MEMORY)
    file = grouping.components([tmp_path / "first", tmp_path / "second"])
    found = np.fromfile(file, np.uint64).reshape(-1, 2).tolist()
    assert found == [list(pair) for pair in firsts_of(edges).items()]
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", file.name}


def split(rows: Rows) -> Iterator[Rows]:
    for begin in range(0, len(rows), 100):
        yield rows[begin : begin + 100]


def test_equal_records(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    # Hashes that share their first number must not be taken for equal ones.
    hashes = chance.integers(0, 60, (6000, 2), np.uint64)
    numbers = np.arange(1, 6001, dtype=np.uint64)
    numbers[:50] = 0
    grouping = Grouping(tmp_path, MEMORY)
    file = grouping.exact(split(np.column_stack([hashes, numbers])))
    first: dict[tuple[int, ...], int] = {}
    expected = []
    for hash, number in zip(map(tuple, hashes.tolist()), numbers.tolist(), strict=True):
        if first.setdefault(hash, number) != number:
            expected.append([number, DropCode.OLDER if first[hash] == 0 else DropCode.EQUAL])
    drops = np.concatenate(list(grouping.drops(file, None)))
    assert drops.tolist() == expected


def test_buckets_join_groups_and_equal_ones_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_PIECE", 7)
    chance = np.random.default_rng(5)
    keys = [chance.integers(0, 900, 1000).astype(np.uint64) for _ in range(2)]
    numbers = np.arange(1000, dtype=np.uint64)
    hashes = np.column_stack([keys[0], keys[0], numbers])
    grouping = Grouping(tmp_path, MEMORY)
    equal = grouping.exact(split(hashes))
    files = [
        grouping.bucket(number, 2, lambda key=key: split(np.column_stack([key, numbers])))
        for number, key in enumerate(keys)
    ]
    drops = np.concatenate(list(grouping.drops(grouping.components([equal, *files]), equal)))
    edges = []
    for key in keys:
        seen: dict[int, int] = {}
        for number, value in enumerate(key.tolist()):
            if seen.setdefault(value, number) != number:
                edges.append((number, seen[value]))
    firsts = firsts_of(edges)
    before: set[int] = set()
    expected = []
    for number, value in enumerate(keys[0].tolist()):
        if number in firsts:
            code = DropCode.EQUAL if value in before else DropCode.NEAR
            expected.append([number, DropCode.OLDER if firsts[number] == 0 else code])
        before.add(value)
    assert drops.tolist() == expected
    assert {code for _, code in expected} == {0, 1, 2}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    rows = np.column_stack([np.ones(9, np.uint64), np.arange(9, dtype=np.uint64)])
    told: list[str] = []
    for _ in range(2):
        grouping = Grouping(tmp_path, MEMORY, told.append)
        file = grouping.bucket(1, 2, lambda: [rows])
        grouping.components([file])
    assert told == ["comparing bucket 2 of 2", "joining groups"]
