"""Paired statistics against values by hand, by scipy and by counting."""

from __future__ import annotations

import itertools
import math

import pytest
from scipy import stats

from deepen.compare.statistics import NORMAL, STUDENT, bootstrap, paired, sign_test


def test_student_bounds_are_those_of_scipy() -> None:
    for degrees, value in enumerate(STUDENT, start=1):
        assert value == pytest.approx(stats.t.ppf(0.975, degrees), abs=5e-4)
    assert stats.norm.ppf(0.975) == pytest.approx(NORMAL, abs=5e-4)
    one, other = [2.0, 1.9, 2.2, 2.1], [2.3, 2.1, 2.3, 2.6]
    found = paired(one, other)
    wanted = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-3)
    assert found.mean == pytest.approx(-0.275)


def test_pairing_removes_what_seeds_share() -> None:
    shared = [1.0, 3.0, 5.0]
    found = paired([value - 0.1 for value in shared], shared)
    assert found.shown == "lower"
    assert (found.low, found.high) == pytest.approx((-0.1, -0.1))
    unpaired = stats.ttest_ind([value - 0.1 for value in shared], shared).confidence_interval(0.95)
    assert unpaired.low < 0 < unpaired.high


def test_few_seeds_are_resampled_in_every_way() -> None:
    values = [0.0, 1.0, 5.0]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values, repeat=3))
    assert len(means) == 27
    low, high = bootstrap(values)
    assert means[0] <= low <= means[1]
    assert means[-2] <= high <= means[-1]


def test_many_seeds_are_drawn_by_their_own_seed() -> None:
    values = [float(each) for each in range(9)]
    assert bootstrap(values) == bootstrap(values)
    low, high = bootstrap(values)
    assert low < 4.0 < high


@pytest.mark.parametrize(("below", "above"), [(3, 0), (0, 3), (5, 1), (2, 2), (0, 0), (9, 3)])
def test_the_sign_test_is_exact(below: int, above: int) -> None:
    n = below + above
    wanted = stats.binomtest(below, n, 0.5).pvalue if n else 1.0
    assert sign_test(below, above) == pytest.approx(wanted)


def test_three_seeds_of_one_sign_need_more_than_the_sign_test() -> None:
    found = paired([1.0, 1.1, 1.4], [1.2, 1.6, 1.5])
    assert (found.below, found.above, found.sign_p) == (3, 0, 0.25)
    assert found.low < found.bootstrap_low < found.mean < found.bootstrap_high < found.high
    assert found.shown == "not told apart"


def test_one_seed_shows_nothing() -> None:
    found = paired([1.0], [2.0])
    assert math.isnan(found.low)
    assert found.shown == "not told apart"
    assert found.to_json()["low"] is None


def test_seeds_must_pair() -> None:
    with pytest.raises(ValueError, match="same seeds on both sides, got 2 and 1"):
        paired([1.0, 2.0], [1.0])
