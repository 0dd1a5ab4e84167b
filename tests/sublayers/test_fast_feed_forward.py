"""The fast feed-forward and its form with a master leaf: the tree, soft and hard, the losses and the schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.sublayers.contract import Out, Read
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.fast_feed_forward import FastFeedForward
from deepen.sublayers.ffn.master_leaf import MasterLeaf
from deepen.sublayers.ffn.relu import ReLU
from deepen.sublayers.ffn.tree import Tree
from tests.laws import ffn_laws as laws
from tests.laws.ffn_laws import Case, context
from tests.laws.wiring_laws import close

HARD = (
    Case("fast-feed-forward", {"depth": 2}, {"hidden": 3}),
    Case("fast-feed-forward", {"depth": 10}, {"hidden": 1, "bias": True}),
    Case("master-leaf", {"depth": 2}, {"hidden": 3}),
)


def filled(kind: Any = FastFeedForward, *, width: int = 6, hidden: int = 3, bias: bool = True, **options: Any) -> Any:
    """One with random parameters, in double precision and evaluation."""
    made: Any = kind(Sizes(width=width, hidden=hidden, bias=bias), **options).double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return made


def inputs(tokens: int = 40, width: int = 6) -> torch.Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def run(module: Any, u: torch.Tensor, valid: torch.Tensor | None = None) -> Out:
    return module(Read(u), context(valid=valid))


def by_loop(module: FastFeedForward, u: torch.Tensor) -> torch.Tensor:
    """Hard inference of each token by itself, down the tree and through one leaf."""
    rows = []
    for x in u[0]:
        node, leaf = 0, 0
        for _ in range(module.tree.depth):
            right = int(x @ module.tree.weight[node] + module.tree.bias[node] >= 0)
            node, leaf = 2 * node + 1 + right, 2 * leaf + right
        assert module.up_bias is not None
        assert module.down_bias is not None
        hidden = F.relu(module.up[leaf] @ x + module.up_bias[leaf])
        rows.append(hidden @ module.down[leaf] + module.down_bias[leaf])
    return torch.stack(rows)[None]


@pytest.mark.method("fast-feed-forward")
@pytest.mark.parametrize("depth", [1, 3, 10])
@pytest.mark.parametrize("way", ["gathered", "grouped", "all"])
@torch.no_grad()
def test_hard_inference_is_a_loop_over_tokens_by_every_way(depth: int, way: Any) -> None:
    module, u = filled(depth=depth, hidden=2), inputs()
    leaf = module.tree.leaf(u[0])
    assert len(set(leaf.tolist())) > depth, "tokens reach several leaves"
    close(module.one(u[0], leaf, way)[None], by_loop(module, u), 1e-12)
    close(run(module, u).y, by_loop(module, u), 1e-12)


@pytest.mark.method("fast-feed-forward")
@torch.no_grad()
def test_a_decision_of_at_least_zero_goes_right() -> None:
    module = filled(depth=2, width=2, hidden=1)
    with torch.no_grad():
        # the root looks at the first value, the nodes below it at the second; leaf l gives l
        module.tree.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
        module.tree.bias.zero_()
        module.down.zero_()
        module.down_bias.copy_(torch.arange(4.0)[:, None].expand(4, 2))
    u = torch.tensor([[[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    assert run(module, u).y[0, :, 0].tolist() == [0, 1, 2, 3, 3]


@pytest.mark.method("fast-feed-forward")
@torch.no_grad()
def test_soft_becomes_hard_as_the_temperature_falls() -> None:
    soft, hard, u = filled(depth=3, inference="soft"), filled(depth=3), inputs()
    hard.load_state_dict(soft.state_dict())
    shares = soft.tree.shares(soft.right(soft.tree.logits(u[0])))
    close(shares.sum(1), torch.ones(40, dtype=torch.float64), 1e-12)
    assert float((run(soft, u).y - run(hard, u).y).abs().max()) > 0.1
    soft.temperature = 1e-6
    close(run(soft, u).y, run(hard, u).y, 1e-12)


@pytest.mark.method("fast-feed-forward")
@torch.no_grad()
def test_equal_leaves_give_that_leaf_whatever_the_tree_says() -> None:
    module, u = filled(depth=3), inputs()
    with torch.no_grad():
        for part in (module.up, module.down, module.up_bias, module.down_bias):
            part.copy_(part[:1].expand_as(part))
    hidden = F.relu(F.linear(u, module.up[0], module.up_bias[0]))
    leaf = hidden @ module.down[0] + module.down_bias[0]
    close(run(module, u).y, leaf, 1e-12)
    close(run(module.train(), u).y, leaf, 1e-12)


@pytest.mark.method("fast-feed-forward")
@torch.no_grad()
def test_depth_0_is_the_plain_feed_forward() -> None:
    module, u = filled(depth=0, hidden=5), inputs()
    plain = ReLU(Sizes(width=6, hidden=5, bias=True)).double()
    with torch.no_grad():
        plain.up.weight.copy_(module.up[0])
        plain.up.bias.copy_(module.up_bias[0])
        plain.down.weight.copy_(module.down[0].T)
        plain.down.bias.copy_(module.down_bias[0])
    for state in (module, module.train()):
        close(run(state, u).y, run(plain, u).y, 1e-12)
    assert run(module, u).losses == {}


@pytest.mark.parametrize("case", HARD, ids=str)
@pytest.mark.parametrize(
    "law",
    [
        laws.cached_equals_uncached,
        laws.batches_are_independent,
        laws.no_position_sees_a_later_one,
        laws.saved_equals_loaded,
    ],
)
def test_hard_inference_keeps_the_laws(law: Any, case: Case) -> None:
    law(case, "pre-ln")


@pytest.mark.parametrize("case", HARD, ids=str)
def test_hard_inference_costs_what_it_counts(case: Case) -> None:
    laws.costs_are_right(case)
    if case.options["depth"] < 10:  # else most leaves see no token
        laws.neurons_are_independent(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", HARD, ids=str)
def test_hard_inference_compiles(case: Case) -> None:
    laws.compiled_equals_eager(case)


def test_the_way_follows_the_number_of_tokens() -> None:
    with torch.device("meta"):
        wide = FastFeedForward(Sizes(width=768, hidden=32), depth=7)
        narrow = FastFeedForward(Sizes(width=64, hidden=8), depth=1)
    assert [wide.way(tokens) for tokens in (1, 4096)] == ["gathered", "grouped"]
    assert narrow.way(256) == "all"
    wide.eval()
    dense = 2.0 * 4096 * 2 * 768 * 32 * 2**7
    assert wide.flops(4096) < dense / 16
    assert wide.train().flops(4096) > dense


@pytest.mark.method("fast-feed-forward")
def test_the_hardening_loss_is_the_mean_entropy_without_padding() -> None:
    module, u = filled(depth=2, hardening=2.0).train(), inputs()
    valid = torch.ones(1, 40, dtype=torch.bool)
    valid[:, 30:] = False
    c = torch.sigmoid(F.linear(u[0, :30], module.tree.weight, module.tree.bias))
    entropy = torch.special.entr(c) + torch.special.entr(1 - c)
    found = run(module, u, valid)
    torch.testing.assert_close(found.losses["hardening"], 2 * entropy.mean(), atol=1e-5, rtol=1e-4)
    assert float(found.stats["usage"].sum()) == 30
    assert found.stats["usage"].tolist() == torch.bincount(module.tree.leaf(u[0, :30]), minlength=4).tolist()
    found.losses["hardening"].backward()
    assert float(module.tree.weight.grad.abs().max()) > 0
    assert module.up.grad is None


def test_the_temperature_falls_on_a_geometric_line_over_the_steps() -> None:
    config = StackConfig(
        layers=1, width=8, heads=2, vocabulary=5, hidden=2,
        feed_forward={"name": "fast-feed-forward", "depth": 2, "temperature": 0.01, "anneal": 100},
    )  # fmt: skip
    stack, z = Stack(config), torch.tensor([[0.3, -0.2, 0.1]])
    module: Any = stack.layers[0].get_submodule("f.sublayer")
    for step, temperature in ((0, 1.0), (50, 0.1), (100, 0.01), (500, 0.01)):
        stack.set_step(step)
        torch.testing.assert_close(module.right(z), torch.sigmoid(z / temperature))
    loaded = Stack(config)
    loaded.load_state_dict(stack.state_dict())
    assert int(loaded.layers[0].get_submodule("f.sublayer").step) == 500  # pyright: ignore


@torch.no_grad()
def test_a_leak_turns_decisions_around_in_training_alone() -> None:
    module, u = filled(depth=1, hidden=1, leak=0.25), inputs(4000)
    with torch.no_grad():
        # every token goes right for sure, leaf l gives l
        module.tree.weight.zero_()
        module.tree.bias.fill_(50.0)
        module.down.zero_()
        module.down_bias.copy_(torch.arange(2.0)[:, None].expand(2, 6))
    assert bool((run(module, u).y == 1).all())
    torch.manual_seed(0)
    turned = 1 - float(run(module.train(), u).y.mean())
    assert abs(turned - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)


def test_empty_leaves_are_refused_with_both_numbers() -> None:
    fields: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2}
    table = {"name": "fast-feed-forward", "depth": 8}
    with pytest.raises(UsageError, match="depth 8 has 256 leaves, and 4 x 16 hidden values"):
        StackConfig.read({**fields, "feed_forward": table})
    assert StackConfig.read({**fields, "feed_forward": {**table, "depth": 6}}).inner == 1
    with pytest.raises(UsageError, match=r"feed_forward.depth: got -1, must be >= 0"):
        StackConfig.read({**fields, "feed_forward": {**table, "depth": -1}})


class ChancesSwapped(Tree):
    def shares(self, right: torch.Tensor) -> torch.Tensor:
        return super().shares(1 - right)


class OneNodeALevel(Tree):
    """All nodes of a level decide as the first of them does."""

    def taken(self, logits: torch.Tensor) -> torch.Tensor:
        leaf = torch.zeros(len(logits), dtype=torch.long)
        for level in range(self.depth):
            right = logits[:, 2**level - 1] >= 0
            leaf = 2 * leaf + right
        return leaf


class OrderForgotten(FastFeedForward):
    def one(self, x: torch.Tensor, leaf: torch.Tensor, way: Any = None) -> torch.Tensor:
        return super().one(x, leaf, way)[leaf.argsort(stable=True)]


@pytest.mark.parametrize("wrong", [ChancesSwapped, OneNodeALevel])
@torch.no_grad()
def test_wrong_trees_are_caught(wrong: type[Tree]) -> None:
    module, u, tree = filled(depth=3), inputs(), wrong(3, 6).double()
    tree.load_state_dict(module.tree.state_dict())
    module.tree = tree
    soft = module.every(u[0], tree.shares((tree.logits(u[0]) >= 0).double()))[None]
    errors = [float((y - by_loop(module, u)).abs().max()) for y in (run(module, u).y, soft)]
    assert max(errors) > 0.1


@torch.no_grad()
def test_a_forgotten_order_is_caught() -> None:
    module, u = filled(OrderForgotten, depth=3), inputs()
    assert float((run(module, u).y - by_loop(module, u)).abs().max()) > 0.1


@pytest.mark.method("master-leaf")
@torch.no_grad()
def test_the_output_is_the_mix_of_tree_and_master() -> None:
    module, u = filled(MasterLeaf, depth=2, master=4), inputs()
    tree, master = by_loop(module, u), run(module.master, u).y
    module.reset()
    assert abs(float(torch.sigmoid(module.mix)) - 0.6225) < 1e-4
    module = filled(MasterLeaf, depth=2, master=4)
    k = torch.sigmoid(module.mix)
    close(run(module, u).y, k * tree + (1 - k) * master, 1e-12)
    with torch.no_grad():
        module.mix.fill_(50.0)
    close(run(module, u).y, tree, 1e-12)


@pytest.mark.method("master-leaf")
def test_the_balance_loss_is_1_when_even_and_2_to_the_depth_when_collapsed() -> None:
    module = filled(MasterLeaf, depth=3, balance=1.0).train()
    zero, even, one = torch.tensor(0.0), torch.full((8,), 1 / 8), F.one_hot(torch.tensor(5), 8).float()
    some = torch.rand(8, generator=torch.Generator().manual_seed(0))
    assert module.losses(zero, even, some / some.sum())["balance"].item() == pytest.approx(1)
    assert module.losses(zero, some / some.sum(), even)["balance"].item() == pytest.approx(1)
    assert module.losses(zero, one, one)["balance"].item() == pytest.approx(8)
    with torch.no_grad():
        module.tree.weight.zero_()
        module.tree.bias.fill_(100.0)
    assert run(module, inputs()).losses["balance"].item() == pytest.approx(8)


@pytest.mark.method("master-leaf")
def test_the_gradient_of_balance_goes_through_the_mean_chances_alone() -> None:
    module, u = filled(MasterLeaf, depth=2, balance=0.5).train(), inputs()
    run(module, u).losses["balance"].backward()
    right = torch.sigmoid(module.tree.logits(u[0]))
    taken = torch.bincount(module.tree.leaf(u[0]), minlength=4) / 40
    (expected,) = torch.autograd.grad(0.5 * 4 * (taken * module.tree.shares(right).mean(0)).sum(), module.tree.weight)
    torch.testing.assert_close(module.tree.weight.grad, expected)
    assert float(expected.abs().max()) > 0


def test_phases_change_at_the_switch() -> None:
    module, u = filled(MasterLeaf, depth=2, balance=0.5, hardening=3.0, switch=10).train(), inputs()
    plain = filled(MasterLeaf, depth=2, balance=1.0, hardening=1.0).train()
    whole = run(plain, u).losses
    for step, hardening, balance in ((9, 1.0, 0.5), (10, 3.0, 0.0)):
        module.set_step(step)
        found = run(module, u).losses
        assert found["hardening"].item() == pytest.approx(hardening * whole["hardening"].item())
        assert found["balance"].item() == pytest.approx(balance * whole["balance"].item())
