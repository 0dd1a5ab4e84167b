"""Writes docs/ffn.md from the registered feed-forwards: `python -m deepen.sublayers.page`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepen.registry import Method, methods

PAGE = Path("docs/ffn.md")
HEAD = """# Feed-forwards

Made by `python -m deepen.sublayers.page`; do not edit. A feed-forward is what a layer computes of each token by itself.
Each is one file of `src/deepen/sublayers/ffn/`, whose text stands below. In a configuration:

```yaml
layers: 8
width: 256
heads: 4
feed_forward: {name: moe, experts: 8, top: 2}
hidden: 512 # of each expert
```

Every feed-forward runs under the laws of `tests/laws/test_ffn.py`, under three wirings and in a loop: cached equals
uncached, every parameter learns and changes the output, sequences of a batch are independent, no position sees a later
one, saving is exact, counted FLOPs are measured ones, compiled equals eager.

The letters say how far each piece is backed: **C** in a public source that was read, **K** general knowledge of the
method, **N** an identity that the tests check with numbers, **R** reconstructed or chosen here, not the paper's.

"""


def page() -> str:
    """The page as text."""
    found = list(methods("ffn"))
    parts = ["| feed-forward | computes |", "|---|---|"]
    parts += [f"| [{each.name}](#{each.name}) | {each.mechanism.replace('|', '&#124;')} |" for each in found]
    parts.append("")
    for each in found:
        parts += [*_section(each), ""]
    return HEAD + "\n".join(parts)


def _section(found: Method) -> Iterator[str]:
    """What one feed-forward is: its drawing and formulas from its file, then what it states of itself."""
    kind: Any = found.implementation
    yield f"## {found.name}"
    yield ""
    yield from markdown(sys.modules[kind.__module__].__doc__ or "")
    yield ""
    yield f"- source: {found.title}, {found.source}; file: `{found.file}`"
    yield f"- cost: {found.cost}"
    if options := list(inspect.signature(kind).parameters.values())[1:]:
        yield f"- options: {', '.join(f'`{each.name}` ({each.default})' for each in options)}"
    if kind.equals:
        yield f"- equals {kind.equals}"
    if not kind.pointwise:
        yield "- a token depends on others too"
    for mark, what in kind.marks.items():
        yield f"- {mark}: {what}"
    for name, reason in kind.dead.items():
        yield f"- no gradient in `{name}`: {reason}"


def markdown(text: str) -> Iterator[str]:
    """A docstring with its indented blocks fenced; the line of the source is stated below it."""
    fenced = False
    lines = [line for line in text.strip().splitlines() if not line.startswith("Source: ")]
    while lines and not lines[-1].strip():
        lines.pop()
    for place, line in enumerate(lines):
        drawn = line.startswith("    ") or (fenced and not line.strip() and _indented_next(lines, place))
        if drawn != fenced:
            yield "```text" if drawn else "```"
            fenced = drawn
        yield line
    if fenced:
        yield "```"


def _indented_next(lines: list[str], place: int) -> bool:
    after = next((line for line in lines[place + 1 :] if line.strip()), "")
    return after.startswith("    ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
