"""Criticality of plain deep networks at initialisation: which variances let a signal pass through any depth.

    z' = W f(z) + b        W ~ N(0, C_W / n), b ~ N(0, C_b)
    K' = C_b + C_W E[f(z)^2], z ~ N(0, K)                          the kernel, layer by layer
    chi_parallel = dK'/dK,  chi_perpendicular = C_W E[f'(z)^2]     how differences of inputs grow

Critical: both are 1 at the fixed point K*, so that K neither decays nor explodes. In a network of width n fluctuations
grow with L / n; of ReLU with C_W = 2, Var[log |h_L|^2] = 5 L / n to leading order. Keep L / n well below 1.

| activation | C_b | C_W | K* |
|---|---|---|---|
| linear | 0 | 1 | any |
| relu | 0 | 2 | any |
| leaky-relu of slope s | 0 | 2 / (1 + s^2) | any |
| tanh, sin, erf-type with f'(0) = 1 | 0 | 1 | 0 |
| gelu | 0.17292 | 1.98306 | 3.5616 |
| silu | 0.55514 | 1.98800 | 14.320 |

The last two were computed here, by quadrature. Pre-LN residual stacks need none of this: their norms set K.

Source: Roberts, Yaida and Hanin, The Principles of Deep Learning Theory, arXiv:2106.10165.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError, nearest
from deepen.registry import method

Function = Callable[[torch.Tensor], torch.Tensor]
NODES = 200


class Critical(NamedTuple):
    """Variances of a network with one activation, and the kernel that they keep.

    Attributes:
        bias: C_b.
        weight: C_W.
        kernel: K*; None when every kernel stays.
    """

    bias: float
    weight: float
    kernel: float | None


PAIRS: Mapping[str, Critical] = {
    "linear": Critical(0.0, 1.0, None),
    "relu": Critical(0.0, 2.0, None),
    "tanh": Critical(0.0, 1.0, 0.0),
    "sin": Critical(0.0, 1.0, 0.0),
    "gelu": Critical(0.17292, 1.98306, 3.5616),
    "silu": Critical(0.55514, 1.98800, 14.320),
}
FUNCTIONS: Mapping[str, Function] = {
    "linear": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
}


def critical(activation: str, slope: float = 0.0) -> Critical:
    """The critical variances of an activation; `slope` is of leaky-relu.

    Raises:
        UsageError: an unknown activation.
    """
    if activation == "leaky-relu":
        return Critical(0.0, 2 / (1 + slope**2), None)
    if activation not in PAIRS:
        known = [*PAIRS, "leaky-relu"]
        raise UsageError(f"no activation {activation!r}{nearest(activation, known)}; known are {', '.join(known)}")
    return PAIRS[activation]


def next_kernel(function: Function, pair: Critical, kernel: float) -> float:
    """K of the next layer."""
    return pair.bias + pair.weight * _mean(lambda z: function(z).square(), kernel)


class Susceptibilities(NamedTuple):
    """How a small difference of kernels, and of inputs across them, grows in a layer."""

    parallel: float
    perpendicular: float


def susceptibilities(function: Function, pair: Critical, kernel: float) -> Susceptibilities:
    """Both at a kernel above 0; 1 and 1 at criticality."""
    # d/dK E[g(z)] = E[z g'(z)] / (2 K)
    parallel = _mean(lambda z: function(z) * _slope(function, z) * z, kernel) / kernel
    return Susceptibilities(pair.weight * parallel, pair.weight * _mean(lambda z: _slope(function, z).square(), kernel))


def log_variance(depth: int, width: int) -> float:
    """Var[log |h|^2] after so many ReLU layers of C_W = 2, to leading order in depth / width."""
    return 5 * depth / width


@method(
    "critical-initialisation",
    family="initialisation",
    source="arXiv:2106.10165",
    title="The Principles of Deep Learning Theory",
    mechanism="weights N(0, C_W / n) and biases N(0, C_b) that keep the kernel at any depth",
    cost="nothing",
)
def initialise_critical(model: nn.Module, activation: str, slope: float = 0.0) -> None:
    """Gives every linear map of a plain network its critical initial values; the generator is torch's.

    Args:
        model: maps with the activation between them and no norms or residuals.
        activation: of the table.
        slope: of leaky-relu.

    Raises:
        UsageError: an unknown activation, or a map without the bias that its C_b needs.
    """
    pair = critical(activation, slope)
    maps = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if pair.bias and (bare := next((name for name, each in maps.items() if each.bias is None), None)) is not None:
        raise UsageError(f"{bare} has no bias; criticality with {activation} needs one of variance {pair.bias}")
    for each in maps.values():
        nn.init.normal_(each.weight, std=math.sqrt(pair.weight / each.in_features))
        if each.bias is not None:
            nn.init.normal_(each.bias, std=math.sqrt(pair.bias))


@cache
def _nodes() -> tuple[torch.Tensor, torch.Tensor]:
    """Points and weights of the mean over N(0, 1)."""
    points, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return torch.from_numpy(points), torch.from_numpy(weights / weights.sum())


def _mean(function: Function, kernel: float) -> float:
    """E[function(z)], z ~ N(0, kernel)."""
    points, weights = _nodes()
    return (weights * function(math.sqrt(kernel) * points)).sum().item()


def _slope(function: Function, z: torch.Tensor) -> torch.Tensor:
    z = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(z).sum(), z)
    return slope
