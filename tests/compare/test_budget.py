"""Sizes solved for a budget, against models that are built."""

from __future__ import annotations

import pytest

from deepen.compare.budget import matched, size
from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack

BASE = StackConfig(layers=4, width=32, heads=4, vocabulary=64)
LOOPED = BASE.model_copy(update={"layers": 2, "program": "(0-1)*2"})


def count(config: StackConfig) -> int:
    return sum(parameter.numel() for parameter in Stack(config).parameters())


def test_a_size_counts_a_built_model() -> None:
    assert size(BASE, 64).parameters == count(BASE)
    twice = BASE.model_copy(update={"program": "0-3 0-3"})
    head = 3 * 2 * BASE.width * BASE.vocabulary
    assert size(twice, 64).parameters == count(BASE)
    assert size(twice, 64).flops - head == pytest.approx(2 * (size(BASE, 64).flops - head))


@pytest.mark.parametrize("wiring", ["pre-ln", pytest.param("hyper-connections", marks=pytest.mark.slow)])
def test_a_looped_model_grows_to_the_parameters_of_the_baseline(wiring: str) -> None:
    target = count(BASE)
    found = matched(LOOPED.model_copy(update={"wiring": wiring}), target, unit="parameters", context=64)
    assert count(found) == pytest.approx(target, rel=0.01)
    assert found.width > BASE.width
    assert (found.program, found.layers, found.heads) == (LOOPED.program, 2, 4)


def test_flops_are_matched_at_another_width() -> None:
    target = size(BASE, 64).flops
    deep = BASE.model_copy(update={"layers": 8})
    found = matched(deep, target, unit="flops", context=64)
    assert size(found, 64).flops == pytest.approx(target, rel=0.01)
    assert found.width < BASE.width


def test_the_hidden_width_alone_may_move() -> None:
    found = matched(LOOPED, count(BASE), unit="parameters", context=64, vary="hidden")
    assert found.width == BASE.width
    assert count(found) == pytest.approx(count(BASE), rel=0.01)


def test_what_cannot_be_matched_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no width gives 100 parameters: the nearest is [\d,]+ at width 8, hidden 1"):
        matched(BASE, 100, unit="parameters", context=64)
