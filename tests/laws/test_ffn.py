"""Every registered feed-forward, with its options, under the laws: in a loop, under three wirings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature

import pytest

from deepen.registry import methods
from tests.laws import ffn_laws as laws
from tests.laws.ffn_laws import CASES, WIRINGS, Case

NAMES = [method.name for method in methods("ffn")]
IN_STACKS: list[Callable[[Case, str], None]] = [
    laws.cached_equals_uncached,
    laws.every_parameter_learns,
    laws.gradients_are_right,
    laws.batches_are_independent,
    laws.no_position_sees_a_later_one,
    laws.saved_equals_loaded,
    laws.recomputed_equals_kept,
]
ALONE: list[Callable[[Case], None]] = [
    laws.costs_are_right,
    laws.every_value_is_initial,
    laws.neurons_are_independent,
    laws.adapters_reach_its_maps,
    laws.half_precision_is_near,
]
# A trace takes seconds, so the others are traced in the slow set.
TRACED = ("glu",)
# Those that differ from these in the activation alone have most of their laws in the slow set.
TOLD_APART_BY_ACTIVATION = {"bilinear", "geglu", "glu", "reglu", "relu", "squared-relu"}


def in_stacks() -> Iterator[object]:
    """All laws under Pre-LN, and the first under the other wirings; the slow set has all of them everywhere."""
    for case in CASES:
        for wiring in WIRINGS:
            for place, law in enumerate(IN_STACKS):
                fast = wiring == "pre-ln" or place == 0
                if case.name in TOLD_APART_BY_ACTIVATION:
                    fast = wiring == "pre-ln" and law in (laws.gradients_are_right, laws.saved_equals_loaded)
                marks = [] if fast else [pytest.mark.slow]
                yield pytest.param(law, case, wiring, id=f"{case}-{wiring}-{law.__name__}", marks=marks)


def test_every_feed_forward_and_every_option_has_a_case() -> None:
    assert {case.name for case in CASES} == set(NAMES)
    for name in NAMES:
        kind = Case(name).kind
        given = {option for case in CASES if case.name == name for option in case.options}
        assert set(list(signature(kind).parameters)[1:]) <= given, name


@pytest.mark.parametrize(("law", "case", "wiring"), list(in_stacks()))
def test_law(law: Callable[[Case, str], None], case: Case, wiring: str) -> None:
    law(case, wiring)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("law", ALONE, ids=lambda law: law.__name__)
def test_law_alone(law: Callable[[Case], None], case: Case) -> None:
    law(case)


@pytest.mark.parametrize("case", [
    case if case.name in TRACED else pytest.param(case, marks=pytest.mark.slow) for case in CASES
], ids=str)  # fmt: skip
def test_compiled_equals_eager(case: Case) -> None:
    laws.compiled_equals_eager(case)
