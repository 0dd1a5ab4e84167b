"""The page of a folder of results, made of documents as the commands keep them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from deepen.errors import DataError, SaveError
from deepen.report.kept import keep, read_kept
from deepen.report.page import render
from deepen.report.study import agreements, spearman, study_page


def evaluation(perplexity: float) -> dict[str, Any]:
    return {"perplexity": perplexity, "nll": 100 * math.log(perplexity), "tokens": 100}


def found(program: str = "0 2-3") -> dict[str, Any]:
    part = {
        "best": evaluation(30.0),
        "whole": evaluation(20.0),
        "difference": {"windows": 4, "mean": 0.4, "low": 0.3, "high": 0.5, "ratio": 1.5},
    }
    frontier = [
        {"program": program, "cost": 3.0, "nll": 100 * math.log(31)},
        {"program": "0-3", "cost": 4.0, "nll": 100 * math.log(21)},
    ]
    return {
        "model": "some/model", "data": "text.txt", "program": program, "whole": "0-3", "method": "greedy",
        "budget": "layers=0.75", "cost": 3.0, "limit": 3.0, "whole_cost": 4.0, "candidates": 7, "ended": True,
        "visits": {"run": 12, "separate": 30}, "searched": part, "held_out": part, "frontier": frontier,
    }  # fmt: skip


def score(name: str, values: list[float | None], matters: str = "high") -> dict[str, Any]:
    return {
        "values": values,
        "ranks": [1] * len(values),
        "matters": matters,
        "meaning": f"what {name} means",
        "count": 9,
    }


def scored() -> dict[str, Any]:
    scores = {
        "angular": score("angular", [0.4, 0.1, 0.2, 0.3]),
        "backwards": score("backwards", [0.1, 0.4, 0.3, 0.2], "low"),
        "removal": score("removal", [9.0, 0.1, 0.2, 0.3]),
        "removal.a": score("removal.a", [4.0, 0.1, None, 0.3]),
    }
    effects = {"values": [[1.0] * 4] * 4, "rows": "visit skipped", "columns": "visit changed", "meaning": "m"}
    return {
        "model": "some/model", "data": "text.txt", "program": "0-3",
        "rows": [{"visit": n, "layer": f"{n}"} for n in range(4)],
        "scores": scores, "matrices": {"effects": effects}, "notes": {"lens": "skipped: no head"}, "tokens": 99,
        "windows": 2, "context": 50, "calls": {}, "seconds": {},
    }  # fmt: skip


def test_a_page_of_every_kind(tmp_path: Path) -> None:
    keep(tmp_path, "search", "deepen search some/model --budget 0.75", found())
    keep(tmp_path, "search", "deepen search again", found("0 {1|2}"))
    keep(tmp_path, "score", "deepen score some/model", scored())
    run = {"model": "m", "program": "0 1.f 2", "prompt": "Why <b>?", "text": "Because  it\nis.", "tokens": 3}
    keep(tmp_path, "run", "deepen run", run)
    rows = [
        {"program": "0-3", "perplexity": None, "speed": {"prefill": 71.0, "decode": 9.0}},
        {
            "program": "0-2",
            "perplexity": 5.0,
            "difference": {"value": 0.1, "low": 0.0, "high": math.log(1.25), "ratio": 1.105, "windows": 4},
            "speed": {"prefill": 99.5, "decode": 12.0},
            "tasks": [{"task": "riddles", "metric": "acc", "value": 0.625}],
        },
    ]
    keep(tmp_path, "eval", "deepen eval", {"model": "m", "data": "t", "results": rows})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval.json", "run.json", "score.json", "search-2.json", "search.json",
    ]  # fmt: skip
    html = render(study_page(tmp_path, read_kept(tmp_path)))
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    for expected in (
        "0 2-3: perplexity 31 at 3", "x1.5", "1.35 to 1.649", "what angular means", "skipped: no head",
        "deepen search some/model --budget 0.75", "Why &lt;b&gt;?", "Because it is.", "12 instead of 30",
        "visit skipped", "x1.105", "1 to 1.25", "99.5", "riddles", "0.625",
    ):  # fmt: skip
        assert expected in html, expected
    assert html.count("<svg") >= 8


def test_agreement_with_the_measured_drop_follows_what_matters() -> None:
    assert agreements(scored()["scores"]) == [("angular", pytest.approx(1.0)), ("backwards", pytest.approx(1.0))]
    assert agreements({"angular": score("angular", [1.0])}) == []


def test_spearman_against_scipy_values() -> None:
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233)
    assert spearman([1, 2, math.nan, 4], [1, 3, 9, 2]) == pytest.approx(0.5)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_other_files_are_left_alone_and_broken_ones_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_kept(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="no results there"):
        read_kept(tmp_path)
    keep(tmp_path, "score", "deepen score", scored())
    assert [each.kind for each in read_kept(tmp_path)] == ["score"]
    (tmp_path / "zzz.json").write_text("{")
    with pytest.raises(DataError, match=r"zzz\.json: not readable"):
        read_kept(tmp_path)
    (tmp_path / "zzz.json").write_text(json.dumps({"kept": {"kind": "score", "format": 99}}))
    with pytest.raises(DataError, match="format 99, expected 1"):
        read_kept(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot make this folder"):
        keep(tmp_path / "file", "score", "", {})
