"""Random cross-layer attention: draws in training, and which visits serve others afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case

pytestmark = pytest.mark.method("random-cross-layer-attention")
NAME, TOKENS = "random-cross-layer-attention", laws.tokens()


def test_the_last_kept_visit_serves_those_after_it() -> None:
    wiring = {"name": NAME, "keep": [0, 3, 6]}
    plan = Stack(StackConfig(layers=8, width=8, heads=2, wiring=wiring)).plan
    writers = {visit.slot: visit.index for visit in plan.visits if visit.writes}
    assert [writers[visit.slot] for visit in plan.visits] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert plan.slots == 3
    mixed = laws.at_first(Case(NAME, {"keep": (0, 2)}), "0 1.f 1.a 2").plan
    assert [(visit.slot, visit.writes) for visit in mixed.visits] == [(0, True), (None, False), (0, False), (1, True)]


@torch.no_grad()
def test_without_crossing_or_with_all_kept_it_is_pre_ln() -> None:
    plain = laws.at_first(Case("pre-ln"), LOOPED)(TOKENS).logits
    for options in ({"p_cross": 0.0}, {"keep": (0, 1, 2, 3, 4)}):
        assert torch.equal(laws.at_first(Case(NAME, options), LOOPED).train()(TOKENS).logits, plain)
    # one that keeps the first alone is cross-layer attention in one group
    one, grouped = laws.at_first(Case(NAME, {"keep": (0,)}), LOOPED), Case("cross-layer-attention", {"share": 5})
    assert torch.equal(one(TOKENS).logits, laws.at_first(grouped, LOOPED)(TOKENS).logits)


def test_the_first_mixer_never_crosses_and_the_others_do_at_the_stated_rate() -> None:
    stack = laws.at_first(Case(NAME, {"p_cross": 0.7}), PLAIN).train()
    sources: list[list[int]] = []
    take: Any = stack.wiring.slot

    def noted(state: Any, site: Any, read: Any) -> Any:
        found = take(state, site, read)
        places = [place for place, pair in enumerate(state.pairs) if found.source is pair]
        sources[-1].append(places[0] if places else len(state.pairs))
        return found

    stack.wiring.slot = noted  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(150):
            sources.append([])
            stack(TOKENS[:1, :2])
    shares = [[sum(drawn[rank] == place for drawn in sources) / 150 for place in range(rank + 1)] for rank in range(3)]
    # 150 draws: four deviations are 0.16
    for found, expected in zip(shares, ([1], [0.7, 0.3], [0.35, 0.35, 0.3]), strict=True):
        assert found == pytest.approx(expected, abs=0.16)


def test_a_visit_that_crosses_uses_none_of_its_own_keys_and_values() -> None:
    stack = laws.at_first(Case(NAME, {"p_cross": 1.0}), "0-1").train()
    shared = laws.at_first(Case("cross-layer-attention"), "0-1", qk_norm=False)
    logits = stack(TOKENS).logits
    laws.close(logits.detach(), shared(TOKENS).logits.detach())
    logits.square().mean().backward()
    grads: Any = [layer.get_parameter("a.sublayer.qkv.weight").grad for layer in stack.layers]
    assert float(grads[0][laws.WIDTH :].abs().max()) > 1e-8
    assert not grads[1][laws.WIDTH :].any()


@pytest.mark.parametrize("keep", [(1, 2), (0, 5), ()])
def test_kept_visits_that_cannot_be_are_refused(keep: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="expected 0 and others of the 3 mixers of the program"):
        laws.at_first(Case(NAME, {"keep": keep}), PLAIN)
