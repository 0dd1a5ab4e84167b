"""Writes docs/families.md from the verdicts on every family: `python -m deepen.checkpoint.families_page [FILE]`."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers

from deepen.checkpoint.atomic import atomic_file
from deepen.checkpoint.examine import CHECKS, Verdict, examine, page_refusals, page_rows
from deepen.checkpoint.family import known_families
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
Tested range of transformers: {low} to below {high}. A type that is not here is refused.

"""


def page() -> str:
    """The page as text; families are examined in as many processes as there are processors."""
    low, high = (".".join(map(str, bound)) for bound in TESTED)
    rows, refusals = [], []
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, verdicts in zip(sorted(known_families()), pool.map(_examined, sorted(known_families())), strict=True):
            rows += page_rows(name, verdicts)
            refusals += page_refusals(name, verdicts)
            print(f"{name}: {len(verdicts)} verdicts", file=sys.stderr, flush=True)
    head = HEAD.format(version=transformers.__version__, low=low, high=high)
    columns = ["type", "tower", *CHECKS]
    table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *rows]
    return head + "\n".join([*table, "", "## Refusals", "", *refusals]) + "\n"


def _examined(model_type: str) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        return examine(model_type, Path(folder))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/families.md")
    with atomic_file(target) as file:
        file.write(page())
