"""Layer rotation: how far the matrices of each layer have turned away from their initial values.

    rotation = 1 - cos(w, w0)          w: the matrices of a layer as one vector, w0: what they began as; 0 to 2

Biases, norms and whatever is no matrix are left out. The paper takes each matrix as a layer; here a layer of the bank
is one vector, so that there is one curve for each. A copy that growth made is measured from what its layer began as.

Source: Carbonnelle and De Vleeschouwer, Layer rotation: a surprisingly powerful indicator of generalization in deep
networks?, arXiv:1806.01603.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from deepen.registry import method
from deepen.stack.stack import Stack
from deepen.train.callbacks import Callback
from deepen.train.learner import Learner


@method(
    "layer-rotation",
    family="train",
    source="arXiv:1806.01603",
    title="Layer rotation: a surprisingly powerful indicator of generalization in deep networks?",
    mechanism="1 - cos of the matrices of a layer and their initial values, logged",
    cost="a copy of the initial matrices",
)
class Rotation(Callback):
    """Measures the layers of a learner's stack, which has its initial values now.

    Args:
        learner: whose stack is trained.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.start = {name: matrix.detach().clone() for name, matrix in _matrices(learner.stack)}

    def follow(self, origins: Mapping[str, str]) -> None:
        """Takes the stack that the learner has now; says which of the old parameters each began as."""
        self.start = {name: self.start[origins[name]] for name, _ in _matrices(self.learner.stack)}

    def measures(self) -> dict[str, float]:
        by_layer: dict[int, list[str]] = {}
        for name in self.start:
            by_layer.setdefault(int(name.split(".")[1]), []).append(name)
        now = {name: matrix.detach() for name, matrix in _matrices(self.learner.stack)}
        found = {}
        for layer, names in sorted(by_layer.items()):
            w, w0 = (torch.cat([each[name].flatten().double() for name in names]) for each in (now, self.start))
            found[f"rotation.{layer}"] = float(1 - torch.dot(w, w0) / (w.norm() * w0.norm()))
        return found


def _matrices(stack: Stack) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in stack.named_parameters():
        if name.startswith("layers.") and parameter.ndim > 1:
            yield name, parameter
