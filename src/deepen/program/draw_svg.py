"""A plan as a self-contained SVG: time runs to the right, loops are arcs, branches are lanes, exits are flags.

Colours are chosen to be legible on light and on dark paper. Long runs of layers are drawn as one stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from deepen.program.attributes import show, show_attrs
from deepen.program.draw_text import leaf_labels, loop_label
from deepen.program.format import format_node
from deepen.program.plan import Plan
from deepen.program.tree import Group, Loop, Mark, Node, Ref, Scope, Seq, value_of

BOX, GAP, HALF = 44, 14, 18
ROW = 1040
MARGIN = 24
# runs of this length are drawn as one stack when the whole would be wider than a row
STACK = 5
LINE, WORD = "#7d8590", "#7d8590"
LAYER = ("#dbeafe", "#3b82f6", "#1e3a8a")
COPY = ("#fde68a", "#d97706", "#78350f")
LOOP, SCOPE, FLAG = "#8b5cf6", "#14b8a6", "#ef4444"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A drawing with an axis on which the stream flows: its extent and how to paint it at a place."""

    width: float
    above: float
    below: float
    paint: Callable[[float, float], list[str]]


def draw_svg(plan: Plan, title: str | None = None) -> str:
    """The drawing as the text of an SVG file."""
    artist = _Artist(plan)
    rows = artist.rows()
    head = MARGIN + (26 if title else 0)
    width = max(max(row.width for row in rows) + 2 * (MARGIN + GAP), 10 * len(title or "") + 2 * MARGIN)
    parts: list[str] = []
    if title:
        parts.append(_text(MARGIN, MARGIN + 8, title, WORD, 15, "start", "600"))
    y = float(head)
    for number, row in enumerate(rows):
        axis = y + row.above
        parts += _arrow(MARGIN - GAP, MARGIN + GAP - 4, axis)
        parts += row.paint(MARGIN + GAP, axis)
        parts += _arrow(MARGIN + GAP + row.width, MARGIN + 2 * GAP + row.width, axis)
        if number + 1 < len(rows):
            parts.append(_text(MARGIN + 2 * GAP + row.width + 6, axis + 4, "↵", WORD, 13, "start"))
        y = axis + row.below + 22
    height = y - 22 + MARGIN
    name = escape(title or plan.text or "program", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 16:.0f} {height:.0f}" '
        f'width="{width + 16:.0f}" height="{height:.0f}" role="img" aria-label="{name}" '
        f'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title or plan.text or 'program')}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


