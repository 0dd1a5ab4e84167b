"""docs/ffn.md is what the registered feed-forwards say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

from deepen.registry import methods
from deepen.sublayers.page import PAGE, page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    found = (ROOT / PAGE).read_text(encoding="utf-8")
    assert found == page(), "run `python -m deepen.sublayers.page`"


def test_every_feed_forward_is_drawn_and_says_how_it_is_backed() -> None:
    text = page()
    for each in methods("ffn"):
        section = text.split(f"\n## {each.name}\n")[1].split("\n## ")[0]
        assert "```text\n" in section, each.name
        assert "──" in section, f"{each.name} has no drawing"
        assert re.search(r"^- [CKNR]: ", section, re.MULTILINE), each.name
        assert section.count("```") % 2 == 0
        assert f"{each.title}, {each.source}; file: `{each.file}`" in section
