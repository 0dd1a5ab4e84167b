import re
from random import Random
from xml.etree import ElementTree

import pytest

from deepen.errors import ProgramError
from deepen.program import Plan, Program
from deepen.program.draw_svg import ROW, draw_svg
from deepen.program.draw_text import draw_text
from tests.program.strategies import DEPTH, random_text

SVG = "{http://www.w3.org/2000/svg}"


def plan(text: str, depth: int = 12) -> Plan:
    return Program.parse(text).plan(depth, ["af"] * depth)


def words(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_text_of_a_loop():
    drawing = draw_text(plan("0-3 (4-7)*3[kv=first] 8-11"))
    assert drawing.splitlines() == [
        "0 → 1 → 2 → 3",
        "╭ ×3  kv=first",
        "│ 4 → 5 → 6 → 7",
        "╰",
        "8 → 9 → 10 → 11",
    ]


def test_text_of_groups_marks_copies_and_scopes():
    drawing = draw_text(plan("0 3!zero {4|(5 6)*1..2|_}[comb=mean] ?x[conf=0.9] (7.a)[scale=1/2] 0*!2"))
    assert drawing.splitlines() == [
        "0 → 3!1 zero",
        "┌───┬─────────┬───┐",
        "│ 4 │ ╭ ×1..2 │ · │",
        "│   │ │ 5 → 6 │   │ mean",
        "│   │ ╰       │   │",
        "└───┴─────────┴───┘",
        "⚑ ?x[conf=9/10]",
        "╭ scale=1/2",
        "│ 7.a",
        "╰",
        "╭ ×2  each turn a copy",
        "│ 0, 0!1",
        "╰",
    ]


@pytest.mark.parametrize("width", [40, 72, 100])
def test_long_programs_wrap_at_the_width(width):
    drawing = draw_text(plan("0-59", 60), width)
    assert max(map(len, drawing.splitlines())) <= width
    assert re.findall(r"\d+", drawing) == [str(layer) for layer in range(60)]


def test_svg_shows_each_layer_loop_copy_part_and_mark():
    svg = draw_svg(plan("0-1 (2-3)*3 {4|5.f} 6!zero (7)[scale=1/2] ?x[conf=0.5] @e 8*1..4 0"), title="a <title> & more")
    shown = words(svg)
    for word in (
        "0",
        "1",
        "2",
        "3",
        "4",
        "5.f",
        "6!1 zero",
        "7",
        "8",
        "×3",
        "×1..4",
        "scale=1/2",
        "?x[conf=1/2]",
        "@e",
        "+",
    ):
        assert word in shown
    assert shown[0] == "a <title> & more"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_branches_are_lanes_side_by_side():
    places = {}
    for node in ElementTree.fromstring(draw_svg(plan("0 {1|2} 3"))).iter(f"{SVG}text"):
        places[node.text] = (float(node.get("x", 0)), float(node.get("y", 0)))
    assert places["1"][0] == places["2"][0]
    assert places["1"][1] < places["0"][1] == places["3"][1] < places["2"][1]
    assert places["0"][0] < places["1"][0] < places["3"][0]


def test_copies_are_tinted():
    def fills(text: str) -> set[str | None]:
        return {node.get("fill") for node in ElementTree.fromstring(draw_svg(plan(text))).iter(f"{SVG}rect")}

    assert len(fills("0-3")) == 1
    assert len(fills("0-3 3!")) == 2


def test_a_short_program_shows_every_layer_and_a_long_one_stacks_its_runs():
    assert set(words(draw_svg(plan("0-11")))) == {str(layer) for layer in range(12)}
    shown = words(draw_svg(plan("0-9 (10-19)*2 29-20", 30)))
    assert shown == ["0-9", "10 layers", "10-19", "10 layers", "×2", "29-20", "10 layers"]


def test_a_long_program_without_runs_breaks_into_rows():
    order = [layer * 7 % 60 for layer in range(60)]
    svg = draw_svg(plan(" ".join(map(str, order)), 60))
    root = ElementTree.fromstring(svg)
    assert float(root.get("width", 0)) < ROW + 120
    rows = {node.get("y") for node in root.iter(f"{SVG}text")}
    assert len(rows) >= 4
    assert [word for word in words(svg) if word.isdigit()] == [str(layer) for layer in order]


def test_random_programs_are_drawn_whole_and_well_formed():
    drawn = 0
    for seed in range(300):
        try:
            made = plan(random_text(Random(f"draw {seed}")), DEPTH)
        except ProgramError:
            continue
        drawn += 1
        text, svg = draw_text(made), draw_svg(made)
        root = ElementTree.fromstring(svg)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for node in root.iter(f"{SVG}rect"):
            x, y, w, h = (float(node.get(name, 0)) for name in ("x", "y", "width", "height"))
            assert x >= 0
            assert y >= 0
            assert x + w <= width
            assert y + h <= height
        for key in made.keys:
            assert str(key) in text
    assert drawn > 250
