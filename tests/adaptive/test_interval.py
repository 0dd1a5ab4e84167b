"""The paired interval against its definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from deepen.probe.interval import paired_difference
from deepen.probe.perplexity import Evaluation


def evaluation(losses: list[float], tokens: list[int]) -> Evaluation:
    return Evaluation(
        nll=sum(losses), tokens=sum(tokens), bytes=1, windows=len(losses), context=8, read=1, seconds=1.0,
        window_nll=tuple(losses), window_tokens=tuple(tokens),
    )  # fmt: skip


def test_the_value_is_the_difference_of_the_means() -> None:
    found = paired_difference(evaluation([3.0, 5.0], [2, 4]), evaluation([2.0, 3.0], [2, 4]))
    assert found.value == pytest.approx(8 / 6 - 5 / 6)
    assert found.ratio == pytest.approx(math.exp(0.5))


def test_pairing_takes_out_what_windows_have_in_common() -> None:
    dice = np.random.default_rng(0)
    base = dice.uniform(10, 1000, 40)
    two = evaluation(base.tolist(), [10] * 40)
    one = evaluation((base + 1 + dice.normal(0, 0.1, 40)).tolist(), [10] * 40)
    found = paired_difference(one, two)
    assert 0.09 < found.low < found.value < found.high < 0.11


def test_the_interval_covers_as_often_as_it_says() -> None:
    dice = np.random.default_rng(1)
    zero = evaluation([0.0] * 30, [1] * 30)
    covered = 0
    for seed in range(300):
        found = paired_difference(evaluation(dice.normal(1, 1, 30).tolist(), [1] * 30), zero, draws=400, seed=seed)
        covered += found.low <= 1 <= found.high
    assert 0.88 < covered / 300 < 0.99


def test_other_windows_are_refused() -> None:
    one = evaluation([1.0, 2.0], [3, 3])
    for other in (evaluation([1.0, 2.0], [3, 4]), replace(one, window_tokens=(), window_nll=())):
        with pytest.raises(ValueError, match="same windows"):
            paired_difference(one, other)
