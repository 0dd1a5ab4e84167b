"""The interval of two evaluations of a model: seeded, and none where there is one window."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import deepen
from tests.cli.models import TEXT, checkpoint


def test_an_evaluation_against_another(tmp_path: Path) -> None:
    ck = deepen.open(checkpoint(tmp_path / "m", "llama"))
    (whole, cut), _ = deepen.evaluate_many(ck, ["0-5", "0-3 5"], TEXT[:400], context=32)
    found = deepen.paired_difference(cut, whole, seed=3)
    assert found.value == pytest.approx(math.log(cut.perplexity / whole.perplexity))
    assert found.low < found.value < found.high
    assert found == deepen.paired_difference(cut, whole, seed=3)
    assert found.low != deepen.paired_difference(cut, whole, seed=4).low
    back = deepen.paired_difference(whole, cut, seed=3)
    assert (back.value, back.low, back.high) == pytest.approx((-found.value, -found.high, -found.low))


def test_one_window_has_no_interval(tmp_path: Path) -> None:
    ck = deepen.open(checkpoint(tmp_path / "m", "llama"))
    (whole, cut), _ = deepen.evaluate_many(ck, ["0-5", "0-3 5"], TEXT[:32], context=32)
    found = deepen.paired_difference(cut, whole)
    assert found.windows == 1
    assert math.isnan(found.low)
    assert math.isnan(found.high)
