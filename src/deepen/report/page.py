"""One self-contained HTML page: text, facts, tables, drawings, samples and commands; no script and no network.

A page is a list of sections, a section a list of blocks. The template knows the blocks by their `kind`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from deepen.checkpoint.atomic import atomic_file

# How far a drawing may shrink on a narrow screen.
SHRINK = 0.6


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    facts: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Table:
    """Rows under a heading; the first column names the row. On a narrow screen each row becomes a card.

    Attributes:
        heading: a word for each column.
        rows: cells as text.
        note: what the figures mean.
        numbers: columns aligned to the right, by position.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    numbers: Sequence[int] = ()
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Drawing:
    """A program: its name, text, drawing and what the model wrote with it.

    Attributes:
        name: what it is.
        program: its text.
        svg: the drawing, trusted markup.
        prompt: what the model was given.
        sample: what it wrote.
        figures: a few words beside the name.
    """

    name: str
    program: str
    svg: str
    prompt: str = ""
    sample: str = ""
    figures: str = ""
    kind: ClassVar[str] = "drawing"

    @property
    def least(self) -> int:
        """The narrowest width, in pixels, at which the drawing can still be read; beyond that it scrolls."""
        match = re.match(r'<svg[^>]* width="(\d+)', self.svg)
        return round(int(match[1]) * SHRINK) if match else 0


@dataclass(frozen=True)
class Chart:
    """A chart with a title and a sentence.

    Attributes:
        name: what it shows.
        svg: from `deepen.report.chart`, trusted markup.
        note: what the figures mean.
        legend: the names of its lines where it has several.
    """

    name: str
    svg: str
    note: str = ""
    legend: Sequence[str] = ()


@dataclass(frozen=True)
class Charts:
    """Charts side by side, as many as the page is wide."""

    charts: Sequence[Chart]
    kind: ClassVar[str] = "charts"


@dataclass(frozen=True)
class Commands:
    """Lines for a shell or an interpreter, each ready to be copied."""

    lines: Sequence[str]
    kind: ClassVar[str] = "commands"


Block = Text | Facts | Table | Drawing | Charts | Commands


@dataclass(frozen=True)
class Section:
    """A title and its blocks."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A page: title, one leading sentence, sections, and a line at the foot."""

    title: str
    lead: str
    sections: Sequence[Section]
    foot: str = ""


def render(page: Page) -> str:
    """The page as HTML; everything but drawings is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deepen.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(page=page)


def write(page: Page, path: Path) -> None:
    """Writes the page to a file, whole or not at all.

    Raises:
        SaveError: the file cannot be written.
    """
    text = render(page)
    with atomic_file(path) as file:
        file.write(text)
