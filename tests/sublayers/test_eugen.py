"""EUGen: the estimator's mean, the linear case, folding and distillation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.sublayers.contract import Read
from deepen.sublayers.ffn import eugen
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.eugen import EUGen, augmented, distilled, features, fitted, projections
from tests.laws.ffn_laws import context
from tests.laws.wiring_laws import close


def made(**options: Any) -> EUGen:
    """With initial values, and random ones in what begins at 0."""
    torch.manual_seed(0)
    module = EUGen(Sizes(width=5, hidden=7, bias=True), **options).double()
    module.reset()
    with torch.no_grad():
        for parameter in (module.up, module.down.bias):
            parameter.normal_(std=0.5)
    return module


def u(tokens: int = 9) -> torch.Tensor:
    return torch.randn(1, tokens, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def errors(maps: torch.Tensor, order: int) -> float:
    """How many standard errors the mean over blocks of 4 features is from the power of the product."""
    x, w = torch.randn(2, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    products = features(x[None], maps, order) * features(w[None], maps, order)
    blocks = products.unflatten(1, (order, -1, 4))[0, -1].mean(-1)
    return float((blocks.mean() - (x @ w) ** order).abs() / (blocks.std() / len(blocks) ** 0.5))


@pytest.mark.method("eugen")
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_mean_over_projections_is_the_power_of_the_product(order: int) -> None:
    torch.manual_seed(1)
    maps = projections(order, 4 * 20_000, 4)
    if order == 1:
        # a block of orthogonal rows has no variance: its mean is the product itself
        assert float((maps[0, :4].T @ maps[0, :4] - 4 * torch.eye(4)).abs().max()) < 1e-9
    else:
        assert errors(maps, order) < 4


@pytest.mark.method("eugen")
def test_one_projection_for_all_factors_is_caught() -> None:
    torch.manual_seed(1)
    drawn = projections(2, 4 * 20_000, 4)
    assert errors(drawn[:1].expand_as(drawn), 2) > 4


@pytest.mark.method("eugen")
@torch.no_grad()
def test_order_1_with_as_many_features_as_values_is_linear() -> None:
    module = made(order=1, features=7, activation="identity")
    expected = module.down(F.linear(augmented(u()), module.up))
    close(module(Read(u()), context()).y, expected, 1e-10)
    assert (
        float((made(order=1, features=3, activation="identity")(Read(u()), context()).y - expected).abs().max()) > 0.1
    )


@pytest.mark.method("eugen")
@torch.no_grad()
def test_with_many_features_it_is_the_polynomial_of_the_product() -> None:
    module = made(order=2, features=7 * 2000, activation="gelu")
    a, product = fitted("gelu", 2, 3.0), F.linear(augmented(u()), module.up)
    exact = module.down(a[0] + a[1] * product + a[2] * product**2)
    error = float((module(Read(u()), context()).y - exact).abs().max() / exact.abs().max())
    assert error < 0.1, error


def test_the_fit_is_exact_for_polynomials_and_nearest_for_others() -> None:
    torch.testing.assert_close(torch.tensor(fitted("identity", 2, 3.0)), torch.tensor([0.0, 1.0, 0.0]))
    z = torch.linspace(-3, 3, 2001, dtype=torch.float64)
    rest = F.gelu(z) - sum(a * z**i for i, a in enumerate(fitted("gelu", 2, 3.0)))
    # what is left is orthogonal to every power
    assert max(abs(float((rest * z**i).mean())) for i in range(3)) < 1e-10


@pytest.mark.method("eugen")
@torch.no_grad()
def test_folded_equals_unfolded() -> None:
    module = made(order=2, features=6)
    folded = module.fold()
    close(folded(Read(u()), context()).y, module(Read(u()), context()).y, 1e-12)
    assert folded.matrix.shape == (5, 12)


@pytest.mark.method("eugen")
@torch.no_grad()
def test_distillation_finds_a_layer_that_it_can_express() -> None:
    module, x = made(order=2, features=6), u(200)[0]
    outputs = module(Read(x[None]), context()).y[0]
    found = distilled(module.maps, 2, x, outputs, ridge=1e-10)
    fresh = u(230)[:, 200:]
    close(found(Read(fresh), context()).y, module(Read(fresh), context()).y, 1e-4)
    with pytest.raises(UsageError, match="200 inputs and 199 outputs"):
        distilled(module.maps, 2, x, outputs[:-1])


@torch.no_grad()
def test_another_norm_of_the_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eugen, "augmented", lambda u: torch.cat([augmented(u)[..., :-1], u.square().sum(-1, True)], -1))
    with pytest.raises(AssertionError):
        test_order_1_with_as_many_features_as_values_is_linear()
