"""What a score is, and what it gives: a value a visit, ranks, and matrices over pairs of visits.

Two kinds of score. A `WatchScore` only looks at the stream; all of them share one pass. A `PassScore` runs the model
itself, for what one plain pass does not show: attention weights, the head at every depth, gradients, skipped visits.
Sums over tokens are in fp64, so that batches and their order change nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from deepen.errors import UsageError, nearest

if TYPE_CHECKING:
    from deepen.probe.scores.collect import Seen
    from deepen.probe.scores.reading import Reading

# Which end of the values belongs to a visit that matters; `neither` where a score describes and does not judge.
Matters = Literal["high", "low", "neither"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One value a visit.

    Attributes:
        name: of the method, or `method.detail`.
        values: in execution order; NaN where there is none.
        matters: which end belongs to visits that matter.
        meaning: what the value is, in one line with its unit.
        count: how many tokens, windows or weights a value is taken over.
    """

    name: str
    values: tuple[float, ...]
    matters: Matters
    meaning: str
    count: int

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """1 for the visit that matters most; equal values share the better rank, and NaN has none."""
        sign = -1 if self.matters == "low" else 1
        known = sorted((sign * value for value in self.values if not math.isnan(value)), reverse=True)
        return tuple(None if math.isnan(value) else known.index(sign * value) + 1 for value in self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "values": list(self.values),
            "ranks": list(self.ranks),
            "matters": self.matters,
            "meaning": self.meaning,
            "count": self.count,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """One value for each pair of visits, or of streams.

    Attributes:
        name: of the method.
        values: [rows, columns]; NaN where there is none.
        rows: what a row is.
        columns: what a column is.
        meaning: what the value is.
    """

    name: str
    values: np.ndarray
    rows: str
    columns: str
    meaning: str

    def to_json(self) -> dict[str, Any]:
        return {
            "values": self.values.tolist(),
            "rows": self.rows,
            "columns": self.columns,
            "meaning": self.meaning,
        }


@dataclass(frozen=True)
class Result:
    """What one score gives: its columns, the main one first, and its matrices.

    Attributes:
        columns: none where the score was skipped.
        matrices: over pairs.
        note: why the score or a part of it was skipped; empty when nothing was.
    """

    columns: tuple[Column, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    note: str = ""


class WatchScore(ABC):
    """A score that only watches the stream; made anew for every reading.

    Attributes:
        parts: whether it looks at what the parts write.
    """

    parts: ClassVar[bool] = False

    def __init__(self, depth: int) -> None:
        self.depth = depth

    @abstractmethod
    def watch(self, seen: Seen) -> None:
        """Takes one visit of one batch; visits come in execution order."""

    @abstractmethod
    def result(self) -> Result:
        """What was found in all batches so far."""


class PassScore(ABC):
    """A score that runs the model itself.

    Attributes:
        needs_head: whether it needs a causal head.
        needs_attention: whether it needs attention computed in the way that shows its weights.
    """

    needs_head: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False

    @abstractmethod
    def run(self, reading: Reading) -> Result:
        """Reads all windows and calls `reading.step` as they get done."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A visit that is scored.

    Attributes:
        visit: its number in execution order.
        layer: the layer it runs, or the part of it, as programs write it.
    """

    visit: int
    layer: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores of every visit side by side.

    Attributes:
        program: the program that was scored.
        rows: its visits.
        columns: by name, in the order asked for.
        matrices: by name.
        notes: by method, why it or a part of it was skipped.
        tokens: read in one pass.
        windows: read in one pass.
        context: tokens of a window.
        calls: forward calls made by each method, of one batch each; those that only watch share theirs.
        seconds: spent by each method.
    """

    program: str
    rows: tuple[Row, ...]
    columns: Mapping[str, Column]
    matrices: Mapping[str, Matrix]
    notes: Mapping[str, str]
    tokens: int
    windows: int
    context: int
    calls: Mapping[str, int]
    seconds: Mapping[str, float]

    def rank(self, name: str) -> tuple[int | None, ...]:
        """The rank of each visit by one column, 1 for the one that matters most.

        Raises:
            UsageError: no such column.
        """
        if name not in self.columns:
            known = ", ".join(self.columns)
            raise UsageError(f"no score {name!r}{nearest(name, self.columns)}; there are {known or 'none'}")
        return self.columns[name].ranks

    def cells(self, names: Sequence[str] | None = None) -> list[tuple[str, ...]]:
        """The table as rows of text, the heading first; a rank follows each value of a score that judges.

        Args:
            names: columns to show; None shows all.
        """
        heading = ["visit", "layer"]
        columns = [[str(row.visit) for row in self.rows], [row.layer for row in self.rows]]
        for column in (self.columns[name] for name in (self.columns if names is None else names)):
            heading.append(column.name)
            columns.append(["-" if math.isnan(value) else f"{value:.4g}" for value in column.values])
            if column.matters != "neither":
                heading.append("rank")
                columns.append(["-" if rank is None else str(rank) for rank in column.ranks])
        return [tuple(heading), *zip(*columns, strict=True)]

    def table(self) -> str:
        """The scores and ranks as aligned text."""
        rows = self.cells()
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`; values that are not known are NaN."""
        return {
            "program": self.program,
            "rows": [{"visit": row.visit, "layer": row.layer} for row in self.rows],
            "scores": {name: column.to_json() for name, column in self.columns.items()},
            "matrices": {name: matrix.to_json() for name, matrix in self.matrices.items()},
            "notes": dict(self.notes),
            "tokens": self.tokens,
            "windows": self.windows,
            "context": self.context,
            "calls": dict(self.calls),
            "seconds": dict(self.seconds),
        }


def column(name: str, values: Sequence[float] | np.ndarray, matters: Matters, meaning: str, count: int) -> Column:
    """A column of plain floats."""
    plain = tuple(float(value) for value in values)
    return Column(name=name, values=plain, matters=matters, meaning=meaning, count=count)
