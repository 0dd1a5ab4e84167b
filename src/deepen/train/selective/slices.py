"""SliceFine: of every matrix a thin slice is trained, and now and then the slice moves on.

    columns    |x . . . . .| -> |. x . . . .| -> ...        k-th move: columns k r ... (k + 1) r - 1, then from 0 again
    rows       the same downwards
    alternating  columns, rows, columns ...                 the slice goes on by one after each pair
    random     a slice of columns drawn from those of the sweep

A slice keeps what it learned when it is left. The last one of a matrix is thinner where r does not divide its side. A
matrix with one slice only is trained without a move, as full fine-tuning would train it.

Kowsher et al., SliceFine, arXiv:2510.08513. The 500 steps between two moves are a reconstruction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.registry import method
from deepen.train.selective.block import Block
from deepen.train.selective.matrices import sides
from deepen.train.selective.selection import Selection
from deepen.train.selective.sliced import Sliced

Order = Literal["columns", "rows", "alternating", "random"]


@method(
    "slicefine",
    family="tune",
    source="arXiv:2510.08513",
    title="SliceFine",
    mechanism="train one slice of columns or rows of every matrix, and move it every few steps",
    cost="gradients and moments of r x n numbers a matrix; of its input only the slice is kept for the backward pass",
)
def slices(
    model: nn.Module, names: Sequence[str], *, width: int = 8, order: Order = "columns", every: int = 500, seed: int = 0
) -> Selection:
    """Selects the first slice of every matrix.

        selection = slices(model, matrices(model, tower), width=4)

    Args:
        model: the model, which is changed until the selection is released.
        names: matrices of linear layers.
        width: columns or rows of a slice.
        order: how it moves.
        every: updates between two moves.
        seed: of the random order.

    Raises:
        UsageError: a value outside its range.
    """
    if width < 1:
        raise UsageError(f"--width {width}: expected 1 or more columns or rows of a slice")
    if every < 1:
        raise UsageError(f"--every {every}: expected 1 or more steps between two moves")
    if order not in get_args(Order):
        raise UsageError(f"--order {order}: expected one of {', '.join(get_args(Order))}")
    schedule = Sweep({name: sides(model, name) for name in names}, width, order, every, seed)
    return Selection(model, {name: schedule.block(name, 0) for name in names}, schedule)


class Sweep:
    """Where the slice of each matrix is after each move.

    Args:
        shapes: rows and columns by matrix.
        width: of a slice.
        order: see the head of the file.
        every: updates between two moves.
        seed: of the random order.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], width: int, order: Order, every: int, seed: int) -> None:
        self.shapes, self.width, self.order, self.every, self.seed = shapes, width, order, every, seed

    def block(self, name: str, move: int) -> Block:
        """The slice of a matrix after so many moves."""
        rows, columns = self.shapes[name]
        across = self.order == "rows" or (self.order == "alternating" and move % 2 == 1)
        side = rows if across else columns
        count = -(-side // self.width)
        at = move // 2 if self.order == "alternating" else move
        if self.order == "random":
            drawn = torch.Generator().manual_seed((self.seed << 24) + move)
            # one draw for all matrices of a move, so that it does not depend on which are trained
            at = int(torch.rand((), generator=drawn, dtype=torch.float64) * count)
        start = at % count * self.width
        indices = torch.arange(start, min(start + self.width, side))
        return Block(rows=indices) if across else Block(columns=indices)

    def watched(self, step: int) -> Collection[str]:
        return ()

    def look(self, step: int, parts: Mapping[str, Sliced]) -> None:
        pass

    def moves(self, step: int) -> Mapping[str, Block]:
        move, rest = divmod(step + 1, self.every)
        if rest:
            return {}
        found = {name: (self.block(name, move - 1), self.block(name, move)) for name in self.shapes}
        return {name: after for name, (before, after) in found.items() if not before.same(after)}

    def rate(self, name: str, step: int) -> float:
        return 1.0

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        pass
