"""Magnitude: how large the weights of a layer are, whatever the text.

    I = sum over the matrices W of a layer of |W|_1

A baseline: it sees neither the stream nor the loss. Every visit of a layer has the layer's value.

Kim et al., Shortened LLaMA: Depth Pruning for Large Language Models, arXiv:2402.02834.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepen.probe.scores.base import PassScore, Result, column
from deepen.probe.scores.reading import exact
from deepen.registry import method

if TYPE_CHECKING:
    from torch import nn

    from deepen.checkpoint.visit import VisitList
    from deepen.probe.scores.reading import Reading


@method(
    "magnitude",
    family="score",
    source="arXiv:2402.02834",
    title="Shortened LLaMA: Depth Pruning for Large Language Models with Comparison of Retraining Methods",
    mechanism="sum of absolute weights over the matrices of a layer",
    cost="no forward call",
)
class Magnitude(PassScore):
    """Reads the weights only."""

    def run(self, reading: Reading) -> Result:
        import torch

        sums, counts = {}, {}
        for layer in reading.visits._modules:
            weights = matrices(reading.visits, layer)
            sums[layer] = sum(exact(weight.detach()).abs().sum(dtype=torch.float64).item() for weight in weights)
            counts[layer] = sum(weight.numel() for weight in weights)
        reading.step(len(reading.windows))
        values = [sums[entry.child] for entry in reading.visits.entries]
        count = max(counts.values())
        return Result((column("magnitude", values, "high", "sum of absolute weights of the layer", count),))


def matrices(visits: VisitList, layer: str) -> list[nn.Parameter]:
    """The matrices of one layer of the bank, in a fixed order: neither biases nor the scales of norms."""
    module = visits._modules[layer]
    assert module is not None
    return [parameter for parameter in module.parameters() if parameter.dim() >= 2]
