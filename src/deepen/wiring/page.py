"""Writes docs/wirings.md from the registered wirings: `python -m deepen.wiring.page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepen.registry import Method, methods
from deepen.sublayers.page import markdown
from deepen.wiring.base import FEATURES

PAGE = Path("docs/wirings.md")
HEAD = """# Wirings

Made by `python -m deepen.wiring.page`; do not edit. A wiring says how a site (one part of one visit) reads from the
stream and writes back. Each is one file of `src/deepen/wiring/`, whose text stands below. In a configuration:

```yaml
layers: 8
program: 0-1 (2-5)*2 6-7
width: 256
heads: 4
wiring: {name: hyper-connections, streams: 4}
```

Every wiring runs under the laws of `tests/laws/test_wirings.py`: cached equals uncached, every parameter learns, saving
is exact, sequences of a batch are independent, no position sees a later one, compiled equals eager.

The letters say how far each piece is backed: **C** in a public source that was read, **K** general knowledge of the
method, **N** an identity that the tests check with numbers, **R** reconstructed or chosen here, not the paper's.

"""


def page() -> str:
    """The page as text."""
    found = list(methods("wiring"))
    parts = ["## What programs can ask of them", "", *_table(found), ""]
    for each in found:
        parts += [*_section(each), ""]
    return HEAD + "\n".join(parts)


def _table(found: list[Method]) -> Iterator[str]:
    """One row a wiring, one column a feature."""
    yield "`yes`: it runs under the laws; `-`: refused, with the reason below."
    yield ""
    yield f"| wiring | equals Pre-LN at first | {' | '.join(FEATURES)} |"
    yield f"|{'---|' * (len(FEATURES) + 2)}"
    for each in found:
        kind: Any = each.implementation
        cells = ["-" if feature in kind.refuses else "yes" for feature in FEATURES]
        yield f"| [{each.name}](#{each.name}) | {'yes' if kind.equals else '-'} | {' | '.join(cells)} |"
    yield ""
    for feature, words in FEATURES.items():
        yield f"- `{feature}`: {words}"


def _section(found: Method) -> Iterator[str]:
    """What one wiring is: its drawing and formulas from its file, then what it states of itself."""
    kind: Any = found.implementation
    yield f"## {found.name}"
    yield ""
    yield from markdown(sys.modules[kind.__module__].__doc__ or "")
    yield ""
    yield f"- source: {found.title}, {found.source}; file: `{found.file}`"
    yield f"- cost over Pre-LN: {found.cost}"
    yield f"- at first: {f'equals {kind.equals}' if kind.equals else 'not a Pre-LN model'}"
    for mark, what in kind.marks.items():
        yield f"- {mark}: {what}"
    for feature, reason in kind.refuses.items():
        yield f"- refuses `{feature}`: {reason}"
    for name, reason in kind.dead.items():
        yield f"- no gradient in `{name}`: {reason}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
