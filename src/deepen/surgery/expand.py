r"""Insert blocks that do nothing at first, and are trained while the rest stays as it is.

    0 1 2 3 | 4 5 6 7      ->      0-3 3!zero 4-7 7!zero

    x --> 3 --> x + Attn(x) W_o --> ... W_down --> x          a copy of layer 3 with W_o = 0, W_down = 0, biases 0

The layers are cut into groups of equal size, and each group gets copies of its last layer whose output matrices and
their biases are zero. What a part adds is then exactly zero, so the outputs are those of the model, bit for bit. At the
first step only the zero matrices get a gradient, which is enough for the others to get one at the second.

Where a layer changes the stream outside of its parts (a norm after the addition) no block can do nothing: refused.

Cost: that of the blocks; the paper goes from 32 layers to 40, and trains only the 8 new ones.

Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, arXiv:2401.02415.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deepen.errors import UsageError
from deepen.program.format import format_node
from deepen.program.tree import Copy, Ref, Seq
from deepen.registry import method
from deepen.surgery.copies import blocks_of, measured, plain_visits
from deepen.surgery.place import joined, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@method(
    "expand",
    family="surgery",
    source="arXiv:2401.02415",
    title="LLaMA Pro: Progressive LLaMA with Block Expansion",
    mechanism="after each group of layers copies of its last one that add nothing at first",
    cost="that of the new layers",
)
def expand(
    ck: Checkpoint, groups: int, *, copies: int = 1, measure: bool = False, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Inserts layers that add nothing at first after each of `groups` groups; the outputs stay the same.

        larger, report = deepen.expand(ck, 8)
        deepen.heal(larger, text, "out", mode="layers", layers=report.copied)       # trains the new layers only

    Args:
        ck: what to change.
        groups: how many groups the visits of the program are cut into; divides their number.
        copies: new layers after each group; 0 is the identity.
        measure: compare the outputs with those of the model.
        tower: the tower; the empty name means the default one.

    Returns:
        The checkpoint, and a report whose `copied` names the new layers.

    Raises:
        UsageError: groups that are not of one size, or a negative number of copies.
        ProgramError: the program is not a plain list of layers.
        FamilyError: a layer of the family changes the stream outside of its parts, or its outputs are not known.
        DataError: outputs that are not finite, when measured.
    """
    found, _ = tower_key(ck, tower)
    before, refs, after = plain_visits(ck, tower, "expand")
    if copies < 0:
        raise UsageError(f"expand: expected 0 or more new layers after each group, got {copies}")
    if groups < 1 or len(refs) % groups:
        fitting = ", ".join(str(each) for each in range(1, len(refs) + 1) if len(refs) % each == 0)
        raise UsageError(
            f"expand: {len(refs)} visits cannot be cut into {groups} groups of one size; choose one of {fitting}"
        )
    items: list[Ref] = []
    for group in blocks_of(refs, len(refs) // groups):
        zero = replace(group[-1], parts=None, copy=Copy(init="zero"))
        items += [*group, *[zero] * copies]
    made = joined(ck, tower, before, format_node(Seq(tuple(items))), after)
    new = [f"{at}" for at, key in enumerate(made.plan(found.name).keys) if key.copy is not None]
    note = f"inserted {len(new)} layers that add nothing at first" + (
        f"; a save makes them the layers {', '.join(new)}" if new else ""
    )
    return made, report(ck, made, found.name, "expand", note, **measured(made, ck, measure))
