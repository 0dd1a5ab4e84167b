"""Writes docs/families.md from verdicts: `python -m deepen.checkpoint.families_page [TYPE ...]`.

Without types every family is examined, which takes a processor about half an hour; with types only those, and the rows
of the others stay as they are.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers

from deepen.checkpoint.atomic import atomic_file
from deepen.checkpoint.examine import CHECKS, Verdict, examine, page_refusals, page_rows
from deepen.checkpoint.family import REFUSED, known_families
from deepen.checkpoint.open import TESTED

HEAD = """# Families

Made by `python -m deepen.checkpoint.families_page`; do not edit. Each row is a tiny random model of transformers
{version} (6 layers, or 4 and 3 for two towers; weights of standard deviation 0.3; windows of 8 tokens on 14) and every
operation on it:

- **identity**: the program that visits each layer once is bit-equal to the original;
- **drop**, **reorder**, **repeat**, **copy**: equal to a model whose layers were copied out and renumbered by hand;
- **zero**: inserting `!zero` copies leaves the outputs unchanged;
- **parts**: `1.a 1.f` (serial) or `{{1.a|1.f}}` (parallel) is layer 1;
- **group**: `{{1|_}}` is 1, `{{1|2}}` is `{{2|1}}`, `scale=0` is a drop;
- **save**: a drop and a loop, saved, opened again and, in the plain form, loaded by transformers alone without a
  missing, unexpected or mismatched key;
- **bake**: the loop written out as plain layers, loaded by transformers alone;
- **cache**: step by step with the cache equals one uncached pass, reversed and looped;
- **kv=first**: later turns reuse the keys of the first; cached equals uncached.

`refused` says so with a reason, below the table; `-` does not apply. Nothing is wrong: the suite fails otherwise.
Tested range of transformers: {low} to below {high}. Types in the table that have no row here yet were examined when
they were added, and the suite tries a shard of the operations on each: {missing}. Any other type is refused.

"""
PAGE = Path("docs/families.md")


def page(examined: Mapping[str, Sequence[Verdict]], before: str = "") -> str:
    """The page as text: new verdicts, and the rows of other known types from the page as it was."""
    known = known_families()
    rows = {name: page_rows(name, verdicts) for name, verdicts in examined.items()}
    refusals = {name: page_refusals(name, verdicts) for name, verdicts in examined.items()}
    for line in before.splitlines():
        if (found := re.match(r"\| ([\w.-]+) \|", line)) and found[1] in known and found[1] not in examined:
            rows.setdefault(found[1], []).append(line)
        elif (found := re.match(r"- `([\w.-]+)` ", line)) and found[1] in known and found[1] not in examined:
            refusals.setdefault(found[1], []).append(line)
    low, high = (".".join(map(str, bound)) for bound in TESTED)
    missing = ", ".join(f"`{name}`" for name in sorted(known.keys() - rows.keys())) or "none"
    head = HEAD.format(version=transformers.__version__, low=low, high=high, missing=missing)
    columns = ["type", "tower", *CHECKS]
    table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    table += [row for name in sorted(rows) for row in rows[name]]
    reasons = [line for name in sorted(refusals) for line in refusals[name]]
    left_out = [f"- `{name}`: {reason}" for name, reason in sorted(REFUSED.items())]
    return head + "\n".join([*table, "", "## Refusals", "", *reasons, "", "## Left out", "", *left_out]) + "\n"


def examined(names: Sequence[str]) -> dict[str, Sequence[Verdict]]:
    """Verdicts on these families, in as many processes as there are processors."""
    found: dict[str, Sequence[Verdict]] = {}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, verdicts in zip(names, pool.map(_examined, names), strict=True):
            found[name] = verdicts
            print(f"{name}: {len(verdicts)} verdicts", file=sys.stderr, flush=True)
    return found


def _examined(model_type: str) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        return examine(model_type, Path(folder))


if __name__ == "__main__":
    chosen = sys.argv[1:] or sorted(known_families())
    text = page(examined(chosen), PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    with atomic_file(PAGE) as file:
        file.write(text)
