"""The pages in docs/ that are generated are what the registered methods say of themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import deepen.sublayers.page
import deepen.wiring.page
from deepen.registry import methods
from deepen.wiring.base import FEATURES

ROOT = Path(__file__).parents[1]
PAGES = {"wiring": deepen.wiring.page, "ffn": deepen.sublayers.page}


@pytest.mark.parametrize("family", PAGES)
def test_the_page_is_current(family: str) -> None:
    made = PAGES[family]
    found = (ROOT / made.PAGE).read_text(encoding="utf-8")
    assert found == made.page(), f"run `python -m {made.__name__}`"


@pytest.mark.parametrize("family", PAGES)
def test_every_method_is_drawn_and_says_how_it_is_backed(family: str) -> None:
    text = PAGES[family].page()
    for each in methods(family):
        section = text.split(f"\n## {each.name}\n")[1].split("\n## ")[0]
        assert "```text\n" in section, each.name
        assert "──" in section, f"{each.name} has no drawing"
        assert re.search(r"^- [CKNR]: ", section, re.MULTILINE), each.name
        assert section.count("```") % 2 == 0
        assert f"{each.title}, {each.source}; file: `{each.file}`" in section


def test_the_table_of_wirings_has_a_row_for_each_and_a_reason_for_each_refusal() -> None:
    text = deepen.wiring.page.page()
    rows = {row[0]: row for row in (re.findall(r"\| ([^|]+?) (?=\|)", line) for line in text.splitlines()) if row}
    for each in methods("wiring"):
        row = rows[f"[{each.name}](#{each.name})"]
        kind: Any = each.implementation
        for feature, cell in zip(FEATURES, row[2:], strict=True):
            assert (cell == "-") == (feature in kind.refuses)
        for feature, reason in kind.refuses.items():
            assert f"- refuses `{feature}`: {reason}" in text
