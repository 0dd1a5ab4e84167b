"""Columns, ranks and tables."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from deepen.errors import UsageError
from deepen.probe.scores.base import Matrix, Row, Scores, column

NAN = math.nan


def made() -> Scores:
    columns = [
        column("high", [0.5, 0.1, 0.5, 0.9], "high", "m", 3),
        column("low", [0.5, 0.1, NAN, 0.9], "low", "m", 3),
        column("plain", [1, 2, 3, 4], "neither", "m", 3),
    ]
    return Scores(
        program="0-3",
        rows=tuple(Row(visit=at, layer=f"{at}") for at in range(4)),
        columns={each.name: each for each in columns},
        matrices={"pairs": Matrix(name="pairs", values=np.eye(2), rows="r", columns="c", meaning="m")},
        notes={"other": "skipped"},
        tokens=12, windows=3, context=4, calls={"high": 3}, seconds={"high": 0.5},
    )  # fmt: skip


def test_ranks() -> None:
    scores = made()
    assert scores.rank("high") == (2, 4, 2, 1)
    assert scores.rank("low") == (2, 1, None, 3)
    assert scores.rank("plain") == (4, 3, 2, 1)
    with pytest.raises(UsageError, match="did you mean 'plain'"):
        scores.rank("plan")


def test_the_table_has_a_rank_beside_each_value_that_judges() -> None:
    heading, *rows = made().table().splitlines()
    assert heading.split() == ["visit", "layer", "high", "rank", "low", "rank", "plain"]
    assert rows[2].split() == ["2", "2", "0.5", "2", "-", "-", "3"]
    assert len(rows) == 4


def test_json_holds_everything() -> None:
    document = json.loads(json.dumps(made().to_json()))
    assert document["rows"][3] == {"visit": 3, "layer": "3"}
    assert document["scores"]["low"]["ranks"] == [2, 1, None, 3]
    assert document["matrices"]["pairs"]["values"] == [[1.0, 0.0], [0.0, 1.0]]
    assert document["notes"] == {"other": "skipped"}
    assert (document["tokens"], document["calls"]) == (12, {"high": 3})
