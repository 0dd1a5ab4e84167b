"""Each move against all that it makes of a small program."""

from __future__ import annotations

import pytest

from deepen.adaptive.search.moves import MOVES, Bank, chosen, neighbours, text_of
from deepen.errors import UsageError
from deepen.program import Program
from deepen.program.normal import normalise


def made(move: str, text: str, depth: int = 4) -> list[str]:
    items = normalise(Program.parse(text).tree(), depth).items
    return [text_of(one) for one in MOVES[move](items, Bank(depth, "af"))]


@pytest.mark.parametrize(
    "move, text, expected",
    [
        ("drop", "0 1 3", ["1 3", "0 3", "0-1"]),
        ("drop", "2", []),
        ("drop", "0 (1-2)*2", ["(1-2)*2", "0"]),
        ("part", "0 1.f", ["0.a 1.f", "0.f 1.f"]),
        ("restore", "0 2-3", ["0-3"]),
        ("restore", "1-2", ["0-2", "1-3"]),
        ("restore", "0.a 1*2 {2|3}", ["0 1*2 {2|3}", "0.a 1 {2|3}", "0.a 1*2 2-3"]),
        ("restore", "0-2 3[scale=1/2]", ["0-3"]),
        ("repeat", "0 1*2", ["0*2 1*2", "0 1*3"]),
        ("loop", "0-2", ["(0-1)*2 2", "(0-2)*2", "0 (1-2)*2"]),
        ("swap", "0 1 2", ["1-0 2", "0 2-1"]),
        ("move", "0 1 2", ["1-2 0", "2 0-1"]),
        ("group", "0 1 2", ["{0|1} 2", "0 {1|2}"]),
        ("group", "{0|1} 2", []),
        ("scale", "0 1*2", ["0[scale=1/2] 1*2", "0[scale=2] 1*2"]),
    ],
)
def test_moves(move: str, text: str, expected: list[str]) -> None:
    assert made(move, text) == expected


@pytest.mark.parametrize("move", MOVES)
def test_what_moves_make_fits_the_bank(move: str) -> None:
    for text in ("0-3", "3-0", "0 2", "0-1 (2-3)*2", "{0|1} 2.f 3"):
        for one in made(move, text):
            plan = Program.parse(one).plan(4, ["af"] * 4)
            assert plan.visits


def test_a_layer_of_one_piece_has_no_parts() -> None:
    items = normalise(Program.parse("0-3").tree(), 4).items
    assert list(MOVES["part"](items, Bank(4, ""))) == []


def test_neighbours_are_distinct_and_not_the_program_itself() -> None:
    items = normalise(Program.parse("0 0 1").tree(), 2).items
    texts = [text_of(one) for one in neighbours(items, Bank(2, "af"), chosen(["drop", "swap"]))]
    assert texts == ["0-1", "0 0", "0-1 0"]


def test_unknown_moves_get_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'repeat'"):
        chosen(["drop", "repaet"])
