"""What commands print, and how they report progress."""

from __future__ import annotations

import io
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from deepen.cli import output, progress
from deepen.cli.apply import by_layer, moves, shard_bytes
from deepen.cli.demo import choose
from deepen.errors import FamilyError, UsageError


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": math.inf, "b": (1, Fraction(1, 2)), "c": Path("x"), "d": None, 5: True, "e": "é"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": None, "b": [1, 0.5], "c": "x", "d": None, "5": True, "e": "é"}
    assert "é" in text
    with pytest.raises(TypeError):
        output.print_json({"a": object()})


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (999, "999"), (1000, "1 k"), (134515008, "134.5 M"), (2.5e12, "2.5 T")]
)
def test_amount(value: float, text: str) -> None:
    assert output.amount(value) == text


@pytest.mark.parametrize("value, text", [(12, "12 B"), (47185920, "47.19 MB")])
def test_size(value: float, text: str) -> None:
    assert output.size(value) == text


def test_table_aligns() -> None:
    assert output.table([("name", "n"), ("a", "10"), ("bcdef", "9")]) == "name    n\na      10\nbcdef   9"


@pytest.mark.parametrize("layers, text", [((), ""), ((3,), "3"), ((0, 1, 2, 5, 6, 2, 9), "0-2 5-6 2 9")])
def test_runs(layers: tuple[int, ...], text: str) -> None:
    assert output.runs(layers) == text


@pytest.mark.parametrize("text, count", [("5GB", 5 * 10**9), ("1.5 mb", 1500000), ("7", 7), ("2k", 2000)])
def test_shard_bytes(text: str, count: int) -> None:
    assert shard_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "0.2", "5XB"])
def test_no_shard_bytes(text: str) -> None:
    with pytest.raises(UsageError):
        shard_bytes(text)


def test_tensors_are_drawn_together_by_layer() -> None:
    names = ["m.layers.3.a.weight", "m.layers.3.b.1.weight", "m.layers.4.a.weight", "head.weight"]
    assert by_layer(names) == ["m.layers 3-4 (3 tensors)", "head.weight"]
    assert moves({"m.layers.1.a": "m.layers.5.a", "m.layers.1.b": "m.layers.5.b", "x": "y"}) == [
        "m.layers   1 <- 5 (2 tensors)",
        "x <- y",
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_without_a_terminal_a_line_comes_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with progress.progress("reading", None, "windows") as step:
        for _ in range(12):
            clock.now += 1.0
            step(1, 20)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["reading: 5/20 windows, 1/s, 15 s left", "reading: 10/20 windows, 1/s, 10 s left"]


def test_in_a_terminal_there_is_a_bar_and_brackets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.progress("0-3[kv=first]", 4, "windows") as step:
        step(4)
    assert "0-3[kv=first]" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()


class Model:
    """As much of a checkpoint as the choice of programs reads."""

    def __init__(self, **depth: int) -> None:
        self.depth = depth
        self.family = type("Family", (), {"model_type": "made"})()


def test_the_demo_cuts_thirds() -> None:
    programs = list(choose(Model(text=30)).values())  # pyright: ignore[reportArgumentType]
    assert programs[:4] == ["0-29", "10-29", "0-9 20-29", "0-19"]
    assert programs[4:] == ["0-13 (14-16)*2 17-29", "0-14 {15|16} 17-29"]


@pytest.mark.parametrize("depth", range(6, 70))
def test_the_programs_of_the_demo_fit_every_depth(depth: int) -> None:
    from deepen.program import Program

    for program in choose(Model(text=depth)).values():  # pyright: ignore[reportArgumentType]
        assert Program.parse(program).plan(depth, ["af"] * depth).visits


def test_models_the_demo_does_not_take() -> None:
    with pytest.raises(UsageError, match="at least 6 layers, got 5"):
        choose(Model(text=5))  # pyright: ignore[reportArgumentType]
    with pytest.raises(FamilyError, match="encoder, decoder"):
        choose(Model(encoder=6, decoder=6))  # pyright: ignore[reportArgumentType]
