"""A figure of the scores by depth: one panel a score, and a heat map of the effects of skipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepen.checkpoint.atomic import atomic_file
from deepen.errors import UsageError
from deepen.probe.scores.base import Column, Matrix, Scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
# The whole visit, its mixer and its feed-forward; told apart in print and by the colour blind.
STYLES = {"": ("#1f4e79", "-"), "a": ("#c55a11", "--"), "f": ("#538135", ":")}
WIDTH, HEIGHT, SQUARE = 8.0, 1.7, 6.0
# A panel whose largest value is so many times the median gets a scale that shows both.
FAR = 20


def require_format(path: str) -> None:
    """Refuses a file that is no figure, before any work is done.

    Raises:
        UsageError: its name ends with neither .svg nor .png.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: expected a name that ends with {' or '.join(FORMATS)}")


def draw(scores: Scores, path: str) -> None:
    """Writes the figure.

    Args:
        scores: with at least one column.
        path: the file, .svg or .png.

    Raises:
        UsageError: the name says neither, or no score has a value.
        SaveError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    require_format(path)
    panels = panels_of(scores)
    effects = scores.matrices.get("effects")
    if not panels:
        raise UsageError(f"{path}: no score has a value to draw; ask for one that this model has")
    heights = [HEIGHT] * len(panels) + ([SQUARE] if effects is not None else [])
    # text stays text, and the same scores give the same file
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "deepen", "font.size": 9}):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.8), layout="constrained")
        FigureCanvasAgg(figure)
        rows = cast("Sequence[Sequence[Axes]]", figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False))
        for (axes, *_), columns in zip(rows, panels, strict=False):
            _lines(axes, scores, columns)
        rows[len(panels) - 1][0].set_xlabel("layer, in the order of visits")
        if effects is not None:
            _heat_map(rows[-1][0], scores, effects)
        figure.suptitle(f"{scores.program}    {scores.tokens} tokens")
        kind = Path(path).suffix.lower().removeprefix(".")
        with atomic_file(Path(path), "wb") as file:
            figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


def panels_of(scores: Scores) -> list[list[Column]]:
    """The columns of each panel: a score's own, and those of its parts."""
    names = [name for name in scores.columns if "." not in name]
    panels = [
        [scores.columns[part] for part in (name, f"{name}.a", f"{name}.f") if part in scores.columns] for name in names
    ]
    return [panel for panel in panels if any(not math.isnan(value) for value in panel[0].values)]


def _lines(axes: Axes, scores: Scores, columns: Sequence[Column]) -> None:
    visits = range(len(scores.rows))
    for column in columns:
        part = column.name.partition(".")[2]
        colour, line = STYLES[part]
        axes.plot(visits, column.values, line, color=colour, marker=".", label=f"part {part}" if part else "layer")
    known = sorted(abs(value) for column in columns for value in column.values if math.isfinite(value))
    middle = known[len(known) // 2]
    if middle and known[-1] > FAR * middle:
        axes.set_yscale("symlog", linthresh=2 * middle)
    axes.set_title(f"{columns[0].name}: {columns[0].meaning}", loc="left", fontsize=9)
    if len(columns) > 1:
        axes.legend(ncols=3, frameon=False, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(-0.5, len(visits) - 0.5)
    _label(axes, scores, "x")


def _heat_map(axes: Axes, scores: Scores, effects: Matrix) -> None:
    import numpy as np

    # only later visits: an earlier one cannot change, and the skipped one always does
    later = np.where(np.triu(np.ones_like(effects.values), 1) > 0, effects.values, np.nan)
    highest = float(np.nanpercentile(later, 98)) if len(later) > 1 else 1.0
    image = axes.imshow(later, cmap="Blues", vmin=0, vmax=highest or 1.0, interpolation="nearest")
    bar: Any = axes.figure.colorbar(image, ax=axes, shrink=0.8, extend="max")
    bar.set_label("largest relative change")
    axes.set_title(
        "effects: how much skipping a row's visit changes what a column's visit writes", loc="left", fontsize=9
    )
    axes.set_xlabel("visit changed")
    axes.set_ylabel("visit skipped")
    _label(axes, scores, "x")
    _label(axes, scores, "y")


def _label(axes: Axes, scores: Scores, which: str) -> None:
    """Ticks that name layers; not more than fit."""
    places = range(0, len(scores.rows), max(1, math.ceil(len(scores.rows) / 20)))
    names = [scores.rows[place].layer for place in places]
    (axes.set_xticks if which == "x" else axes.set_yticks)(list(places), names)
