"""Every registered wiring, with its options, under the laws: plain, looped and, where it carries one, with a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from deepen.errors import ProgramError
from deepen.registry import methods
from deepen.wiring.base import FEATURES as WORDS
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import CASES, FEATURES, GROUP, LOOPED, PLAIN, Case

NAMES = [method.name for method in methods("wiring")]
LAWS: list[Callable[[Case, str], None]] = [
    laws.every_parameter_learns,
    laws.gradients_are_right,
    laws.cached_equals_uncached,
    laws.batches_are_independent,
    laws.recomputed_equals_kept,
    laws.saved_equals_loaded,
    laws.counts_are_right,
    laws.half_precision_is_near,
    laws.no_position_sees_a_later_one,
]
REFUSALS = [(name, feature) for name in NAMES for feature in Case(name).kind.refuses]
# A trace takes seconds, so the others are traced in the slow set.
TRACED = ("hyper-connections",)
PROGRAMS = {"plain": PLAIN, "looped": LOOPED, "group": GROUP}


def runs() -> Iterator[object]:
    """Wirings with their first options under all laws and programs, other options under half of the laws in a loop."""
    for case in CASES:
        programs = {"looped": LOOPED} if case.options else PROGRAMS
        for label, program in programs.items():
            if laws.carried(case.kind, program):
                for law in LAWS[:4] if case.options else LAWS:
                    # what holds in a loop holds without one; the slow set makes sure
                    marks = [pytest.mark.slow] if label == "plain" else []
                    yield pytest.param(law, case, program, id=f"{case}-{label}-{law.__name__}", marks=marks)


def test_every_wiring_and_every_option_has_a_case() -> None:
    assert {case.name for case in CASES} == set(NAMES)
    for name in NAMES:
        assert laws.options(name) <= {option for case in CASES if case.name == name for option in case.options}


def test_every_stated_equality_has_a_case() -> None:
    stated = {name for name in NAMES if Case(name).kind.equals}
    assert stated | {"layer-scale", "cross-layer-attention"} == {case.name for case in CASES if case.equal}


@pytest.mark.parametrize(("law", "case", "program"), list(runs()))
def test_law(law: Callable[[Case, str], None], case: Case, program: str) -> None:
    law(case, program)


@pytest.mark.parametrize("case", [case for case in CASES if case.equal], ids=str)
def test_equality_at_first(case: Case) -> None:
    stretches = [FEATURES[name] for name in ("scale", "inject", "entry") if name not in case.kind.refuses]
    for program in (PLAIN, LOOPED, GROUP, " ".join(["0 @e", *stretches, "0"])):
        if laws.carried(case.kind, program):
            laws.equals_pre_ln(case, program)
    laws.equals_pre_ln(case, LOOPED, norm="layer", bias=True, qkv_bias=True, feed_forward="gelu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_of_all_layers_is_no_program(case: Case) -> None:
    ids = laws.tokens()
    with torch.no_grad():
        assert torch.equal(laws.changed(case, None)(ids).logits, laws.changed(case, "0 1 2")(ids).logits)


@pytest.mark.parametrize("name", NAMES)
def test_cached_equals_uncached_under_random_programs(name: str) -> None:
    kind = Case(name).kind
    programs = laws.random_programs(kind, seed=len(name), count=3)
    assert len(programs) == 3
    for program in programs:
        laws.cached_equals_uncached(Case(name), program)


@pytest.mark.parametrize("name", [
    name if name in TRACED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES
])  # fmt: skip
def test_compiled_equals_eager(name: str) -> None:
    laws.compiled_equals_eager(Case(name), "(0)*2")


@pytest.mark.parametrize("name", NAMES)
def test_all_features_that_are_not_refused(name: str) -> None:
    case = Case(name)
    program = laws.all_features(case.kind)
    laws.cached_equals_uncached(case, program)
    laws.every_parameter_learns(case, program)
    for feature in laws.NEUTRAL.keys() - case.kind.refuses.keys():
        laws.owned_parameters_begin_neutral(case, feature)


@pytest.mark.parametrize(("name", "feature"), REFUSALS)
def test_a_refusal_names_the_wiring_and_the_reason(name: str, feature: str) -> None:
    case = Case(name)
    with pytest.raises(ProgramError) as found:
        laws.at_first(case, f"0 @e {FEATURES[feature]}")
    assert f"the wiring {name} cannot carry {WORDS[feature]}: {case.kind.refuses[feature]}" in str(found.value)
    assert found.value.column is not None
    assert found.value.column > 5


def test_the_table_has_a_program_for_every_feature() -> None:
    assert set(FEATURES) == set(WORDS)
    for name in NAMES:
        assert set(Case(name).kind.refuses) <= set(WORDS)


@pytest.mark.parametrize("name", [name for name in NAMES if "n..m" not in Case(name).kind.refuses])
def test_a_loop_that_runs_fewer_turns_skips_the_sites_of_the_others(name: str) -> None:
    stack = laws.changed(Case(name), "0 (1)*1..3 2")
    seen: list[int] = []
    stack.on_site(lambda site, what, tensor: seen.append(site.index) if what == "update" else None)
    with torch.no_grad():
        fewer = stack(laws.tokens(), counts={0: 1}).logits
        assert seen == [0, 1, 2, 3, 8, 9]
        assert float((fewer - stack(laws.tokens()).logits).abs().max()) > 1e-6
