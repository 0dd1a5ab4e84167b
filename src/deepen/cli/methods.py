"""`deepen methods`: the published methods that deepen implements."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from deepen import registry
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import print_json, table


def methods(
    *,
    family: Annotated[str, Parameter(help="Only this family, such as wiring.")] = "",
    common: Common = DEFAULT,
) -> None:
    """List the published methods deepen implements: name, family, source, file, mechanism, cost."""
    found = list(registry.methods(family))
    if common.json:
        print_json({"methods": [entry.to_json() for entry in found]})
        return
    if not found:
        print("No method is registered in this version.")
        return
    heading = ("method", "family", "source", "mechanism", "cost", "file")
    rows = [(m.name, m.family, m.source, m.mechanism, m.cost, m.file) for m in found]
    print(table([heading, *rows], left=6))
