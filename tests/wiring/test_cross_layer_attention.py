"""Cross-Layer Attention: which visits share keys and values, and what nobody uses."""

from __future__ import annotations

import pytest
import torch

from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case

pytestmark = pytest.mark.method("cross-layer-attention")


@pytest.mark.parametrize(
    ("share", "slots", "writes"),
    [(1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), (2, [0, 0, 1, 1, 2], [0, 2, 4]), (3, [0, 0, 0, 1, 1], [0, 3])],
)
def test_groups_of_visits(share: int, slots: list[int], writes: list[int]) -> None:
    plan = laws.at_first(Case("cross-layer-attention", {"share": share}), LOOPED).plan
    assert [visit.slot for visit in plan.visits] == slots
    assert [visit.index for visit in plan.visits if visit.writes] == writes
    assert plan.slots == max(slots) + 1


def test_visits_without_a_mixer_are_not_counted() -> None:
    plan = laws.at_first(Case("cross-layer-attention"), "0 1.f 1.a 2").plan
    assert [(visit.slot, visit.writes) for visit in plan.visits] == [(0, True), (None, False), (0, False), (1, True)]


@torch.no_grad()
def test_without_sharing_it_is_pre_ln_bit_for_bit() -> None:
    stack = laws.at_first(Case("cross-layer-attention", {"share": 1}), LOOPED)
    plain = laws.at_first(Case("pre-ln"), LOOPED)
    assert torch.equal(stack(laws.tokens()).logits, plain(laws.tokens()).logits)


def test_rows_of_keys_and_values_of_a_layer_that_only_reads_get_no_gradient() -> None:
    stack = laws.changed(Case("cross-layer-attention"), PLAIN)
    stack(laws.tokens()).logits.square().mean().backward()
    rows = [layer.get_parameter("a.sublayer.qkv.weight").grad for layer in stack.layers]
    for layer, grad in enumerate(rows):
        assert grad is not None
        queries, keys = grad[: laws.WIDTH].abs().sum(), grad[laws.WIDTH :].abs().sum()
        assert float(queries) > 1e-6
        assert (float(keys) > 1e-6) == (layer != 1), layer


@torch.no_grad()
def test_a_reader_attends_to_the_keys_and_values_of_its_writer() -> None:
    stack = laws.at_first(Case("cross-layer-attention"), "0.a 1.a")
    before = stack(laws.tokens()).logits
    stack.layers[1].get_parameter("a.sublayer.qkv.weight")[laws.WIDTH :] += 1
    assert torch.equal(stack(laws.tokens()).logits, before)
    stack.layers[0].get_parameter("a.sublayer.qkv.weight")[laws.WIDTH :] += 1
    assert float((stack(laws.tokens()).logits - before).abs().max()) > 1e-6
