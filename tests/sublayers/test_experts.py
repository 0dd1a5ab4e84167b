"""Mixtures of experts and hash layers: products by group, gates, losses, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.checkpoint.stack_model import DeepenForCausalLM, to_transformers
from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.cost import active_parameters
from deepen.stack.stack import Stack
from deepen.sublayers.contract import Out, Read
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.experts import Experts
from deepen.sublayers.ffn.grouped import grouped_linear, grouped_outer
from deepen.sublayers.ffn.hash_layer import HashLayer, balanced
from deepen.sublayers.ffn.moe import MoE
from deepen.sublayers.ffn.swiglu import SwiGLU
from tests.laws.ffn_laws import context

D, H = 6, 8
SIZES = Sizes(width=D, hidden=H, vocabulary=40)


def drawn(module: Any, seed: int = 0) -> Any:
    """The module in double precision with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dense_twin(experts: Experts, expert: int) -> SwiGLU:
    """One expert as a feed-forward of its own."""
    twin = SwiGLU(SIZES).double()
    twin.load_state_dict({"up.weight": experts.up[expert], "down.weight": experts.down[expert]})
    return twin


def one_by_one(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The plain twin: each token through each of its experts, one after another."""
    rows = []
    for token in x:
        p = (moe.router.weight @ token).softmax(0)
        best = p.argsort(descending=True)[: moe.top].tolist()
        total = sum(float(p[expert]) for expert in best) if moe.top > 1 else 1.0
        outputs = [
            dense_twin(moe.experts, e)(Read(token[None, None]), context()).y[0, 0] * float(p[e]) / total for e in best
        ]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def run(module: Any, u: torch.Tensor, ids: torch.Tensor | None = None, valid: torch.Tensor | None = None) -> Out:
    return module(Read(u), context(ids, valid))


def test_products_by_group() -> None:
    x, weight = inputs(7), drawn(Experts(4, SIZES, H, "relu")).up.detach()
    ends = torch.tensor([2, 2, 6, 7])
    groups = [0, 0, 2, 2, 2, 2, 3]
    expected = torch.stack([weight[group] @ row for group, row in zip(groups, x, strict=True)])
    assert torch.allclose(grouped_linear(x, weight, ends), expected)
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, ends), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b: grouped_outer(a, b, ends), (x, inputs(7).requires_grad_()))


@pytest.mark.method("moe")
@pytest.mark.parametrize("top", [1, 2, 5])
def test_a_mixture_is_each_token_through_its_experts(top: int) -> None:
    moe, u = drawn(MoE(SIZES, experts=5, top=top)).eval(), inputs(2, 9)
    with torch.no_grad():
        found = run(moe, u)
        assert torch.allclose(found.y, one_by_one(moe, u.flatten(0, 1)).view_as(u), atol=1e-10)
    assert float(found.stats["load"].sum()) == pytest.approx(1)
    assert not found.losses


def test_one_expert_is_the_dense_feed_forward_and_equal_experts_are_one() -> None:
    u = inputs(2, 5)
    with torch.no_grad():
        moe = drawn(MoE(SIZES, experts=1, top=1))
        dense = run(dense_twin(moe.experts, 0), u).y
        assert torch.allclose(run(moe, u).y, dense)
        for top in (1, 2):
            moe = drawn(MoE(SIZES, experts=4, top=top))
            for tensor in (moe.experts.up, moe.experts.down):
                tensor.copy_(tensor[:1].expand_as(tensor))
            dense = run(dense_twin(moe.experts, 0), u).y
            p = (u @ moe.router.weight.T).softmax(-1).amax(-1, keepdim=True)
            assert torch.allclose(run(moe, u).y, dense if top == 2 else p * dense)


def test_experts_change_places_with_the_rows_of_the_router() -> None:
    moe, u = drawn(MoE(SIZES, experts=4)), inputs(2, 5)
    with torch.no_grad():
        before = run(moe, u).y
        for tensor in (moe.router.weight, moe.experts.up, moe.experts.down):
            tensor.copy_(tensor[[2, 0, 3, 1]])
        assert torch.allclose(run(moe, u).y, before)


def test_losses_at_uniform_and_at_collapse() -> None:
    moe, u = drawn(MoE(SIZES, experts=4, top=1, balance=1.0, z=1.0)).train(), inputs(1, 400)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:4, :4] = torch.eye(4) * 1e-7
    even = run(moe, u).losses
    assert float(even["balance"].detach()) == pytest.approx(1, abs=1e-5)
    assert float(even["z"].detach()) == pytest.approx(torch.log(torch.tensor(4.0)).item() ** 2, abs=1e-5)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2, 0] = 1e4
    collapsed = run(moe, u.abs())
    assert float(collapsed.losses["balance"].detach()) == pytest.approx(4)
    assert collapsed.stats["load"].tolist() == pytest.approx([0, 0, 1, 0])


def test_the_balance_loss_is_written_out_and_learns_through_the_means_alone() -> None:
    moe, u = drawn(MoE(SIZES, experts=4, balance=1.0, z=0.0)).train(), inputs(2, 30)
    run(moe, u).losses["balance"].backward()
    weight = moe.router.weight.detach().clone().requires_grad_()
    p = (u.flatten(0, 1) @ weight.T).softmax(-1)
    f = torch.stack([(p.topk(2).indices == expert).double().sum() for expert in range(4)]) / (2 * 60)
    (4 * (f * p.mean(0)).sum()).backward()
    assert torch.allclose(moe.router.weight.grad, weight.grad)
    assert moe.experts.up.grad is None


def test_padding_counts_in_no_statistic() -> None:
    moe, u = drawn(MoE(SIZES, experts=4)).train(), inputs(2, 6)
    valid = torch.tensor([[True] * 6, [False] * 6])
    padded, alone = run(moe, u, valid=valid), run(moe, u[:1])
    assert torch.allclose(padded.stats["load"], alone.stats["load"])
    for name in ("balance", "z"):
        assert torch.allclose(padded.losses[name], alone.losses[name])


def test_a_stack_sums_losses_and_keeps_statistics_by_site() -> None:
    named = {"name": "moe", "experts": 4}
    stack = Stack(StackConfig(layers=2, program="0 (1)*2", width=8, heads=2, hidden=8, feed_forward=named))
    ids = torch.arange(12).view(2, 6)
    result = stack.train()(ids)
    assert set(result.losses) == {"balance", "z"}
    assert float(result.losses["balance"].detach()) == pytest.approx(3 * 0.01, rel=0.05)
    assert list(result.stats["load"]) == [1, 3, 5]
    assert all(float(load.sum()) == pytest.approx(1) for load in result.stats["load"].values())
    assert not stack.eval()(ids).losses


@pytest.mark.parametrize("named", [{"name": "moe", "experts": 4}, {"name": "hash-layer"}, {"name": "peer", "top": 2}])
def test_wirings_reach_what_no_linear_map_holds(named: dict[str, Any]) -> None:
    fields = {"layers": 2, "width": 8, "heads": 2, "feed_forward": named}
    plain = Stack(StackConfig.read(fields))
    ids = torch.arange(12).view(2, 6)
    scaled = Stack(StackConfig.read({**fields, "wiring": {"name": "layer-scale", "value": 0.5}})).eval()
    folded = Stack(StackConfig.read(fields)).eval()
    wiring: Any = scaled.wiring
    state = {name: value for name, value in scaled.state_dict().items() if name in folded.state_dict()}
    folded.load_state_dict({**state, **wiring.folded(scaled.layers)})
    with torch.no_grad():
        assert torch.allclose(folded(ids).logits, scaled(ids).logits, atol=1e-6)
        assert not torch.allclose(plain.eval()(ids).logits, scaled(ids).logits, atol=1e-6)
    deep = Stack(StackConfig.read({**fields, "wiring": "deepnorm"}))
    for name, value in deep.named_parameters():
        beta = 16**-0.25 if name.endswith((".up", ".down")) else 1.0
        if ".f.sublayer." in name:
            assert torch.allclose(value, beta * plain.get_parameter(name)), name


def test_a_folder_of_transformers_holds_the_table(tmp_path: Path) -> None:
    stack = Stack(StackConfig(layers=1, width=8, heads=2, feed_forward="hash-layer")).eval()
    feed_forward: Any = stack.layers[0].get_submodule("f.sublayer")
    feed_forward.table.copy_(feed_forward.table.roll(1))
    to_transformers(stack).save_pretrained(tmp_path)
    again = DeepenForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, stack.state_dict()[name]) for name, tensor in again.stack.state_dict().items())
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, stack(ids).logits, atol=1e-6)


def test_active_parameters_are_those_that_a_token_moves() -> None:
    ids = torch.tensor([[3]])
    for layer in (MoE(SIZES, experts=5, top=2), HashLayer(SIZES, experts=5, hashes=2, form="swiglu")):
        run(drawn(layer), inputs(1, 1), ids).y.sum().backward()
        moved = sum(int((parameter.grad != 0).sum()) for parameter in layer.parameters())
        assert moved == layer.active() < sum(parameter.numel() for parameter in layer.parameters())
    fields: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "hidden": 8}
    dense = Stack(StackConfig(**fields))
    for top in (1, 2):
        stack = Stack(StackConfig(**fields, feed_forward={"name": "moe", "experts": 4, "top": top}))
        assert active_parameters(stack) == active_parameters(dense) + 2 * (4 * 8 + (top - 1) * 3 * 8 * 8)
    assert active_parameters(dense) == sum(parameter.numel() for parameter in dense.parameters())


@pytest.mark.method("hash-layer")
def test_an_id_has_the_same_expert_everywhere() -> None:
    layer = drawn(HashLayer(SIZES, experts=4, form="swiglu"))
    u, ids = inputs(2, 9), torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = run(layer, u, ids).y
        for place in ((0, 0), (1, 4)):
            twin = dense_twin(layer.experts, int(layer.table[0, ids[place]]))
            assert torch.allclose(found[place], run(twin, u[place][None, None]).y[0, 0])
        single = drawn(HashLayer(SIZES, experts=1, form="swiglu"))
        assert torch.allclose(run(single, u, ids).y, run(dense_twin(single.experts, 0), u).y)


def test_several_hashes_put_a_feed_forward_together_from_blocks() -> None:
    layer = drawn(HashLayer(SIZES, experts=3, hashes=2))
    u, ids = inputs(1, 5), torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        found = run(layer, u, ids).y[0]
        for place, token in enumerate(ids[0].tolist()):
            chosen = [int(layer.table[0, token]), 3 + int(layer.table[1, token])]
            up = torch.cat([layer.experts.up[each] for each in chosen])
            down = torch.cat([layer.experts.down[each] for each in chosen], dim=1)
            assert torch.allclose(found[place], down @ F.relu(up @ u[0, place]))
    assert not torch.equal(layer.table[0], layer.table[1])


def test_tables_are_even_and_stored() -> None:
    layer = HashLayer(SIZES, experts=8, seed=1)
    assert torch.bincount(layer.table[0]).tolist() == [5] * 8
    assert torch.equal(layer.state_dict()["table"], HashLayer(SIZES, experts=8, seed=1).table)
    assert not torch.equal(layer.table, HashLayer(SIZES, experts=8, seed=2).table)
    counts = [1000 // (rank + 1) for rank in range(40)]
    layer.balance(counts)
    load = torch.zeros(8).scatter_add(0, layer.table[0], torch.tensor(counts).float())
    # the most frequent id alone is more than an eighth
    assert load.max() == 1000
    assert load.sort().values[:-1].max() <= 1.25 * load.min()
    assert balanced([1, 8, 3, 4, 2], 2) == [0, 0, 1, 1, 1]
    assert sorted(balanced([5, 5, 5, 5], 2)) == [0, 0, 1, 1]


def test_no_ids_no_hashing() -> None:
    layer, u = drawn(HashLayer(SIZES, experts=2)), inputs(2, 3)
    with pytest.raises(UsageError, match=r"a token id for each of \(2, 3\) positions, got none"):
        run(layer, u)
    with pytest.raises(UsageError, match=r"got torch.float64 of the shape \(2, 3\)"):
        run(layer, u, u[..., 0])
    with pytest.raises(UsageError, match=r"a count for each of 40 ids .* got counts of 3 ids"):
        layer.balance([1, 2, 3])
    with pytest.raises(UsageError, match="got 2 hashes"):
        HashLayer(SIZES, experts=2, hashes=2).balance([1] * 40)
