"""docs/wirings.md is what the registered wirings say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

from deepen.registry import methods
from deepen.wiring.base import FEATURES
from deepen.wiring.page import PAGE, page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    found = (ROOT / PAGE).read_text(encoding="utf-8")
    assert found == page(), "run `python -m deepen.wiring.page`"


def test_every_wiring_is_drawn_and_says_how_it_is_backed() -> None:
    text = page()
    for each in methods("wiring"):
        section = text.split(f"\n## {each.name}\n")[1].split("\n## ")[0]
        assert "```text\n" in section, each.name
        assert "──" in section, f"{each.name} has no drawing"
        assert re.search(r"^- [CKNR]: ", section, re.MULTILINE), each.name
        assert section.count("```") % 2 == 0
        assert f"{each.title}, {each.source}; file: `{each.file}`" in section


def test_the_table_has_a_row_for_each_wiring_and_a_reason_for_each_refusal() -> None:
    text = page()
    rows = {row[0]: row for row in (re.findall(r"\| ([^|]+?) (?=\|)", line) for line in text.splitlines()) if row}
    for each in methods("wiring"):
        row = rows[f"[{each.name}](#{each.name})"]
        kind = each.implementation
        for feature, cell in zip(FEATURES, row[2:], strict=True):
            assert (cell == "-") == (feature in kind.refuses)  # pyright: ignore
        for feature, reason in kind.refuses.items():  # pyright: ignore
            assert f"- refuses `{feature}`: {reason}" in text
