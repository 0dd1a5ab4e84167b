"""`deepen families`: the model families that deepen knows, with their towers and parts."""

from __future__ import annotations

from typing import Any

from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import print_json, table


def families(*, common: Common = DEFAULT) -> None:
    """List the model families deepen knows: towers, where their depth stands in the config, parts of a layer.

    Unknown families are refused, never guessed.
    """
    # importing the second module fills the table of the first
    from deepen.checkpoint import families as _table  # noqa: F401
    from deepen.checkpoint.family import FAMILIES

    rows = [_row(name, tower) for name in sorted(FAMILIES) for tower in FAMILIES[name].towers]
    if common.json:
        print_json({"families": rows})
        return
    heading = ("family", "tower", "depth in the config", "cache", "parts")
    cells = [(r["family"], r["tower"], r["depth"], "yes" if r["caches"] else "no", r["parts"]) for r in rows]
    print(table([heading, *cells], left=5))
    print(f"\n{len(FAMILIES)} families")


def _row(name: str, tower: Any) -> dict[str, Any]:
    parts = tower.parts
    words = {
        "serial": "a f (serial)",
        "parallel": "a f (parallel)",
        "single": "a",
        "whole": f"not separable: {parts.reason}",
    }
    return {
        "family": name,
        "tower": tower.name,
        "depth": tower.depth,
        "caches": tower.caches,
        "kind": parts.kind,
        "parts": words[parts.kind],
        "post_norm": parts.post_norm,
    }
