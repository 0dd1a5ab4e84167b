"""The summary of runs whose figures are given, and the page that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from deepen.compare.summary import curve, summary
from deepen.report.comparison import comparison
from deepen.report.page import Page, render


def run(variant: str, seed: int, value: float, measure: str = "bits_per_byte", **other: Any) -> dict[str, Any]:
    looks = [
        {"step": step, "flops": 1e6 * step, "seconds": 0.5 * step, measure: value + 1 / step} for step in (10, 20, 30)
    ]
    return {
        "variant": variant, "seed": seed, "split": "held_out", "results": {"held_out": {measure: value}},
        "curve": looks, "source": {"commit": "c", "uncommitted": False}, "parameters": 1000, "flops_per_token": 6e3,
        "cache_bytes_per_token": 64, "steps": 30, "flops": 3e7, "program": "0-3", "width": 16, "seconds": 15.0,
        "peak_bytes": 10**8, **other,
    }  # fmt: skip


RUNS = [run("base", seed, 2.0 + seed) for seed in range(3)] + [run("loop", seed, 1.9 + seed) for seed in range(3)]


def test_differences_are_paired_and_a_lower_loss_is_better() -> None:
    found = summary(RUNS, "base", "bits_per_byte")
    (loop,) = found["comparisons"]
    assert (loop["name"], loop["verdict"], loop["seeds"]) == ("loop", "better", 3)
    assert loop["mean"] == pytest.approx(-0.1)
    assert [each["mean"] for each in found["variants"]] == pytest.approx([3.0, 2.9])


def test_a_better_variant_is_as_good_as_the_baseline_before_its_end() -> None:
    (loop,) = summary(RUNS, "base", "bits_per_byte")["comparisons"]
    # value + 1 / step: 1.9 + 1 / 10 is below 2 + 1 / 30 at the first look already
    assert loop["reach"]["flops"]["mean"] == pytest.approx(10 / 30)


def test_a_higher_accuracy_is_better_and_seeds_that_one_side_lacks_are_left_out() -> None:
    runs = [run("base", seed, 0.5, "accuracy") for seed in range(3)]
    runs += [run("loop", seed, 0.4 - 0.001 * seed, "accuracy") for seed in range(1, 4)]
    (loop,) = summary(runs, "base", "accuracy")["comparisons"]
    assert (loop["seeds"], loop["verdict"]) == (2, "worse")


def test_a_curve_is_the_mean_at_steps_that_all_seeds_looked_at() -> None:
    short = run("base", 0, 1.0)
    short["curve"] = short["curve"][1:]
    found = curve([short, run("base", 1, 3.0)], "bits_per_byte")
    assert [point["step"] for point in found] == [20, 30]
    assert found[0]["value"] == pytest.approx(2.05)


def test_the_page_shows_verdicts_curves_and_marks_uncommitted_sources() -> None:
    runs = [*RUNS[:-1], {**RUNS[-1], "source": {"commit": "c", "uncommitted": True}}]
    document = {
        "summary": summary(runs, "base", "bits_per_byte"),
        "budget": {"equal": "parameters", "vary": "width", "tolerance": 0.01},
    }
    page = render(Page("t", "l", list(comparison(document))))
    assert "uncommitted changes" in page
    assert "<td" in page
    assert "better" in page
    assert page.count("<polyline") == 4
    assert "training FLOPs" in page
    assert "2 of 3" not in page
    assert "3 of 3" in page
    clean = {**document, "summary": summary(RUNS, "base", "bits_per_byte")}
    assert "uncommitted" not in render(Page("t", "l", list(comparison(clean))))
