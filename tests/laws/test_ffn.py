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
    laws.neurons_are_independent,
    laws.every_value_is_initial,
    laws.adapters_reach_its_maps,
    laws.half_precision_is_near,
]
# A trace takes seconds, so the others are traced in the slow set.
TRACED = ("moe-experts=4",)
MORE = ("hash-layer", "moe", "peer")
# One of each mechanism; the others have most of their laws in the slow set.
FULL = {
    "swiglu-bias=True",
    "gelu-bias=True",
    *(str(next(case for case in CASES if case.name == name)) for name in MORE),
}


def in_stacks() -> Iterator[object]:
    """All laws under Pre-LN, and the first under the other wirings; the slow set has all of them everywhere."""
    for case in CASES:
        for wiring in WIRINGS:
            for law in IN_STACKS:
                fast = wiring == "pre-ln" or law is laws.cached_equals_uncached
                if str(case) not in FULL:
                    fast = wiring == "pre-ln" and law is laws.gradients_are_right
                marks = [] if fast else [pytest.mark.slow]
                yield pytest.param(law, case, wiring, id=f"{case}-{wiring}-{law.__name__}", marks=marks)


def alone() -> Iterator[object]:
    """All laws of a feed-forward alone; the first for each case, the others for one of each mechanism."""
    for case in CASES:
        for place, law in enumerate(ALONE):
            marks = [] if str(case) in FULL or place < 2 else [pytest.mark.slow]
            yield pytest.param(law, case, id=f"{case}-{law.__name__}", marks=marks)


def test_every_feed_forward_and_every_option_has_a_case() -> None:
    assert {case.name for case in CASES} == set(NAMES)
    for name in NAMES:
        kind = Case(name).kind
        given = {option for case in CASES if case.name == name for option in case.options}
        assert set(list(signature(kind).parameters)[1:]) <= given, name


@pytest.mark.parametrize(("law", "case", "wiring"), list(in_stacks()))
def test_law(law: Callable[[Case, str], None], case: Case, wiring: str) -> None:
    law(case, wiring)


@pytest.mark.parametrize(("law", "case"), list(alone()))
def test_law_alone(law: Callable[[Case], None], case: Case) -> None:
    law(case)


@pytest.mark.parametrize("case", [
    case if str(case) in TRACED else pytest.param(case, marks=pytest.mark.slow) for case in CASES
], ids=str)  # fmt: skip
def test_compiled_equals_eager(case: Case) -> None:
    laws.compiled_equals_eager(case)
