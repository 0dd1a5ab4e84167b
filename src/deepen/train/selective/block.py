"""What of a parameter is trained, as data: all of it, rows and columns of a matrix, or single entries.

    rows 0 3, columns 1 2          entries 1 7
    . x x .                        . x . .
    . . . .                        . . . x
    . . . .                        . . . .
    . x x .                        . . . .

A row belongs to an output of the matrix and a column to an input, in whichever order the file has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepen.errors import UsageError

# The linear layer of GPT-2, whose matrix is transposed.
TURNED = "Conv1D"


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """Indices into a parameter; with none given, it is all of the parameter.

    Attributes:
        rows: outputs, ascending; None is every one.
        columns: inputs, ascending; None is every one.
        entries: places in the flattened parameter, ascending, in place of rows and columns.

    Raises:
        UsageError: indices that are not ascending from 0, or both notations.
    """

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    entries: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.entries is not None and (self.rows is not None or self.columns is not None):
            raise UsageError("a block is given by its entries or by rows and columns; give one of the two")
        for name, indices in self.tensors().items():
            ascending = indices.dim() == 1 and bool((indices.diff() > 0).all()) and bool((indices >= 0).all())
            if not ascending or not len(indices):
                raise UsageError(f"the {name} of a block: expected one or more numbers from 0 in ascending order")

    @property
    def whole(self) -> bool:
        return not self.tensors()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The indices that are given, by name."""
        named = {"rows": self.rows, "columns": self.columns, "entries": self.entries}
        return {name: each for name, each in named.items() if each is not None}

    def same(self, other: Block) -> bool:
        """Whether two blocks are given by the same indices."""
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(each, theirs[name]) for name, each in mine.items())

    def to(self, device: torch.device) -> Block:
        return Block(**{name: each.to(device) for name, each in self.tensors().items()})

    def require(self, name: str, matrix: torch.Tensor, turned: bool) -> None:
        """Refuses indices that the matrix does not have.

        Raises:
            UsageError: an index past the end.
        """
        rows, columns = matrix.shape[::-1] if turned else matrix.shape
        ends = {"rows": rows, "columns": columns, "entries": matrix.numel()}
        for kind, indices in self.tensors().items():
            if int(indices[-1]) >= ends[kind]:
                raise UsageError(f"{name} has {ends[kind]} {kind}, and the block names number {int(indices[-1])}")

    def take(self, matrix: torch.Tensor, turned: bool) -> torch.Tensor:
        """A copy of the block, [rows, columns] in the order of the matrix, or [entries, 1].

        Args:
            matrix: [n, m], or [m, n] where `turned`.
            turned: whether the matrix has inputs first.
        """
        if self.entries is not None:
            return matrix.flatten()[self.entries, None]
        first, second = self._order(turned)
        taken = matrix if first is None else matrix.index_select(0, first)
        return (taken if second is None else taken.index_select(1, second)).clone()

    def put(self, matrix: torch.Tensor, part: torch.Tensor, turned: bool) -> None:
        """Writes a block that `take` gave back into its matrix."""
        if self.entries is not None:
            matrix.view(-1)[self.entries] = part[:, 0]
            return
        first, second = self._order(turned)
        if first is None:
            matrix[:, slice(None) if second is None else second] = part
        else:
            matrix[first if second is None else (first[:, None], second)] = part

    def _order(self, turned: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (self.columns, self.rows) if turned else (self.rows, self.columns)