class _Artist:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.labels = leaf_labels(plan)
        self.copies = {visit.leaf for visit in plan.visits if visit.key.copy is not None}
        self.stacks = False
        self.stacks = self.node(plan.root).width > ROW

    def rows(self) -> list[_Piece]:
        """The pieces of the whole program, broken into rows."""
        rows: list[list[_Piece]] = [[]]
        for piece in self.pieces(_flat(self.plan.root)):
            if rows[-1] and sum(p.width + GAP for p in rows[-1]) + piece.width > ROW:
                rows.append([])
            rows[-1].append(piece)
        return [_chain(row) for row in rows]

    def node(self, node: Node) -> _Piece:
        match node:
            case Seq():
                return _chain(self.pieces(_flat(node)))
            case Ref():
                return self.box(node)
            case Mark():
                return _flag(node)
            case Group(branches=branches):
                comb = str(value_of(node.attrs, "comb") or "sum")
                return _lanes([self.node(branch) for branch in branches], comb)
            case Scope(body=body):
                return _frame(self.node(body), _words(show_attrs(node.attrs)))
            case Loop(body=body):
                return _arc(self.node(body), loop_label(node))

    def pieces(self, items: Sequence[Node]) -> list[_Piece]:
        pieces: list[_Piece] = []
        at = 0
        while at < len(items):
            run = self.run(items[at:]) if self.stacks else 1
            if run >= STACK:
                pieces.append(self.stack([item for item in items[at : at + run] if isinstance(item, Ref)]))
            else:
                pieces += [self.node(item) for item in items[at : at + run]]
            at += run
        return pieces

    def run(self, items: Sequence[Node]) -> int:
        """The length of the run of plain layers that rise or fall by one at the head of the items, at least 1."""
        step = 0
        for length, item in enumerate(items):
            if not isinstance(item, Ref) or not item.bare or item.leaf in self.copies:
                return max(length, 1)
            before = items[length - 1]
            if length and isinstance(before, Ref):
                move = item.first.value - before.first.value
                if abs(move) != 1 or step not in (0, move):
                    return length
                step = move
        return len(items)

    def stack(self, refs: Sequence[Ref]) -> _Piece:
        """A run of layers as one stack of sheets."""
        width, label = 100.0, f"{refs[0].first}-{refs[-1].first}"
        fill, edge, ink = LAYER

        def paint(x: float, y: float) -> list[str]:
            sheets = [_rect(x + shift, y - BOX / 2 - shift, width - 8, BOX, fill, edge) for shift in (8, 4, 0)]
            middle = x + (width - 8) / 2
            return [
                *sheets,
                _text(middle, y + 1, label, ink, 13, weight="600"),
                _text(middle, y + 15, f"{len(refs)} layers", ink, 10),
            ]

        return _Piece(width, BOX / 2 + 8, BOX / 2, paint)

    def box(self, ref: Ref) -> _Piece:
        label = self.labels.get(ref.leaf, str(ref.first))
        lines = [_short(label)]
        notes = [f"{attr.name}" if attr.value is True else f"{attr.name}={show(attr.value)}" for attr in ref.attrs]
        lines[0] += f".{ref.parts}" if ref.parts else ""
        note = " ".join(notes)
        width = max(BOX, 8.0 * len(lines[0]) + 14, 6.0 * len(note) + 10)
        fill, edge, ink = COPY if ref.leaf in self.copies else LAYER

        def paint(x: float, y: float) -> list[str]:
            if not ref.parts:
                drawn = [_rect(x, y - BOX / 2, width, BOX, fill, edge)]
                middle = y + 4.5
            else:
                # the half that is left out stays as an empty outline
                upper = ref.parts == "a"
                top = y - BOX / 2 if upper else y
                ghost = y if upper else y - BOX / 2
                drawn = [
                    _rect(x, ghost, width, BOX / 2, "none", LINE, dash="2 3"),
                    _rect(x, top, width, BOX / 2, fill, edge),
                ]
                middle = top + BOX / 4 + 4.5
            drawn.append(_text(x + width / 2, middle, lines[0], ink, 13, weight="600"))
            if note:
                drawn.append(_text(x + width / 2, y + BOX / 2 + 12, note, WORD, 10))
            return drawn

        return _Piece(width, BOX / 2, BOX / 2 + (14 if note else 0), paint)


def _flat(node: Node) -> list[Node]:
    """The items of a sequence, sequences inside it spliced."""
    if not isinstance(node, Seq):
        return [node]
    return [flat for item in node.items for flat in _flat(item)]


def _chain(pieces: Sequence[_Piece]) -> _Piece:
    """Pieces one after the other, joined by the stream."""
    if not pieces:
        return _Piece(BOX, 8, 8, lambda x, y: [_line(x, y, x + BOX, y)])
    width = sum(piece.width for piece in pieces) + GAP * (len(pieces) - 1)

    def paint(x: float, y: float) -> list[str]:
        drawn: list[str] = []
        for number, piece in enumerate(pieces):
            if number:
                drawn += _arrow(x, x + GAP, y)
                x += GAP
            drawn += piece.paint(x, y)
            x += piece.width
        return drawn

    return _Piece(width, max(p.above for p in pieces), max(p.below for p in pieces), paint)


def _lanes(lanes: Sequence[_Piece], comb: str) -> _Piece:
    """Branches as parallel lanes between a fork and a join."""
    lead, space = 22.0, 10.0
    inner = max(lane.width for lane in lanes)
    total = sum(lane.above + lane.below for lane in lanes) + space * (len(lanes) - 1)
    sign = {"sum": "+", "mean": "x̄"}.get(comb, comb)

    def paint(x: float, y: float) -> list[str]:
        start, stop = x + 2, x + lead * 2 + inner + 8
        drawn: list[str] = []
        top = y - total / 2
        for lane in lanes:
            axis = top + lane.above
            left = x + lead + (inner - lane.width) / 2
            drawn += [
                _curve(start, y, x + lead, axis),
                _line(x + lead, axis, left, axis),
                *lane.paint(left, axis),
                _line(left + lane.width, axis, x + lead + inner, axis),
                _curve(x + lead + inner, axis, stop, y),
            ]
            top += lane.above + lane.below + space
        drawn += [
            f'<circle cx="{start:.1f}" cy="{y:.1f}" r="3" fill="{LINE}"/>',
            f'<circle cx="{stop:.1f}" cy="{y:.1f}" r="9" fill="#f6f8fa" stroke="{LINE}" stroke-width="1.5"/>',
            _text(stop, y + 4, sign, "#24292f", 12, weight="600"),
        ]
        return drawn

    return _Piece(lead * 2 + inner + 17, total / 2, total / 2, paint)


