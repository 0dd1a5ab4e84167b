"""Taylor: how much the loss would change, to first order, if the weights of a layer were taken away one by one.

    I = sum over the matrices W of a layer, and their entries, of |dL/dW * W|        L: mean loss of the text, nats

The gradient is that of the whole text; absolute values are taken after it is complete. Every visit of a layer has the
layer's value, to which all of its visits add their gradients.

Kim et al., Shortened LLaMA: Depth Pruning for Large Language Models, arXiv:2402.02834.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepen.probe.scores.base import PassScore, Result, column
from deepen.probe.scores.magnitude import matrices
from deepen.probe.scores.reading import exact, require_finite
from deepen.registry import method

if TYPE_CHECKING:
    from deepen.probe.scores.reading import Reading


@method(
    "taylor",
    family="score",
    source="arXiv:2402.02834",
    title="Shortened LLaMA: Depth Pruning for Large Language Models with Comparison of Retraining Methods",
    mechanism="sum of |gradient times weight| over the matrices of a layer",
    cost="1 forward and 1 backward call, and memory for a gradient of every layer",
)
class Taylor(PassScore):
    """Needs a causal head; the model's weights are read and never stepped."""

    needs_head = True

    def run(self, reading: Reading) -> Result:
        import torch
        from torch.nn.functional import cross_entropy

        wanted = {id(weight) for layer in reading.visits._modules for weight in matrices(reading.visits, layer)}
        flags = [(parameter, parameter.requires_grad) for parameter in reading.model.parameters()]
        tokens = 0
        try:
            for parameter, _ in flags:
                parameter.requires_grad_(id(parameter) in wanted)
            with torch.enable_grad():
                for ids, first in reading.groups():
                    logits = reading.run(ids, head=True).logits[:, first - 1 : -1]
                    targets = ids[:, first:]
                    cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").backward()
                    tokens += targets.numel()
                    reading.step(len(ids))
            found = {
                layer: sum(
                    exact(weight.grad * weight.detach()).abs().sum(dtype=torch.float64).item()
                    for weight in matrices(reading.visits, layer)
                    if weight.grad is not None
                )
                for layer in reading.visits._modules
            }
        finally:
            for parameter, flag in flags:
                parameter.grad = None
                parameter.requires_grad_(flag)
        require_finite(torch.tensor(list(found.values())))
        values = [found[entry.child] / tokens for entry in reading.visits.entries]
        return Result((column("taylor", values, "high", "sum of |gradient times weight| of the layer", tokens),))
