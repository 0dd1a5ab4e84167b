"""Run neighbouring layers side by side: both read the same stream, and what they add is summed.

    8 9 10 11   ->   {8|9} {10|11}          x + (f8(x) - x) + (f9(x) - x)

          +--> 8 --+
    x ----+        +--> sum of the updates          the same weights and FLOPs, half the steps one after another
          +--> 9 --+

Exact where the second layer does not depend on what the first adds; an approximation elsewhere, best in the middle of
a model, where neighbours write small updates to a large stream.

Sun et al., Transformer Layers as Painters, arXiv:2407.09298.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepen.errors import FamilyError, UsageError
from deepen.program import transforms
from deepen.registry import method
from deepen.surgery.place import require_run, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@method(
    "parallel",
    family="surgery",
    source="arXiv:2407.09298",
    title="Transformer Layers as Painters",
    mechanism="runs of layers read one stream, and their updates are summed",
    cost="the same parameters and FLOPs; a shorter path",
)
def parallel(ck: Checkpoint, first: int, last: int, *, width: int = 2, tower: str = "") -> tuple[Checkpoint, Report]:
    """Sets the layers from `first` to `last`, both included, side by side in runs of `width`; a rest of one stays.

        wide, report = deepen.parallel(ck, 8, 19)

    Args:
        ck: what to change.
        first: the first layer of the stretch.
        last: the last layer of the stretch.
        width: layers side by side.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a width below 2, or fewer than two layers.
        ProgramError: the layers do not stand once each, in this order, outside of groups and loops.
        FamilyError: layers that normalise the stream itself, so that what they add is not their own.
    """
    found, key = tower_key(ck, tower)
    require_run(ck, found, first, last)
    if width < 2:
        raise UsageError(f"parallel: expected at least 2 layers side by side, got {width}")
    if found.parts.post_norm:
        raise FamilyError(
            f"parallel: a layer of {ck.family.model_type} changes the stream itself (a norm or a factor after each "
            "addition), so the updates of two layers cannot be summed"
        )
    program, note = transforms.parallel(ck.program, first, last, width, ck.depth[found.name], key)
    made = ck.apply(program)
    return made, report(ck, made, found.name, "parallel", note)
