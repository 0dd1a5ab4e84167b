"""Experts of native stacks: all of them are the dense stack, and groups that fire together cost nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.checkpoint.stack_folder import write_stack
from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.sublayers.ffn.moefied import Moefied
from deepen.surgery import stack_experts
from deepen.surgery.stack_experts import active_experts, split_experts

FIELDS: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2, "hidden": 12, "vocabulary": 20, "context": 16}


def stack_of(**fields: Any) -> Stack:
    stack = Stack(StackConfig.read({**FIELDS, **fields}), seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return stack


def tokens() -> torch.Tensor:
    return torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(3))


@pytest.mark.method("moefied")
@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [
        {"feed_forward": "swiglu"},
        {"feed_forward": "gelu", "bias": True, "program": "0 (1)*2 2"},
        {"feed_forward": "reglu", "bias": True, "wiring": "hyper-connections"},
    ],
    ids=["gated", "loop", "streams"],
)
@pytest.mark.parametrize(
    "how",
    [
        {"router": "mlp", "steps": 2},
        {"router": "similarity", "by": "weights"},
        {"router": "oracle"},
        {"method": "factor-llm", "steps": 2},
    ],
    ids=["mlp", "similarity", "oracle", "factor-llm"],
)
def test_all_experts_are_the_dense_stack(fields: dict[str, Any], how: dict[str, Any]) -> None:
    stack, ids = stack_of(**fields), tokens()
    before = stack(ids).logits
    split = split_experts(stack, [ids], experts=4, active=4, **how).stack
    assert torch.equal(stack(ids).logits, before)
    assert float((split(ids).logits - before).abs().max()) < 1e-10
    fewer = active_experts(split, 1)
    assert float((fewer(ids).logits - before).abs().max()) > 1e-3
    # every expert, chosen one by one as a sparse pass does it, adds up to the dense feed-forward
    whole: Any = split.layers[0].get_submodule("f.sublayer")
    x = torch.randn(5, 8, dtype=torch.float64)
    parts = whole.experts(x, torch.arange(4).expand(5, 4))
    assert float((parts - whole._dense(x)).abs().max()) < 1e-10


@torch.no_grad()
def grouped_stack() -> tuple[Stack, list[list[int]]]:
    """A stack of ReLU neurons of which a group fires for a token and the others are silent; their groups."""
    stack = stack_of(feed_forward="relu", layers=1)
    dense: Any = stack.layers[0].get_submodule("f.sublayer")
    groups = [list(range(start, 12, 3)) for start in range(3)]
    dense.up.weight.zero_()
    for at, group in enumerate(groups):
        # of three directions that the feed-forward reads, one is positive
        dense.up.weight[group] = (
            torch.linspace(1, 2, 4, dtype=torch.float64)[:, None] * torch.eye(8, dtype=torch.float64)[at]
        )
    return stack, groups


def reads(_: Stack, dense: list[Any], batches: Any) -> Any:
    """Tokens along one of three axes each, with a little of nothing else."""
    axis = torch.arange(60) % 3
    found = -torch.ones(60, 8) + 3 * torch.eye(8)[axis]
    return stack_experts.FeedInputs(program="", tower="", reads={0: found})


@torch.no_grad()
@pytest.mark.parametrize("router", ["oracle", "mlp", "similarity"])
def test_neurons_that_fire_together_are_found_and_one_expert_loses_nothing(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, groups = grouped_stack()
    monkeypatch.setattr(stack_experts, "_reads", reads)
    found = split_experts(stack, [], experts=3, active=1, router=router, steps=200)
    moefied: Any = found.stack.layers[0].get_submodule("f.sublayer")
    dense: Any = stack.layers[0].get_submodule("f.sublayer")
    for expert in range(3):
        own = moefied.experts.up[expert]
        assert any(torch.equal(own, dense.up.weight[group]) for group in groups)
    assert found.figures["recall"] == pytest.approx(1)
    assert found.figures["error"] == pytest.approx(0, abs=1e-9)
    x = reads(stack, [], [])
    u = x.reads[0].double()
    chosen = moefied._chosen(moefied.router(u)) if moefied.router is not None else None
    y = moefied._dense(u) if chosen is None else moefied.experts(u, chosen)
    assert float((y - dense.down(torch.relu(dense.up(u)))).abs().max()) < 1e-9


def lowest(self: Any, scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(self.top, largest=False).indices


def as_they_lie(gram: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(len(gram))


def rows_alone_are_moved(dense: Any, *given: Any, **more: Any) -> Any:
    """The columns out stay where they were."""
    made = RIGHT_SPLIT(dense, *given, **more)
    down = dense.down.weight.detach().unflatten(1, (given[0].experts, -1)).transpose(0, 1)
    return stack_experts._New({**made.tensors, "experts.down": down}, made.figures)


RIGHT_SPLIT = stack_experts._split


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Moefied, "_chosen", lowest),
        (stack_experts, "clusters", as_they_lie),
        (stack_experts, "_split", rows_alone_are_moved),
    ],
    ids=["lowest", "as-they-lie", "rows-alone"],
)
def test_a_wrong_copy_is_caught(owner: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError), monkeypatch.context() as patch:
        test_neurons_that_fire_together_are_found_and_one_expert_loses_nothing("oracle", patch)


@torch.no_grad()
def test_what_is_saved_and_opened_has_the_same_logits(tmp_path: Path) -> None:
    stack, ids = stack_of(feed_forward="geglu").float(), tokens()
    split = split_experts(stack, [ids], experts=3, active=2, steps=3).stack
    write_stack(split, tmp_path)
    again = deepen.open(tmp_path).load()
    assert torch.equal(again(input_ids=ids).logits, split(ids).logits)


@pytest.mark.parametrize(
    ("changes", "fields", "told"),
    [
        ({"experts": 5}, {}, "12 neurons cannot be split into 5 experts of equal size"),
        ({"active": 5}, {}, "5 active of 4 experts"),
        ({"method": "moefy"}, {}, "method 'moefy' is unknown; there are moefication, factor-llm"),
        ({"router": "linear"}, {}, "router 'linear' is unknown"),
        ({}, {"feed_forward": {"name": "moe", "experts": 2}}, "is not a dense one of two maps"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], fields: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"experts": 4, "active": 2, **changes}
    with pytest.raises(UsageError, match=told):
        split_experts(stack_of(**fields), [tokens()], **given)


def test_too_few_tokens_and_a_stack_without_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="the data holds 3 tokens for the feed-forward of layer 0"):
        split_experts(stack_of(), [tokens()[:1, :3]], experts=4, active=2)
    with pytest.raises(UsageError, match=r"expected batches, such as \[tokens\]; got one tensor"):
        split_experts(stack_of(), tokens(), experts=4, active=2)
    with pytest.raises(UsageError, match=r"not one of experts that deepen\.split_experts made"):
        active_experts(stack_of(), 2)
    split = split_experts(stack_of(), [tokens()], experts=4, active=2, router="oracle").stack
    with pytest.raises(UsageError, match="top 5 of 4 experts"):
        active_experts(split, 5)
