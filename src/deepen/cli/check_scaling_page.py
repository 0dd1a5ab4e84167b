"""The files of `deepen check-scaling`: its figures as JSON, and one page with two charts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepen import __version__
from deepen.cli.check_scaling import middle, slope_text
from deepen.cli.output import called
from deepen.report.chart import Line, lines
from deepen.report.page import Chart, Charts, Commands, Page, Section, Table, write

if TYPE_CHECKING:
    from deepen.train.scaling import Curve

# Lines that one chart has colours for.
MOST = 3


def write_files(folder: Path, document: Mapping[str, Any], curves: Sequence[Curve]) -> None:
    """Writes scaling.json and index.html."""
    with (folder / "scaling.json").open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
    write(page(document, curves), folder / "index.html")


def page(document: Mapping[str, Any], curves: Sequence[Curve]) -> Page:
    labels = [str(depth) for depth in document["depths"]]
    charts: list[Chart] = []
    for some in (curves[at : at + MOST] for at in range(0, len(curves), MOST)):
        names = [curve.rule for curve in some]
        moved = [Line(each.rule, relative(each)) for each in some]
        best = [Line(curve.rule, curve.best) for curve in some]
        charts += [
            Chart(
                f"Feature change, as a multiple of that at depth {labels[0]}",
                lines(moved, labels, "depth"),
                f"RMS change of the last stream after {document['steps']} steps at a rate of {document['rates'][0]:g}; "
                "a level line scales.",
                names,
            ),
            Chart(
                "Best learning rate",
                lines(best, labels, "depth"),
                f"Of {', '.join(f'{rate:g}' for rate in document['rates'])}, that of the lowest loss.",
                names,
            ),
        ]
    rows = [(curve.rule, *slope_text(curve)) for curve in curves]
    losses = [
        (curve.rule, f"{rate:g}", *(f"{row[at]:.4g}" for row in curve.losses))
        for curve in curves
        for at, rate in enumerate(document["rates"])
    ]
    size = (
        f"Stacks of width {document['width']}, {document['seeds']} seeds, {document['batch']} windows of "
        f"{document['context']} bytes of {Path(document['data']).name} a step."
    )
    slopes = Table(
        ["parametrisation", "slope", "95 % interval", ""],
        rows,
        "Slope of log change over log depth, with an interval over seeds; between -0.1 and 0.1 it is called flat.",
        (1, 2),
    )
    table = Table(
        ["parametrisation", "rate", *(f"depth {label}" for label in labels)],
        losses,
        "Loss in nats a byte after the last step, on a batch that was not trained on, mean over seeds.",
        tuple(range(1, len(labels) + 2)),
    )
    return Page(
        title="Training over depth",
        lead=size,
        sections=[
            Section("Over depth", [Charts(charts), slopes]),
            Section("Losses", [table]),
            Section("The same again", [Commands([shlex.join(["deepen", *called.get()])])]),
        ],
        foot=f"deepen {__version__}",
    )


def relative(curve: Curve) -> list[float]:
    """The change at each depth over that at the first."""
    return [middle(each) / middle(curve.changes[0]) for each in curve.changes]
