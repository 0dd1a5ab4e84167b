"""The page is self-contained, escapes what it is given, and is written whole or not at all."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from deepen.errors import SaveError
from deepen.report.page import Commands, Drawing, Facts, Page, Section, Table, Text, render, write

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10"><rect width="5" height="5"/></svg>'
PAGE = Page(
    title="Depth & <more>",
    lead="one sentence",
    sections=[
        Section("First", [Text("a < b"), Facts([("layers", "30"), ("cache", "47 MB")])]),
        Section("Second", [Table(["", "program", "perplexity"], [["cut", "0-9", "12.5"]], "lower is better", (2,))]),
        Section(
            "Third", [Drawing("cut", "0-1 {2|3}", SVG, "Say <b>", " hi & bye", "2 layers"), Commands(["deepen show"])]
        ),
    ],
    foot="made here",
)


class Tags(HTMLParser):
    """Checks that tags close in order, and collects them."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def html() -> str:
    return render(PAGE)


def test_the_markup_is_well_formed(html: str) -> None:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []


def test_nothing_is_fetched_and_nothing_runs(html: str) -> None:
    tags = Tags()
    tags.feed(html)
    assert not [tag for tag, _ in tags.seen if tag in ("script", "link", "img", "iframe", "object")]
    assert not [attrs for _, attrs in tags.seen if {"src", "href"} & attrs.keys()]
    assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", html) == []


def test_text_is_escaped_and_drawings_are_not(html: str) -> None:
    assert "<title>Depth &amp; &lt;more&gt;</title>" in html
    assert "a &lt; b" in html
    assert '<span class="prompt">Say &lt;b&gt;</span> hi &amp; bye' in html
    assert SVG in html


def test_every_cell_knows_its_column(html: str) -> None:
    assert '<th scope="row">cut</th>' in html
    assert '<td data-name="program">0-9</td>' in html
    assert '<td data-name="perplexity" class="number">12.5</td>' in html


def test_there_are_rules_for_dark_narrow_and_paper(html: str) -> None:
    for rule in ("prefers-color-scheme: dark", "max-width: 640px", "@media print", "width=device-width"):
        assert rule in html


def test_a_page_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_text("old")
    write(PAGE, path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [each.name for each in tmp_path.iterdir()] == ["index.html"]


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_text("old")
    with pytest.raises(SaveError):
        write(PAGE, tmp_path / "missing" / "index.html")
    with pytest.raises(UndefinedError):
        write(Page("t", "l", [Section("s", [Text(None)]), None]), path)  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("svg", "least"), [('<svg viewBox="0 0 1 1" width="500" height="9">', 300), (SVG, 0)], ids=["sized", "unsized"]
)
def test_a_drawing_shrinks_only_so_far(svg: str, least: int) -> None:
    drawing = Drawing("cut", "0", svg)
    assert drawing.least == least
    assert f"--least: {least}px" in render(Page("t", "l", [Section("s", [drawing])]))
