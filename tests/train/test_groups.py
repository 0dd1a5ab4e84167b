"""Groups of parameters for an optimiser: each parameter in one, by the records of the parametrisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.registry import methods
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.train import groups as groups_module
from deepen.train.groups import parameter_groups
from deepen.train.optim import adamw
from deepen.train.recipe import Recipe

SIZE = {"layers": 4, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 32, "context": 16}
TOKENS = torch.arange(12).view(2, 6) % 32


def stack(parametrisation: Any = "standard", **more: Any) -> Stack:
    return Stack(StackConfig.read({**SIZE, "parametrisation": parametrisation, **more}))


def trained(model: Stack, optimiser: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        optimiser.zero_grad()
        model(TOKENS).logits.square().mean().backward()
        optimiser.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rule", [each.name for each in methods("parametrisation")])
@pytest.mark.parametrize("wiring", ["pre-ln", "hyper-connections"])
def test_every_parameter_is_in_one_group(rule: str, wiring: str) -> None:
    model = stack(rule, wiring=wiring, tied=False, bias=True, program="0 (1-2)*2[lora=2] 3!rand")
    made = parameter_groups(model, lr=1e-3, weight_decay=0.1)
    names = sorted(name for group in made for name in group["names"])
    assert names == sorted(name for name, _ in model.named_parameters())
    assert sorted(id(each) for group in made for each in group["params"]) == sorted(map(id, model.parameters()))
    for group in made:
        assert group["lr"] == pytest.approx(1e-3 * group["factor"])
        assert [id(dict(model.named_parameters())[name]) for name in group["names"]] == list(map(id, group["params"]))


def test_a_parameter_in_two_groups_or_none_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    decayed, plain = groups_module.groups(model)
    name = next(iter(decayed))
    for broken in ((decayed, {**plain, name: decayed[name]}), ({**decayed, name: plain["norm.weight"]}, plain)):
        monkeypatch.setattr(groups_module, "groups", lambda model, broken=broken: broken)
        with pytest.raises(AssertionError):
            parameter_groups(model, lr=1e-3, weight_decay=0.1)


def test_the_standard_groups_train_as_those_without_a_parametrisation() -> None:
    one, two = stack(), stack()
    recipe = Recipe(lr=1e-2, weight_decay=0.1)
    plain = adamw(one, recipe)
    own = torch.optim.AdamW(
        parameter_groups(two, lr=1e-2, weight_decay=0.1), betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True
    )
    first, second = trained(one, plain), trained(two, own)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_groups_of_completep() -> None:
    """Depth 4 of a base of 1, width 16 of a base of 4: the table with m_L = m_N = 4 and a = 1/2."""
    model = stack({"name": "completep", "alpha": 0.5, "base_width": 4}, tied=False)
    made = {name: group for group in parameter_groups(model, lr=1e-2, weight_decay=0.1) for name in group["names"]}
    expected = {
        "layers.1.a.sublayer.qkv.weight": (0.5 / 4, 0.4, 0.5 / 4),
        "layers.1.f.sublayer.down.weight": (0.5 / 4, 0.4, 0.5 / 4),
        "layers.1.a.norm.weight": (0.5, 0.0, 0.5 / 4),
        "embedding.weight": (1.0, 0.1, 1 / 4),
        "norm.weight": (1.0, 0.0, 1 / 4),
        "head.weight": (1.0, 0.1, 1.0),
    }
    for name, (lr, decay, eps) in expected.items():
        found = made[name]
        assert (found["lr"], found["weight_decay"], found["eps"]) == pytest.approx((lr * 1e-2, decay, eps * 1e-8)), name


def test_frozen_parameters_and_parts_of_other_modules() -> None:
    model = stack("depth-mup")
    model.embedding.weight.requires_grad_(False)
    outer = nn.ModuleDict({"inner": model, "probe": nn.Linear(4, 2)})
    made = {
        name: group["factor"] for group in parameter_groups(outer, lr=1.0, weight_decay=0.0) for name in group["names"]
    }
    assert "inner.embedding.weight" not in made
    assert made["inner.layers.0.a.sublayer.out.weight"] == 0.5
    assert made["probe.weight"] == made["inner.norm.weight"] == 1.0
    with pytest.raises(UsageError, match="no parameter is left"):
        parameter_groups(model.requires_grad_(False), lr=1.0, weight_decay=0.0)
