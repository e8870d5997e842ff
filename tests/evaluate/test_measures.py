"""Standard errors and comparisons, against values computed by other means."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from gristmill.evaluate.measures import Measure, compare, mean, perplexity, ratio


def test_the_mean_and_its_standard_error() -> None:
    found = mean([1.0, 0.0, 1.0, 1.0])
    assert found.value == 0.75
    assert found.stderr == pytest.approx(statistics.stdev([1, 0, 1, 1]) / 2)
    assert mean([1.0]).stderr is None


def test_the_error_of_a_perplexity_agrees_with_resampling() -> None:
    rng = random.Random(0)
    logs = [-rng.gammavariate(2, 1.0) for _ in range(400)]
    found = perplexity(logs)
    assert found.value == pytest.approx(math.exp(-statistics.fmean(logs)))
    drawn = [perplexity(rng.choices(logs, k=len(logs))).value for _ in range(400)]
    assert found.stderr == pytest.approx(statistics.stdev(drawn), rel=0.15)


def test_a_ratio_weighs_clusters_by_their_size() -> None:
    found = ratio([10.0, 24.0, 3.0], [10, 20, 2])
    assert found.value == pytest.approx(37 / 32)
    assert statistics.fmean(found.items) == pytest.approx(found.value)
    equal = ratio([1.0, 3.0, 2.0], [10, 10, 10])
    assert equal.stderr == pytest.approx(statistics.stdev([0.1, 0.3, 0.2]) / math.sqrt(3))


def test_right_and_wrong_answers_are_compared_by_mcnemar() -> None:
    first = mean([1.0] * 20 + [0.0] * 9 + [1.0])
    second = mean([1.0] * 20 + [1.0] * 9 + [0.0])
    found = compare(first, second)
    assert found is not None and found.paired and found.significant
    # 1 of 10 against: twice the chance of at most one head in ten tosses.
    assert found.p == pytest.approx(2 * 11 / 1024)
    assert found.value == pytest.approx(8 / 30)
    same = compare(first, first)
    assert same is not None and same.p == 1.0 and not same.significant


def test_pairing_sees_what_single_errors_hide() -> None:
    rng = random.Random(1)
    hard = [rng.gauss(3, 1) for _ in range(200)]
    first = mean(hard)
    second = mean([one - 0.05 + rng.gauss(0, 0.1) for one in hard])
    found = compare(first, second)
    apart = compare(Measure(first.value, first.stderr), Measure(second.value, second.stderr))
    assert found is not None and found.significant and found.paired
    assert apart is not None and not apart.significant and not apart.paired


def test_rounding_is_no_difference() -> None:
    values = [1.0, 2.0, 3.0]
    found = compare(mean(values), mean([one * (1 + 1e-8) for one in values]))
    assert found is not None and found.p == 1.0


def test_nothing_is_said_without_errors() -> None:
    assert compare(Measure(1.0, None), Measure(2.0, 0.1)) is None
