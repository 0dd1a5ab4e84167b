r"""Make a model deeper by visiting a stretch of it twice, the second time through copies.

    two overlapping passes, m dropped at the seam      0 .. L-m-1 | m .. L-1
    L = 32, m = 8        0-31   ->   0-23 8-31           48 layers, the seam between 23 and 8
    first = 12, last = 27       ->   0-27 12-31          the same, said by what is visited twice

    0 --- 7 [ 8 --- 23 ] [ 8! --- 23! ] 24 --- 31        the layers m to L-m-1 stand twice

Both forms say which stretch is visited twice. m = L/2 leaves none, which is the model itself. At first the result
computes what the program computes that visits the stretch twice with one set of weights; it is a start for training,
not the function of the model.

Cost: the visits, parameters and cache of the stretch once more.

Kim et al., SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling, arXiv:2312.15166 (m);
01.AI, Yi: Open Foundation Models by 01.AI, arXiv:2403.04652 (the range).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepen.errors import UsageError
from deepen.registry import method
from deepen.surgery.copies import fresh, measured, plain_visits, start_of
from deepen.surgery.place import joined, stretch, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@method(
    "upscale",
    family="surgery",
    source="arXiv:2312.15166",
    title="SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
    mechanism="two passes that overlap, or a stretch twice in a row; the second visit of a layer is a copy",
    cost="the stretch once more in parameters, FLOPs and cache",
)
def upscale(
    ck: Checkpoint,
    *,
    drop: int | None = None,
    first: int | None = None,
    last: int | None = None,
    measure: bool = False,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Visits a stretch of the program twice, given by what two passes drop at their seam or by its ends.

        deep, report = deepen.upscale(ck, drop=8)                   # 32 layers: 0-23, then 8-31
        deep, report = deepen.upscale(ck, first=12, last=27)        # the same

    Args:
        ck: what to change.
        drop: visits that the first pass leaves out at its end and the second at its beginning, at most half of all.
        first: the first layer of the stretch.
        last: the last layer of the stretch.
        measure: compare the outputs with those of the same visits without copies.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: neither or both forms, or more than half is dropped.
        ProgramError: the stretch is not a plain list of layers that are visited once, or a layer does not exist.
        FamilyError: the family cannot have the copies.
        DataError: outputs that are not finite, when measured.
    """
    found, _ = tower_key(ck, tower)
    if drop is not None and first is None and last is None:
        before, refs, after = plain_visits(ck, tower, "upscale")
        if not 0 <= 2 * drop <= len(refs):
            raise UsageError(
                f"upscale: the two passes of {len(refs)} visits drop 0 to {len(refs) // 2} at their seam, got {drop}; "
                "`deepen.drop` makes a model shallower"
            )
        passes = refs[: len(refs) - drop], refs[drop:]
    elif drop is None and first is not None and last is not None:
        before, refs, after = stretch(ck, tower, first, last, "upscale")
        passes = refs, refs
    else:
        raise UsageError("upscale: give either drop=, or first= and last=")
    made = joined(ck, tower, before, fresh([*passes[0], *passes[1]]), after)
    few, many = len(ck.plan(found.name).visits), len(made.plan(found.name).visits)
    seam = f"; layer {passes[1][0].first} comes after layer {passes[0][-1].first}" if many > few else ""
    note = f"{few} visits became {many}, {many - few} of them copies{seam}"
    return made, report(ck, made, found.name, "upscale", note, **measured(made, start_of(made, tower), measure))
