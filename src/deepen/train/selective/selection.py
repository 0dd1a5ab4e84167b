"""A selection at work: it freezes the rest of the model, follows its schedule, and lets go of the model at the end.

    before a step   which matrices the schedule watches
    after a step    the schedule looks at their gradients -> parts are written back -> blocks that move start anew

A block that moves has no moments and an AdamW step counter of 0 at its new place; what was trained stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import nn

from deepen.errors import UsageError, nearest
from deepen.train.selective.block import TURNED, Block
from deepen.train.selective.sliced import Sliced


class Schedule(Protocol):
    """When blocks move; everything it knows follows from the step and from `state`."""

    def watched(self, step: int) -> Collection[str]:
        """The matrices whose whole gradient a step needs."""
        ...

    def look(self, step: int, parts: Mapping[str, Sliced]) -> None:
        """Sees the gradients of the watched matrices, and every matrix as it was before the update."""
        ...

    def moves(self, step: int) -> Mapping[str, Block]:
        """The blocks that are trained from the next step on, for the matrices that move after this one."""
        ...

    def rate(self, name: str, step: int) -> float:
        """The share of the learning rate that a part has in a step, 0 to 1."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """What a resumed run needs."""
        ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes what `state` gave."""
        ...


class Selection:
    """Leaves only the selected parameters and blocks of a model trainable.

    Attributes:
        parts: the layers of which a block is trained, by the name of their matrix.

    Args:
        model: the model, which is changed until `release`.
        blocks: what is trained, by the name of the parameter.
        schedule: of those that move; None moves none.

    Raises:
        UsageError: an unknown parameter, a block of something else than the matrix of a linear layer, indices that it
            does not have, or a matrix that several modules share.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, Block], schedule: Schedule | None = None) -> None:
        parameters = dict(model.named_parameters())
        owners = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
        for name, block in blocks.items():
            if name not in parameters:
                raise UsageError(f"no parameter is called {name!r}{nearest(name, parameters)}")
            if not block.whole:
                module = model.get_submodule(name.rpartition(".")[0])
                turned = type(module).__name__ == TURNED
                if not name.endswith(".weight") or not (isinstance(module, nn.Linear) or turned):
                    raise UsageError(f"{name} is not the matrix of a linear layer; it can be trained as a whole only")
                if owners[id(parameters[name])] > 1:
                    raise UsageError(f"{name} is shared with another module; it can be trained as a whole only")
                block.require(name, parameters[name], turned)
        self.model, self.schedule = model, schedule
        self.parts: dict[str, Sliced] = {}
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in blocks and blocks[name].whole)
        for name, block in blocks.items():
            if not block.whole:
                path = name.removesuffix(".weight")
                self.parts[name] = Sliced(model.get_submodule(path), block)
                model.set_submodule(path, self.parts[name])

    def before(self, step: int) -> None:
        """Prepares a step, counted from 0."""
        watched = () if self.schedule is None else self.schedule.watched(step)
        for name, sliced in self.parts.items():
            sliced.watched, sliced.gradient = name in watched, None

    def after(self, step: int, optimiser: torch.optim.Optimizer) -> None:
        """Writes back what an update moved, and moves blocks.

        Args:
            step: the step, counted from 0.
            optimiser: loses what it knows of the parts that move.
        """
        schedule = self.schedule
        if schedule is not None:
            schedule.look(step, self.parts)
        for name, sliced in self.parts.items():
            sliced.write(1.0 if schedule is None else schedule.rate(name, step))
            sliced.gradient = None
        if schedule is not None:
            for name, block in schedule.moves(step).items():
                self.parts[name].move(block)
                optimiser.state.pop(self.parts[name].part, None)

    def state(self) -> dict[str, torch.Tensor]:
        """The blocks, and what a schedule has moved and knows; the values of the parts are not in it."""
        found = {}
        for name, sliced in self.parts.items():
            found |= {f"{kind}/{name}": each for kind, each in sliced.block.tensors().items()}
            if self.schedule is not None:
                found[f"weight/{name}"] = sliced.weight.detach()
        return found | ({} if self.schedule is None else self.schedule.state())

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes what `state` gave; the values of the parts are read after it, and then `write` completes it."""
        for name, sliced in self.parts.items():
            if self.schedule is not None:
                sliced.weight.data.copy_(state[f"weight/{name}"])
            kinds = ("rows", "columns", "entries")
            sliced.move(Block(**{kind: state[f"{kind}/{name}"] for kind in kinds if f"{kind}/{name}" in state}))
        if self.schedule is not None:
            self.schedule.load(state)

    def write(self) -> None:
        """Writes every part into its matrix."""
        for sliced in self.parts.values():
            sliced.write()

    def release(self) -> None:
        """Puts the layers back into their places; what was trained is in them."""
        for name, sliced in self.parts.items():
            self.model.set_submodule(name.removesuffix(".weight"), sliced.base_layer)
