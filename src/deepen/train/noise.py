"""Gaussian noise on the gradients, which fades over the steps.

    g' = g + s_t n        n ~ N(0, 1), for every number anew        s_t^2 = eta / (1 + t)^0.55

The noise is added after clipping, a choice made here. It has a generator of its own for each step, so the order of the
data and the draws of the model do not depend on it. At eta 0 nothing is added.

Source: Neelakantan et al., Adding Gradient Noise Improves Learning for Very Deep Networks, arXiv:1511.06807.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from deepen.registry import method
from deepen.train.callbacks import Callback


@method(
    "gradient-noise",
    family="train",
    source="arXiv:1511.06807",
    title="Adding Gradient Noise Improves Learning for Very Deep Networks",
    mechanism="g + N(0, eta / (1 + t)^0.55)",
    cost="a draw for every parameter and step",
)
class GradientNoise(Callback):
    """Adds noise.

    Args:
        eta: the variance in the first step.
        seed: of the draws.
    """

    def __init__(self, eta: float, seed: int) -> None:
        self.eta, self.seed = eta, seed

    def deviation(self, step: int) -> float:
        """The standard deviation in a step, counted from 0."""
        return math.sqrt(self.eta / (1 + step) ** 0.55)

    def gradients(self, step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        if not self.eta:
            return
        deviation = self.deviation(step)
        # a generator takes 32 bits of a seed
        (mixed,) = np.random.SeedSequence((self.seed, step)).generate_state(1)
        generators: dict[torch.device, torch.Generator] = {}
        for parameter in parameters.values():
            if parameter.grad is None:
                continue
            device = parameter.grad.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(int(mixed))
            drawn = torch.randn(parameter.grad.shape, generator=generators[device], device=device)
            parameter.grad.add_(drawn.to(parameter.grad.dtype), alpha=deviation)
