"""The coordinate check: how far a step moves the last stream, over depth 4 to 64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from deepen.stack.config import StackConfig
from deepen.train import scaling
from deepen.train.groups import parameter_groups

CONFIG = StackConfig(layers=1, width=16, heads=2, hidden=32)
DEPTHS = (4, 8, 16, 32, 64)


def slope(
    rule: str,
    *,
    depths: Sequence[int] = (4, 16, 64),
    config: StackConfig = CONFIG,
    steps: int = 1,
    rate: float = 3e-4,
    seeds: int = 1,
    batch: int = 4,
    context: int = 8,
) -> float:
    bytes_ = torch.randint(0, 256, (2000,), generator=torch.Generator().manual_seed(0))
    reading = scaling.Reading(tokens=bytes_, batch=batch, context=context)
    options: dict[str, Any] = {"rules": [rule], "depths": depths, "rates": [rate], "steps": steps, "seeds": seeds}
    return scaling.check_scaling(config, reading, **options)[0].slope.value


def constant_rate(stack: nn.Module, *, lr: float, weight_decay: float, eps: float = 1e-8) -> list[dict[str, Any]]:
    """The groups of a wrong copy, which leaves the factor of the rate out."""
    made = parameter_groups(stack, lr=lr, weight_decay=weight_decay, eps=eps)
    return [{**group, "lr": lr, "factor": 1.0} for group in made]


@pytest.mark.method("depth-mup")
def test_depth_mup_is_flat() -> None:
    assert abs(slope("depth-mup")) < 0.1


@pytest.mark.method("depth-mup")
def test_depth_mup_with_a_constant_rate_of_adam_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "parameter_groups", constant_rate)
    assert slope("depth-mup") > 2 * scaling.FLAT


@pytest.mark.method("standard")
def test_the_standard_parametrisation_drifts() -> None:
    assert slope("standard") > 0.7


@pytest.mark.method("completep")
def test_completep_is_flat_with_a_constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"name": "completep", "base_depth": 1}
    config = StackConfig.read({**CONFIG.model_dump(exclude_unset=True), "parametrisation": table})
    monkeypatch.setattr(scaling, "parameter_groups", constant_rate)
    assert abs(slope("completep", config=config)) < 0.1


@pytest.mark.method("depth-mup")
def test_depth_mup_of_sgd_is_flat_with_a_constant_rate() -> None:
    table = {"name": "depth-mup", "optimiser": "sgd"}
    config = StackConfig.read({**CONFIG.model_dump(exclude_unset=True), "parametrisation": table})
    assert abs(slope("depth-mup", config=config, rate=0.1)) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("feed_forward", ["swiglu", "gelu"])
def test_the_whole_check(feed_forward: str) -> None:
    config = StackConfig(layers=1, width=32, heads=2, feed_forward=feed_forward)
    more: dict[str, Any] = {"depths": DEPTHS, "config": config, "steps": 3, "seeds": 3, "context": 16}
    assert abs(slope("depth-mup", **more)) < 0.1
    assert slope("standard", **more) > 0.5
    table = {"name": "completep", "base_depth": 1}
    own = StackConfig.read({**config.model_dump(exclude_unset=True), "parametrisation": table})
    assert abs(slope("completep", **{**more, "config": own})) < 0.1


def test_a_slope_and_its_interval() -> None:
    depths = (4, 16, 64)
    values = [[2.0 * depth**0.5, 3.0 * depth**0.25] for depth in depths]
    found = scaling.slope_of(depths, values)
    assert found.value == pytest.approx(0.375)
    assert (found.low, found.high) == pytest.approx((0.25, 0.5))
    assert not found.flat
    one = scaling.slope_of(depths, [[1.0], [1.0], [1.0]])
    assert one.flat
    assert one.low != one.low
    for lost in (float("nan"), float("inf"), 0.0):
        assert scaling.slope_of(depths, [[1.0], [lost], [1.0]]).value != found.value
        assert not scaling.slope_of(depths, [[1.0], [lost], [1.0]]).flat
