"""`deepen families`: the model families that deepen knows, with their towers and parts."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import print_json, table


def families(
    *,
    check: Annotated[str, Parameter(help="A model type to build at a tiny size and examine.")] = "",
    common: Common = DEFAULT,
) -> None:
    """List the model families deepen knows: towers, where their depth stands in the config, parts of a layer.

    Unknown families are refused, never guessed. --check builds a tiny random model of any type that the installed
    transformers has, compares every operation with models made by hand, and says what was right, refused or wrong.
    """
    if check:
        _check(check, common)
        return
    from deepen.checkpoint.family import known_families

    known = known_families()
    rows = [_row(name, tower) for name in sorted(known) for tower in known[name].towers]
    if common.json:
        print_json({"families": rows})
        return
    heading = ("family", "tower", "depth in the config", "cache", "parts")
    cells = [(r["family"], r["tower"], r["depth"], "yes" if r["caches"] else "no", r["parts"]) for r in rows]
    print(table([heading, *cells], left=5))
    print(f"\n{len(known)} families")


def _check(model_type: str, common: Common) -> None:
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from deepen.checkpoint.discover import check

    with tempfile.TemporaryDirectory() as folder:
        report = check(model_type, Path(folder))
    if common.json:
        print_json(asdict(report))
        return
    if report.verdicts:
        cells = [(verdict.tower, verdict.operation, verdict.outcome, verdict.detail) for verdict in report.verdicts]
        print(table([("tower", "operation", "outcome", ""), *cells], left=4))
        print()
    print(f"{model_type}: {report.outcome}{f', {report.reason}' if report.reason else ''}")
    if report.outcome == "right" and not report.table:
        print("it is not in the table yet, so deepen refuses to open it; CONTRIBUTING.md shows how to add it")


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
