"""Every family against models made by hand; the verdicts are the rows of docs/families.md.

After a change, `python -m deepen.checkpoint.families_page` writes the page anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepen.checkpoint.examine import examine, page_refusals, page_rows
from deepen.checkpoint.family import known_families

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize("model_type", sorted(known_families()))
def test_family_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    verdicts = examine(model_type, tmp_path)
    wrong = [verdict for verdict in verdicts if verdict.outcome == "wrong"]
    assert not wrong
    # What every family must do; what it may refuse is on the page.
    for verdict in verdicts:
        if verdict.operation in ("identity", "drop", "reorder", "repeat", "copy", "group", "save", "cache"):
            assert verdict.outcome == "right", verdict
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for row in (*page_rows(model_type, verdicts), *page_refusals(model_type, verdicts)):
        assert row in page, "docs/families.md is not up to date"


def test_page_lists_nothing_else() -> None:
    rows = [
        line.split("|")[1].strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    assert set(rows) - {"type"} == set(known_families())
