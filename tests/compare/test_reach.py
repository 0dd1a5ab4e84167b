"""When a variant is as good as the baseline at its end, on curves whose crossings are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepen.compare.reach import reach, spent_at


def curve(*points: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"flops": at, "seconds": 2 * at, "loss": value} for at, value in points]


def run(*points: tuple[float, float]) -> dict[str, Any]:
    return {"curve": curve(*points)}


def test_the_first_crossing_is_interpolated_between_two_looks() -> None:
    looks = curve((10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0))
    assert spent_at(looks, "loss", 3.25, "flops", higher_is_better=False) == pytest.approx(17.5)
    assert spent_at(looks, "loss", 3.25, "seconds", higher_is_better=False) == pytest.approx(35)
    assert spent_at(looks, "loss", 4.5, "flops", higher_is_better=False) == 10
    assert spent_at(looks, "loss", 1.9, "flops", higher_is_better=False) is None


def test_more_is_better_of_an_accuracy() -> None:
    looks = curve((10, 0.2), (20, 0.4))
    assert spent_at(looks, "loss", 0.3, "flops", higher_is_better=True) == pytest.approx(15)
    assert spent_at(looks, "loss", 0.5, "flops", higher_is_better=True) is None


def test_shares_are_averaged_by_their_logarithms() -> None:
    base = [run((50, 3.0), (100, 2.0)), run((50, 3.0), (200, 1.0))]
    one = [run((40, 3.0), (50, 2.0)), run((100, 3.0), (400, 1.0))]
    found = reach(one, base, "loss", higher_is_better=False)
    assert (found["seeds"], found["reached"]) == (2, 2)
    assert found["flops"]["mean"] == pytest.approx(math.sqrt(0.5 * 2))
    assert found["flops"]["low"] < 0.5 < 2 < found["flops"]["high"]
    assert found["seconds"] == pytest.approx(found["flops"])


def test_a_seed_that_never_gets_there_leaves_no_mean() -> None:
    base = [run((50, 3.0), (100, 2.0))] * 2
    found = reach([run((40, 3.0), (50, 2.0)), run((40, 3.0), (90, 2.5))], base, "loss", higher_is_better=False)
    assert (found["seeds"], found["reached"]) == (2, 1)
    assert found["flops"] == {"mean": None, "low": None, "high": None}


def test_one_seed_has_a_share_and_no_interval_and_no_looks_have_neither() -> None:
    base = run((50, 3.0), (100, 2.0))
    found = reach([run((40, 3.0), (50, 2.0))], [base], "loss", higher_is_better=False)
    assert found["flops"] == {"mean": pytest.approx(0.5), "low": None, "high": None}
    assert reach([run()], [run()], "loss", higher_is_better=False)["reached"] == 0