def _frame(body: _Piece, label: str) -> _Piece:
    """A scope: a frame with its attributes above."""
    pad = 8.0
    width = max(body.width + 2 * pad, 6.2 * len(label) + 12)

    def paint(x: float, y: float) -> list[str]:
        top = y - body.above - pad
        left = x + (width - body.width) / 2
        return [
            _rect(x, top, width, body.above + body.below + 2 * pad, "none", SCOPE, dash="4 3", round=9),
            _text(x + width / 2, top - 5, label, SCOPE, 11),
            _line(x, y, left, y),
            *body.paint(left, y),
            _line(left + body.width, y, x + width, y),
        ]

    return _Piece(width, body.above + pad + 18, body.below + pad, paint)


def _arc(body: _Piece, label: str) -> _Piece:
    """A loop: an arc above the body, back from its end to its beginning."""
    pad, rise = 10.0, 20.0
    width = max(body.width + 2 * pad, 7.0 * len(label) + 24)

    def paint(x: float, y: float) -> list[str]:
        left, right = x + 4, x + width - 4
        inner = x + (width - body.width) / 2
        top = y - body.above - rise
        path = f"M {right:.1f} {y:.1f} V {top + 12:.1f} Q {right:.1f} {top:.1f} {right - 12:.1f} {top:.1f} "
        path += f"H {left + 12:.1f} Q {left:.1f} {top:.1f} {left:.1f} {top + 12:.1f} V {y - 6:.1f}"
        return [
            _line(x, y, inner, y),
            *body.paint(inner, y),
            _line(inner + body.width, y, x + width, y),
            f'<path d="{path}" fill="none" stroke="{LOOP}" stroke-width="2"/>',
            f'<path d="M {left - 4:.1f} {y - 7:.1f} h 8 l -4 6 z" fill="{LOOP}"/>',
            f'<circle cx="{right:.1f}" cy="{y:.1f}" r="2.5" fill="{LOOP}"/>',
            _text(x + width / 2, top - 5, label, LOOP, 12, weight="600"),
        ]

    return _Piece(width, body.above + rise + 18, body.below, paint)


def _flag(mark: Mark) -> _Piece:
    text = format_node(mark)
    width = 7.2 * len(text) + 20
    colour = FLAG if mark.exit else SCOPE

    def paint(x: float, y: float) -> list[str]:
        return [
            _line(x, y, x + width, y),
            f'<path d="M {x + 4:.1f} {y:.1f} V {y - 30:.1f}" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M {x + 4:.1f} {y - 30:.1f} h {width - 8:.1f} l -5 8 l 5 8 h {8 - width:.1f} z" '
            f'fill="{colour}" fill-opacity="0.16" stroke="{colour}"/>',
            _text(x + width / 2 - 2, y - 18, text, colour, 11),
        ]

    return _Piece(width, 32, 8, paint)


def _words(attrs: str) -> str:
    return attrs[1:-1].replace(",", " ")


def _short(label: str) -> str:
    return label if len(label) <= 24 else f"{label[:11]} … {label[-10:]}"


def _rect(
    x: float, y: float, width: float, height: float, fill: str, edge: str, dash: str = "", round: float = 6
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{round:g}" '
        f'fill="{fill}" stroke="{edge}" stroke-width="1.5"{dashes}/>'
    )


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "middle", weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _line(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M {x0:.1f} {y0:.1f} L {x1:.1f} {y1:.1f}" stroke="{LINE}" stroke-width="1.5"/>'


def _curve(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (x0 + x1) / 2
    path = f"M {x0:.1f} {y0:.1f} C {middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'


def _arrow(x0: float, x1: float, y: float) -> list[str]:
    head = f'<path d="M {x1:.1f} {y:.1f} l -5 -3.5 v 7 z" fill="{LINE}"/>'
    return [_line(x0, y, x1 - 3, y), head]
