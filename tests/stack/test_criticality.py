"""Critical initial values: the table, the kernel through depth, and the law of fluctuations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.criticality import (
    FUNCTIONS,
    PAIRS,
    Critical,
    critical,
    initialise_critical,
    log_variance,
    next_kernel,
    susceptibilities,
)

pytestmark = pytest.mark.method("critical-initialisation")


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_table_is_critical(name: str) -> None:
    pair = critical(name)
    # a class that holds at K = 0 alone is looked at nearby
    kernel = 1e-5 if pair.kernel == 0 else pair.kernel or 1.7
    assert next_kernel(FUNCTIONS[name], pair, kernel) == pytest.approx(kernel, rel=1e-4)
    assert tuple(susceptibilities(FUNCTIONS[name], pair, kernel)) == pytest.approx((1, 1), abs=1e-4)
    for factor in (0.99, 1.01):
        moved = pair._replace(weight=pair.weight * factor)
        assert abs(susceptibilities(FUNCTIONS[name], moved, kernel).perpendicular - 1) > 5e-3


def test_the_parallel_susceptibility_is_the_slope_of_the_recursion() -> None:
    pair, kernel, step = Critical(0.3, 1.4, None), 2.0, 1e-4
    for name, function in FUNCTIONS.items():
        slope = (next_kernel(function, pair, kernel + step) - next_kernel(function, pair, kernel - step)) / (2 * step)
        assert susceptibilities(function, pair, kernel).parallel == pytest.approx(slope, rel=1e-5), name


def test_leaky_relu_by_its_slope() -> None:
    assert critical("leaky-relu", 0.0) == critical("relu")
    assert critical("leaky-relu", 1.0) == critical("linear")
    found = susceptibilities(lambda z: nn.functional.leaky_relu(z, 0.3), critical("leaky-relu", 0.3), 2.0)
    assert tuple(found) == pytest.approx((1, 1))


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_the_kernel_stays_through_50_layers(name: str) -> None:
    pair, function = critical(name), FUNCTIONS[name]
    kernel = pair.kernel or 1.0
    kernels = dict.fromkeys((0.9, 1.0, 1.1), kernel)
    for _ in range(50):
        kernels = {
            factor: next_kernel(function, pair._replace(weight=pair.weight * factor), value)
            for factor, value in kernels.items()
        }
    assert kernels[1.0] == pytest.approx(kernel, rel=1e-3)
    assert kernels[0.9] < 0.6 * kernel
    assert kernels[1.1] > 1.5 * kernel


def test_a_network_with_these_values_keeps_its_signal() -> None:
    torch.manual_seed(0)
    maps = [nn.Linear(500, 500) for _ in range(5)]
    initialise_critical(nn.Sequential(*maps), "gelu")
    assert maps[3].weight.var().item() == pytest.approx(1.98306 / 500, rel=0.02)
    assert torch.cat([each.bias for each in maps]).var().item() == pytest.approx(0.17292, rel=0.1)
    z = math.sqrt(3.5616) * torch.randn(64, 500)
    for each in maps:
        z = each(FUNCTIONS["gelu"](z))
    assert z.square().mean().item() == pytest.approx(3.5616, rel=0.25)


def test_the_law_of_fluctuations() -> None:
    """z of each layer, given the one before, is N(0, 2 |h|^2 / n): drawn as such, many networks at once."""
    depth, width, networks = 40, 200, 4000
    generator = torch.Generator().manual_seed(0)
    log_size = torch.zeros(networks)
    for _ in range(depth):
        h = (math.sqrt(2 / width) * torch.randn(networks, width, generator=generator)).relu()
        log_size += h.square().sum(1).log()
    assert log_variance(depth, width) == 1.0
    assert log_size.var().item() == pytest.approx(log_variance(depth, width), rel=0.08)


def test_errors() -> None:
    with pytest.raises(UsageError, match=r"no activation 'glu' .did you mean 'gelu'"):
        critical("glu")
    with pytest.raises(UsageError, match="1 has no bias; criticality with silu needs one of variance"):
        initialise_critical(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), "silu")
