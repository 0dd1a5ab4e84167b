"""The counted cost of a stack is what it does: parameters, visits, slots, bytes, FLOPs of linear maps."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack
from tests.laws.programs import random_program
from tests.stack.test_stack import TOKENS, stack


def measured_flops(model: Stack, tokens: torch.Tensor) -> float:
    """FLOPs a token of all linear maps, counted as they run."""
    total = 0.0

    def count(module: nn.Linear, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal total
        total += 2.0 * args[0].numel() / args[0].shape[-1] * module.weight.numel()

    handles = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return total / tokens.numel()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("wiring", ["pre-ln", "hyper-connections"])
def test_counted_is_measured(seed: int, wiring: str) -> None:
    # a part that is never visited is stored with its layer in a stack, and the cost counts visited parts alone
    model = stack(
        random_program(Random(seed), 4, parts=False, kv=False), seed=seed, wiring=wiring, norm="layer", bias=True
    )
    found = stack_cost(model, 9)
    assert found.params == sum(parameter.numel() for parameter in model.parameters())
    attention = sum(4 * 4 * 4 * 9 for visit in model.plan.visits)
    assert found.flops - attention == pytest.approx(measured_flops(model, TOKENS), rel=1e-9)
    cache = model.new_cache()
    with torch.no_grad():
        model(TOKENS, cache=cache)
    assert found.slots == len([keys for keys in cache.keys if keys is not None])
    # two sequences of fp64 here, one of fp32 in the cost
    assert found.cache_bytes * 4 == cache.bytes
    assert found.visits == len(model.plan.visits)


def test_visits_that_read_a_slot_compute_no_keys() -> None:
    shared, own = stack("0 (1-2)*3[kv=first] 3"), stack("0 (1-2)*3 3")
    saved = stack_cost(own, 16).flops - stack_cost(shared, 16).flops
    # four visits save two projections of two heads of width 4 from a width of 16
    assert saved == 4 * 2 * 2 * 16 * 8


def test_owned_parameters_and_counts_are_counted() -> None:
    model = stack("0 @e (1-2)*1..3[lora=2,emb,inject=e:concat] 3")
    assert stack_cost(model, 9).params == sum(parameter.numel() for parameter in model.parameters())
    assert stack_cost(model, 9, counts={0: 1}).visits == 4
    windowed = stack("0-3", window=3)
    assert stack_cost(stack("0-3"), 9).flops - stack_cost(windowed, 9).flops == 4 * 4 * 4 * 4 * 6
