"""DeepCrossAttention: its sums written out, the sum of older outputs, and that its gates can open."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case
from tests.wiring.test_history import sites

pytestmark = pytest.mark.method("deep-cross-attention")


def summed(each: Any, sources: list[torch.Tensor]) -> torch.Tensor:
    """One gated sum, source by source."""
    return sum(f * (b + torch.relu(f @ each.w)[..., None]) for f, b in zip(sources, each.b, strict=True))  # pyright: ignore


@torch.no_grad()
@pytest.mark.parametrize("keep", [None, 2])
def test_written_out(keep: int | None) -> None:
    stack: Any = laws.changed(Case("deep-cross-attention", {} if keep is None else {"keep": keep}), LOOPED)
    inputs: dict[int, Any] = {}
    for layer in stack.layers:
        layer.a.register_forward_pre_hook(lambda module, given: inputs.update({given[1].site.index: given[0]}))
    seen, sums = sites(stack), stack.wiring.sums
    outputs: list[torch.Tensor] = []

    def sources() -> list[torch.Tensor]:
        old = outputs[:-keep] if keep else []
        between = [torch.stack(old).sum(0)] if old else []
        return [seen[-1, "stream"], *between, *outputs[len(old) :]]

    for visit in range(5):
        query, key, value = (summed(sums[f"{visit}{way}"], sources()) for way in "qkv")
        for found, expected in zip(inputs[2 * visit][:3], (query, key, value), strict=True):
            torch.testing.assert_close(found, expected)
        a, f = seen[2 * visit, "update"], seen[2 * visit + 1, "update"]
        torch.testing.assert_close(seen[2 * visit + 1, "read"], a + query)
        outputs.append(a + f)
        torch.testing.assert_close(seen[2 * visit + 1, "stream"], seen[-1, "stream"] + sum(outputs))
    torch.testing.assert_close(seen[-1, "end"], summed(sums["end"], sources()))


def test_gates_have_a_gradient_at_first() -> None:
    stack = laws.at_first(Case("deep-cross-attention"), PLAIN)
    stack(laws.tokens()).logits.square().mean().backward()
    for name, parameter in stack.wiring.named_parameters():
        assert parameter.grad is not None
        # of one source with equal gains a gate changes the size alone, which the norm takes away
        if name in ("sums.0k.w", "sums.0v.w"):
            continue
        assert float(parameter.grad.abs().max()) > 1e-8, name


def test_a_visit_of_a_feed_forward_alone_has_one_sum() -> None:
    wiring: Any = laws.at_first(Case("deep-cross-attention"), "0 1.f 2.a").wiring
    assert list(wiring.sums) == ["0q", "0k", "0v", "1q", "2q", "2k", "2v", "end"]
    assert [len(each.b) for each in wiring.sums.values()] == [1, 1, 1, 2, 3, 3, 3, 4]
