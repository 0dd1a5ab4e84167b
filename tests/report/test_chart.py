"""Charts: what is drawn where, what hovering shows, and that no text escapes into markup."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from deepen.report.chart import HEIGHT, WIDTH, Line, Point, heat_map, lines, number, points, round_values, scale_of

SVG = "{http://www.w3.org/2000/svg}"


def titles(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def test_a_line_has_a_dot_a_value_and_a_gap_where_there_is_none() -> None:
    svg = lines([Line("score", [1.0, 2.0, math.nan, 4.0, 3.0])], ["0", "1", "2", "3", "4"])
    assert titles(svg) == ["layer 0: 1", "layer 1: 2", "layer 3: 4", "layer 4: 3"]
    root = ElementTree.fromstring(svg)
    assert [len((line.get("points") or "").split()) for line in root.iter(f"{SVG}polyline")] == [2, 2]
    heights = [float(dot.get("cy") or "nan") for dot in root.iter(f"{SVG}circle")]
    assert heights[2] < heights[3] < heights[1] < heights[0]


def test_all_marks_lie_inside() -> None:
    values = [0.001, 0.002, 1e6, -3.0, 0.5]
    for svg in (
        lines([Line("a", values), Line("b", [-value for value in values])], list("01234")),
        points([Point(at, value, "p") for at, value in enumerate(values)], "cost", "loss"),
        points([Point(5.0, 5.0, "alone")], "cost", "loss"),
    ):
        for dot in ElementTree.fromstring(svg).iter(f"{SVG}circle"):
            assert 0 <= float(dot.get("cx") or "nan") <= WIDTH
            assert 0 <= float(dot.get("cy") or "nan") <= HEIGHT


def test_a_far_value_bends_the_scale_so_that_the_others_stay_apart() -> None:
    straight = scale_of([1.0, 2.0, 3.0], 0.0, 100.0)
    bent = scale_of([1.0, 2.0, 3.0, 1e5], 0.0, 100.0)
    assert straight.threshold == 0
    assert bent(3.0) - bent(1.0) > 2
    assert bent(1e5) == pytest.approx(100.0)


def test_a_heat_map_has_a_cell_a_value_and_darker_for_larger() -> None:
    svg = heat_map([[math.nan, 0.5], [math.nan, 1.0]], ["3", "4"], "skipped", "changed", highest=1.0)
    cells = [cell.get("fill-opacity") for cell in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    assert cells == ["0.500", "1.000"]
    assert titles(svg) == ["skipped 3, changed 4: 0.5", "skipped 4, changed 4: 1"]


def test_text_is_escaped() -> None:
    svg = points([Point(1.0, 1.0, "<script>&"), Point(2.0, 2.0, "b", strong=True)], 'co"st', "a<b")
    assert titles(svg) == ["<script>&", "b"]
    assert "<script>" not in svg


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 7.9), (1e-6, 3e-6), (5.0, 5.0), (999.0, 1001.0)])
def test_round_values_lie_inside_and_are_few(low: float, high: float) -> None:
    ticks = round_values(low, high)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks)
    assert all(re.fullmatch(r"-?[\d.e+-]+( [kMGT])?", number(tick)) for tick in ticks)
