"""Charts as inline SVG: lines by depth, points of cost against quality, a heat map; no script, hover names each mark.

Colours are those of the page, so that a chart follows light, dark and print. Every mark has a `<title>`, which
browsers show on hover and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34
# A chart whose largest value is so many times the median gets a scale that shows both.
FAR = 20
TICKS = 4
# Pixels between two ticks, so that their numbers do not touch.
APART = 11
# Curves of one chart that look different.
CURVES = 6


@dataclass(frozen=True)
class Line:
    """One line of a chart: a value a visit; NaN leaves a gap."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Point:
    """One point: where it lies, what hovering shows, and whether it stands out."""

    x: float
    y: float
    label: str
    strong: bool = False


@dataclass(frozen=True)
class Curve:
    """A line through points, by their x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels: linear, or linear near 0 and logarithmic far from it."""

    low: float
    high: float
    start: float
    stop: float
    threshold: float = 0.0

    def __call__(self, value: float) -> float:
        low, high, at = (self._bend(each) for each in (self.low, self.high, value))
        return self.start + (at - low) / ((high - low) or 1.0) * (self.stop - self.start)

    def _bend(self, value: float) -> float:
        if not self.threshold:
            return value
        return math.copysign(math.log1p(abs(value) / self.threshold), value)

    def ticks(self) -> list[float]:
        """Round values inside the scale; powers of ten where it bends."""
        if not self.threshold:
            return round_values(self.low, self.high)
        first = math.floor(math.log10(self.threshold))
        last = math.ceil(math.log10(max(abs(self.low), abs(self.high))))
        step = max(1, (last - first) // TICKS + 1)
        powers = [10.0**power for power in range(first, last + 1, step)]
        return [each for each in (0.0, *powers) if self.low <= each <= self.high]


def round_values(low: float, high: float) -> list[float]:
    """About `TICKS` multiples of 1, 2 or 5 times a power of ten between two values."""
    if not high > low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], start: float, stop: float, *, bends: bool = True) -> Scale:
    """A scale that shows all finite values, with room at both ends."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    middle = sorted(map(abs, known))[len(known) // 2]
    if bends and middle and max(map(abs, known)) > FAR * middle:
        return Scale(min(low, 0.0), high, start, stop, 2 * middle)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low - room, high + room, start, stop)


def lines(lines: Sequence[Line], labels: Sequence[str], across: str = "layer") -> str:
    """Lines over the visits of a program.

    Args:
        lines: up to three.
        labels: the name of each place on the horizontal axis.
        across: what that axis counts.
    """
    xs = Scale(-0.5, len(labels) - 0.5, LEFT, WIDTH - RIGHT)
    ys = scale_of([value for line in lines for value in line.values], HEIGHT - BOTTOM, TOP)
    marks = [_grid(ys), _names(labels, xs, across)]
    for index, line in enumerate(lines):
        kind = f"line{index}"
        run: list[str] = []
        for at, value in enumerate([*line.values, math.nan]):
            if math.isfinite(value):
                run.append(f"{xs(at):.1f},{ys(value):.1f}")
            else:
                if len(run) > 1:
                    marks.append(f'<polyline class="{kind}" points="{" ".join(run)}"/>')
                run = []
        for at, value in enumerate(line.values):
            if math.isfinite(value):
                title = f"{line.name + ', ' if len(lines) > 1 else ''}{across} {labels[at]}: {value:.4g}"
                marks.append(_dot(xs(at), ys(value), kind, title, 2.2))
    return _svg(marks, WIDTH, HEIGHT, ", ".join(line.name for line in lines))


def points(points: Sequence[Point], across: str, up: str, *, connect: bool = True) -> str:
    """Points of cost against quality; those that stand out are drawn last and larger."""
    xs = scale_of([point.x for point in points], LEFT, WIDTH - RIGHT, bends=False)
    ys = scale_of([point.y for point in points], HEIGHT - BOTTOM, TOP)
    marks = [_grid(ys), _axis(xs, across)]
    ordered = sorted(points, key=lambda point: point.x)
    if connect and len(ordered) > 1:
        steps = " ".join(f"{xs(point.x):.1f},{ys(point.y):.1f}" for point in ordered)
        marks.append(f'<polyline class="line0 faint" points="{steps}"/>')
    for point in sorted(points, key=lambda point: point.strong):
        kind, size = ("strong", 5.0) if point.strong else ("line0", 3.2)
        marks.append(_dot(xs(point.x), ys(point.y), kind, point.label, size))
    marks.append(f'<text class="axis" x="{LEFT}" y="{TOP - 3}">{escape(up)}</text>')
    return _svg(marks, WIDTH, HEIGHT, f"{up} against {across}")


def curves(curves: Sequence[Curve], across: str, up: str) -> str:
    """Curves over one axis, up to `CURVES` of them told apart.

    Args:
        curves: at least one point in all.
        across: what the horizontal axis is.
        up: what the vertical one is.
    """
    xs = scale_of([x for curve in curves for x, _ in curve.points], LEFT, WIDTH - RIGHT, bends=False)
    ys = scale_of([y for curve in curves for _, y in curve.points], HEIGHT - BOTTOM, TOP)
    marks = [_grid(ys), _axis(xs, across)]
    for index, curve in enumerate(curves):
        kind = f"line{index % CURVES}"
        known = sorted((x, y) for x, y in curve.points if math.isfinite(y))
        steps = " ".join(f"{xs(x):.1f},{ys(y):.1f}" for x, y in known)
        marks.append(f'<polyline class="{kind}" points="{steps}"/>')
        for x, y in known:
            title = f"{curve.name}, {across} {number(x)}: {y:.4g}"
            marks.append(_dot(xs(x), ys(y), kind, title, 1.8))
    marks.append(f'<text class="axis" x="{LEFT}" y="{TOP - 3}">{escape(up)}</text>')
    return _svg(marks, WIDTH, HEIGHT, f"{up} against {across}")


def heat_map(
    values: Sequence[Sequence[float]], labels: Sequence[str], rows: str, columns: str, highest: float | None = None
) -> str:
    """A square of cells, darker for larger values; NaN cells stay empty.

    Args:
        values: [n, n].
        labels: the name of each row and column.
        rows: what a row is.
        columns: what a column is.
        highest: the value of the darkest cell; None takes the 98th percentile.
    """
    known = sorted(value for row in values for value in row if math.isfinite(value))
    top = highest if highest is not None else (known[int(0.98 * (len(known) - 1))] if known else 1.0)
    size = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    marks = []
    for down, row in enumerate(values):
        for across, value in enumerate(row):
            if math.isfinite(value):
                shade = min(1.0, max(0.0, value / (top or 1.0)))
                title = f"{rows} {labels[down]}, {columns} {labels[across]}: {value:.3g}"
                marks.append(
                    f'<rect class="cell" x="{LEFT + across * size:.2f}" y="{TOP + down * size:.2f}" '
                    f'width="{size:.2f}" height="{size:.2f}" fill-opacity="{shade:.3f}">'
                    f"<title>{escape(title)}</title></rect>"
                )
    every = max(1, math.ceil(len(labels) / 10))
    bottom = TOP + len(labels) * size
    for at in range(0, len(labels), every):
        middle = (at + 0.5) * size
        marks.append(f'<text class="tick end" x="{LEFT - 4}" y="{TOP + middle + 3:.1f}">{escape(labels[at])}</text>')
        marks.append(
            f'<text class="tick middle" x="{LEFT + middle:.1f}" y="{bottom + 12:.1f}">{escape(labels[at])}</text>'
        )
    marks.append(f'<text class="axis middle" x="{(LEFT + WIDTH) / 2}" y="{bottom + 27:.1f}">{escape(columns)}</text>')
    turned = f'transform="rotate(-90 12 {(TOP + bottom) / 2:.1f})"'
    marks.append(f'<text class="axis middle" x="12" y="{(TOP + bottom) / 2:.1f}" {turned}>{escape(rows)}</text>')
    return _svg(marks, WIDTH, math.ceil(bottom + 34), f"{rows} against {columns}")


def _svg(marks: Sequence[str], width: int, height: int, name: str) -> str:
    inside = "\n".join(marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img" '
        f"aria-label={quoteattr(name)}>\n{inside}\n</svg>"
    )


def _dot(x: float, y: float, kind: str, title: str, size: float) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{escape(title)}</title></circle>'


def _grid(ys: Scale) -> str:
    marks: list[str] = []
    last = math.inf
    for value in ys.ticks():
        y = ys(value)
        if last - y < APART:
            continue
        last = y
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="tick end" x="{LEFT - 4}" y="{y + 3:.1f}">{number(value)}</text>')
    return "\n".join(marks)


def _axis(xs: Scale, name: str) -> str:
    return _ticks([(xs(value), number(value)) for value in xs.ticks()], name)


def _names(labels: Sequence[str], xs: Callable[[float], float], name: str) -> str:
    every = max(1, math.ceil(len(labels) / 10))
    return _ticks([(xs(at), labels[at]) for at in range(0, len(labels), every)], name)


def _ticks(places: Sequence[tuple[float, str]], name: str) -> str:
    y = HEIGHT - BOTTOM + 13
    marks = [f'<text class="tick middle" x="{x:.1f}" y="{y}">{escape(text)}</text>' for x, text in places]
    marks.append(f'<text class="axis middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(name)}</text>')
    return "\n".join(marks)


def number(value: float) -> str:
    """A value in at most three figures: 0.25, 12 k, 3 M."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
