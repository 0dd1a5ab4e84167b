"""`deepen report`: one self-contained page of the results that commands kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import print_json


def report(
    folder: str,
    /,
    *,
    out: Annotated[str, Parameter(name=["--out", "-o"], help="The page; index.html in the folder by default.")] = "",
    common: Common = DEFAULT,
) -> None:
    """One self-contained HTML page of the results in a folder.

    show, score, search, eval and run keep their results in a folder with --keep DIR. The page shows the model, its
    scores by depth, what searches found, evaluations, samples, drawings and the commands; it needs no network.

    Parameters
    ----------
    folder
        Where results were kept.
    """
    from deepen.report.kept import read_kept
    from deepen.report.page import write
    from deepen.report.study import study_page

    place = Path(folder)
    kept = read_kept(place)
    page = Path(out) if out else place / "index.html"
    write(study_page(place, kept), page)
    if common.json:
        print_json({"page": str(page), "results": [{"kind": each.kind, "file": str(each.path)} for each in kept]})
    else:
        print(f"{page} written: {len(kept)} results")
