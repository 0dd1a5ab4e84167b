r"""Make a recurrent model of a plain one: a prelude, a core that is looped, a coda; the layers between are dropped.

    prelude 4, core 8, coda 4 of 22 layers        0-21   ->   0-3 (10-17)*1..8 18-21          4-9 dropped

    x --> [ prelude ] --> [ core ] --> [ core ] --> ... --> [ coda ] --> head        n passages, chosen at run time

The core is what stands right before the coda. With one passage the model is the program without the dropped layers,
`0-3 10-21`, bit for bit; with more it has to be trained first, with a number of passages that is drawn anew each step
and whose mean rises (`deepen.train.curriculum`).

The paper's are the three parts, the choice of the layers, the drawing and its curriculum. It also feeds each passage
the concatenation of state and prelude through a matrix [d, 2d], starts from a random state, applies the final norm
after the core too, and lets gradients flow through the last 8 passages only; here the core goes on with its own output
and all passages carry gradient.

Cost: saves what the dropped layers cost; each further passage costs the FLOPs and cache of the core.

Retrofitted recurrence, arXiv:2511.07384.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepen.errors import UsageError
from deepen.program.format import format_node
from deepen.program.tree import Ref, Seq
from deepen.registry import method
from deepen.surgery.copies import plain_visits
from deepen.surgery.place import joined, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@method(
    "retrofit",
    family="surgery",
    source="arXiv:2511.07384",
    title="Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence",
    mechanism="prelude, core, coda: the core becomes a loop, what stands before it is dropped",
    cost="saves the dropped layers; each further passage costs the core",
)
def retrofit(
    ck: Checkpoint, *, prelude: int, core: int, coda: int, turns: int, least: int = 1, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Loops the `core` visits before the last `coda` ones, behind the first `prelude` ones; the others are dropped.

        looped, report = deepen.retrofit(ck, prelude=4, core=8, coda=4, turns=8)

    Args:
        ck: what to change.
        prelude: visits at the beginning that stay.
        core: visits that are looped.
        coda: visits at the end that stay.
        turns: passages of the core, at most, which is how many there are unless another count is set.
        least: passages at least, to be set at run time; equal to `turns` for a loop of one count.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: more visits than the program has, no core, or no passages.
        ProgramError: the program is not a plain list of layers.
        FamilyError: the family cannot do without a layer that is dropped.
    """
    found, _ = tower_key(ck, tower)
    before, refs, after = plain_visits(ck, tower, "retrofit")
    if prelude < 0 or coda < 0 or core < 1 or prelude + core + coda > len(refs):
        raise UsageError(
            f"retrofit: a prelude of {prelude}, a core of {core} and a coda of {coda} do not fit the {len(refs)} "
            "visits of the program; expected a core of at least 1, and no more in all than there are"
        )
    if not 1 <= least <= turns:
        raise UsageError(f"retrofit: expected least= from 1 to turns=, got {least} and {turns}")
    end = len(refs) - coda
    body = _text(refs[end - core : end])
    count = f"{turns}" if least == turns else f"{least}..{turns}"
    looped = body if turns == 1 else f"({body})*{count}"
    text = " ".join(filter(None, (_text(refs[:prelude]), looped, _text(refs[end:]))))
    made = joined(ck, tower, before, text, after)
    gone = end - core - prelude
    note = f"{prelude} visits, {core} visits {count} times, {coda} visits; dropped {gone} before the loop"
    return made, report(ck, made, found.name, "retrofit", note)


def _text(refs: list[Ref]) -> str:
    return format_node(Seq(tuple(refs))) if refs else ""
