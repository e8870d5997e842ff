"""Standard errors and comparisons, against values computed by other means."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from gristmill.evaluate.measures import LEAST, Measure, compare, mean, perplexity, ratio


def test_the_mean_and_its_standard_error() -> None:
    items = [1.0, 0.0, 1.0, 1.0] * 4
    found = mean(items)
    assert found.value == 0.75
    assert found.stderr == pytest.approx(statistics.stdev(items) / 4)


def test_few_items_have_no_error_and_no_p_value() -> None:
    few = mean([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert len(few.items) == LEAST - 1 and few.stderr is None
    assert compare(few, mean([one + 9 for one in few.items])) is None
    assert mean([*few.items, 8.0]).stderr is not None


def test_few_items_are_compared_by_students_t() -> None:
    # The standard example of a paired test: ten patients, two drugs (Student, 1908).
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = compare(mean(first), mean(second))
    assert found is not None and found.paired
    assert found.value == pytest.approx(1.58)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    apart = compare(mean(first), mean(second), same_items=False)
    # Welch's test has 17.8 degrees of freedom, of which 17 are counted: 0.0794 becomes 0.0802.
    assert apart is not None and not apart.paired
    assert apart.p == pytest.approx(0.0802, abs=1e-4)


def test_many_items_are_compared_by_the_normal_distribution() -> None:
    first, second = Measure(1.0, 0.1), Measure(1.0 + 1.96 * math.hypot(0.1, 0.2), 0.2)
    found = compare(first, second)
    assert found is not None and found.p == pytest.approx(0.05, abs=1e-4)


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
    equal = ratio([1.0, 3.0, 2.0] * 3, [10, 10, 10] * 3)
    assert equal.stderr == pytest.approx(statistics.stdev([0.1, 0.3, 0.2] * 3) / 3)


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
    values = [float(one) for one in range(1, 11)]
    found = compare(mean(values), mean([one * (1 + 1e-8) for one in values]))
    assert found is not None and found.p == 1.0


def test_nothing_is_said_without_errors() -> None:
    assert compare(Measure(1.0, None), Measure(2.0, 0.1)) is None
