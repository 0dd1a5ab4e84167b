"""MUDDFormer: its four ways written out, and DenseFormer as its special case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, Case
from tests.wiring.test_history import sites, tiny

pytestmark = pytest.mark.method("muddformer")


def mixed(mix: Any, left: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the ways after a visit hold, token by token."""
    newest = left[-1]
    normed = newest / newest.square().mean(-1, keepdim=True).sqrt()
    shares = (F.gelu(normed @ mix.read) @ mix.give).unflatten(-1, mix.fixed.shape) + mix.fixed
    return [sum(shares[..., way, j, None] * x for j, x in enumerate(left)) for way in range(len(mix.fixed))]  # pyright: ignore


@torch.no_grad()
def test_four_ways_written_out() -> None:
    stack: Any = laws.changed(Case("muddformer"), LOOPED)
    inputs: dict[int, Any] = {}
    for layer in stack.layers:
        layer.a.register_forward_pre_hook(lambda module, given: inputs.update({given[1].site.index: given[0]}))
    seen = sites(stack)
    left, ways = [seen[-1, "stream"]], [seen[-1, "stream"]] * 4
    for visit in range(5):
        read = inputs[2 * visit]
        for found, expected in zip((read.u, read.k, read.v), ways, strict=False):
            if found is not None:
                torch.testing.assert_close(found, expected)
        assert (read.k is None) == (visit == 0)
        inside = ways[-1] + seen[2 * visit, "update"]
        torch.testing.assert_close(seen[2 * visit + 1, "read"], inside)
        left.append(inside + seen[2 * visit + 1, "update"])
        ways = mixed(stack.wiring.mixes[visit], left)
    assert len(ways) == 1
    torch.testing.assert_close(seen[-1, "end"], ways[0])


@torch.no_grad()
def test_one_way_of_fixed_weights_is_denseformer() -> None:
    dense, one = laws.changed(Case("denseformer"), LOOPED), laws.at_first(Case("muddformer", {"ways": 1}), LOOPED)
    one.load_state_dict({**one.state_dict(), **{
        name: value for name, value in dense.state_dict().items() if not name.startswith("wiring.")
    }})  # fmt: skip
    for visit, mix in enumerate(one.wiring.get_submodule("mixes").children()):
        mix.get_parameter("fixed").copy_(dense.wiring.get_parameter(f"weights.{visit}"))
    laws.close(one(laws.tokens()).logits, dense(laws.tokens()).logits)


def test_sizes_are_the_papers() -> None:
    mixes = tiny("muddformer", 17).mixes
    # 4 ways over 2, 16, 17 sources; the last visit has one way over 18, and four times as many columns
    sizes = {0: (64, 8), 14: (128, 64), 15: (128, 68), 16: (128, 18)}
    for visit, (hidden, gives) in sizes.items():
        assert tuple(mixes[visit].give.shape) == (hidden, gives)


@torch.no_grad()
def test_a_visit_without_a_mixer_has_one_way() -> None:
    wiring: Any = laws.at_first(Case("muddformer"), "0 1.f 1.a 2").wiring
    assert [len(mix.fixed) for mix in wiring.mixes] == [1, 4, 4, 1]
