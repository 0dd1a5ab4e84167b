"""Feed-forwards of two maps against their equations written out, their homogeneity, and the rule of their widths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import deepen
from deepen.checkpoint.stack_weights import save_stack, to_stack
from deepen.errors import FamilyError, UsageError
from deepen.registry import lookup
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.sublayers.contract import Read
from deepen.sublayers.ffn.base import FeedForward, Sizes
from tests.laws.ffn_laws import context

D, H = 6, 10
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "glu": lambda z: 1 / (1 + torch.exp(-z)),
    "bilinear": lambda z: z,
    "reglu": lambda z: torch.where(z > 0, z, 0.0),
    "geglu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
    "swiglu": lambda z: z / (1 + torch.exp(-z)),
    "relu": lambda z: torch.where(z > 0, z, 0.0),
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
    "squared-relu": lambda z: torch.where(z > 0, z * z, 0.0),
}
GATED = ("glu", "bilinear", "reglu", "geglu", "swiglu")


def made(name: str, bias: bool = False) -> tuple[FeedForward, torch.Tensor]:
    torch.manual_seed(0)
    kind = lookup(name).implementation
    feed_forward = kind(Sizes(width=D, hidden=H, bias=bias, gelu="none")).double()
    return feed_forward, torch.randn(2, 3, D, dtype=torch.float64)


def run(feed_forward: FeedForward, u: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return feed_forward(Read(u), context()).y


def written_out(name: str, feed_forward: FeedForward, u: torch.Tensor) -> torch.Tensor:
    held = feed_forward.state_dict()
    rows = u @ held["up.weight"].T + held["up.bias"]
    hidden = ACTIVATIONS[name](rows[..., :H])
    if name in GATED:
        hidden = hidden * rows[..., H:]
    return hidden @ held["down.weight"].T + held["down.bias"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.method(name)) for name in ACTIVATIONS])
def test_the_equation(name: str) -> None:
    feed_forward, u = made(name, bias=True)
    assert torch.allclose(run(feed_forward, u), written_out(name, feed_forward, u), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", [name for name in GATED if name != "bilinear"])
def test_a_gate_and_values_that_change_places_are_another_function(name: str) -> None:
    feed_forward, u = made(name, bias=True)
    before = run(feed_forward, u)
    for parameter in (feed_forward.get_parameter("up.weight"), feed_forward.get_parameter("up.bias")):
        parameter.data = parameter.data.roll(H, dims=0)
    assert (run(feed_forward, u) - before).abs().max() > 1e-3
    with pytest.raises(AssertionError):
        assert torch.allclose(before, written_out(name, feed_forward, u))


def test_bilinear_is_quadratic_and_its_halves_change_places() -> None:
    feed_forward, u = made("bilinear")
    y = run(feed_forward, u)
    for c in (-3.0, 0.5):
        assert torch.allclose(run(feed_forward, c * u), c**2 * y)
    up = feed_forward.get_parameter("up.weight")
    up.data = up.data.roll(H, dims=0)
    assert torch.allclose(run(feed_forward, u), y)


@pytest.mark.parametrize(("name", "degree"), [("reglu", 2), ("relu", 1), ("squared-relu", 2)])
def test_relu_kinds_are_homogeneous_for_positive_factors_alone(name: str, degree: int) -> None:
    feed_forward, u = made(name)
    y = run(feed_forward, u)
    assert torch.allclose(run(feed_forward, 3 * u), 3**degree * y)
    assert not torch.allclose(run(feed_forward, -u), (-1) ** degree * y)


def test_both_forms_of_the_gelu() -> None:
    for name in ("gelu", "geglu"):
        exact, u = made(name)
        tanh, _ = made(name)
        tanh.sizes = Sizes(width=D, hidden=H, gelu="tanh")
        difference = float((run(exact, u) - run(tanh, u)).abs().max())
        assert 1e-7 < difference < 1e-2
    x = torch.randn(5, dtype=torch.float64)
    by_hand = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert torch.allclose(F.gelu(x, approximate="tanh"), by_hand)


def config(**fields: object) -> StackConfig:
    return StackConfig.read({"layers": 1, "width": 96, "heads": 1, **fields})


def test_two_thirds_of_the_width_make_equal_parameters() -> None:
    sizes = {
        name: sum(parameter.numel() for parameter in config(feed_forward=name).new_feed_forward().parameters())
        for name in ACTIVATIONS
    }
    assert set(sizes.values()) == {8 * 96 * 96}


def test_llamas_width() -> None:
    fields = {"width": 4096, "heads": 32}
    assert config(**fields, hidden_multiple=256).inner == 11008
    assert config(**fields).inner == 10923
    assert config(**fields, feed_forward="gelu", hidden_multiple=256).inner == 4 * 4096
    assert config(**fields, hidden=7, hidden_multiple=256).inner == 7


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("swigul", "feed_forward: no feed-forward 'swigul' .did you mean 'swiglu'"),
        ({"experts": 8}, "feed_forward: a feed-forward is a name, or a table with a name and its options"),
        ({"name": "moe", "expert": 8}, "the feed-forward moe has no option 'expert' .did you mean 'experts'"),
        ({"name": "swiglu", "experts": 8}, "the feed-forward swiglu has no option 'experts'; it takes none"),
        ({"name": "moe", "experts": "many"}, r"feed_forward\.experts: got 'many'"),
        ({"name": "moe", "experts": 2, "top": 3}, "feed_forward: moe: top 3 of 2 experts"),
        ({"name": "moe", "balance": -1}, r"feed_forward\.balance: got -1, must be >= 0"),
        ({"name": "hash-layer", "hashes": 5}, "hash-layer: a hidden width of 384 for 5 hashes"),
        ({"name": "peer", "experts": 1000}, "peer: 1000 experts are no square; .*take 961 or 1024"),
        ({"name": "peer", "experts": 4, "top": 5}, "peer: top 5 of 4 experts"),
    ],
)
def test_bad_options_are_told_with_both_numbers_and_the_rule(named: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"^stack: .*{message}"):
        config(feed_forward=named)


def test_a_name_without_options_is_the_name() -> None:
    assert config(feed_forward={"name": "relu"}) == config(feed_forward="relu")


def test_families_take_a_width_by_multiple_and_refuse_other_feed_forwards(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"width": 8, "heads": 2, "hidden_multiple": 16}
    stack = Stack(config(**fields)).eval()
    assert stack.config.inner == 32
    save_stack(stack, tmp_path / "out", "llama")
    again, ids = to_stack(deepen.open(str(tmp_path / "out"))), torch.arange(6)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, stack(ids).logits, atol=1e-6)
    for named in ("geglu", {"name": "moe", "experts": 4}):
        with pytest.raises(FamilyError, match="llama cannot express feed_forward = "):
            save_stack(Stack(config(**fields, feed_forward=named)), tmp_path / "not", "llama")
    assert not (tmp_path / "not").exists()
