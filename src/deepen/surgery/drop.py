"""Drop layers, one by one or as a block: the program skips them, the bank keeps them.

    0-29   drop(3, 7)          ->   0-2 4-6 8-29
    0-29   drop_block(20, 8)   ->   0-19 28-29

Costs nothing and saves the parameters, FLOPs and cache of the layers dropped. Which layers to drop is what the scores
say; n = 0 is the identity.

Men et al., ShortGPT, arXiv:2403.03853 (single layers); Gromov et al., The Unreasonable Ineffectiveness of the Deeper
Layers, arXiv:2403.17887 (a block).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepen.errors import UsageError
from deepen.program import transforms
from deepen.registry import method
from deepen.surgery.place import require_layers, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@method(
    "drop",
    family="surgery",
    source="arXiv:2403.03853",
    title="ShortGPT",
    mechanism="leave layers out of the program wherever they are visited",
    cost="saves all that the layers cost",
)
def drop(ck: Checkpoint, layers: Iterable[int], *, tower: str = "") -> tuple[Checkpoint, Report]:
    """Leaves out every visit of these layers.

        small, report = deepen.drop(ck, [3, 7])

    Args:
        ck: what to change.
        layers: stored layers, in any order; none leaves the program as it is.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: a layer that does not exist or is not visited, or nothing is left.
        FamilyError: the family cannot do without a layer (others reuse its keys, an image is read after it).
    """
    return _dropped(ck, layers, tower, "drop")


@method(
    "drop-block",
    family="surgery",
    source="arXiv:2403.17887",
    title="The Unreasonable Ineffectiveness of the Deeper Layers",
    mechanism="leave a block of consecutive layers out of the program",
    cost="saves all that the layers cost",
)
def drop_block(ck: Checkpoint, start: int, count: int, *, tower: str = "") -> tuple[Checkpoint, Report]:
    """Leaves out the layers from `start` to `start + count - 1`.

    Args:
        ck: what to change.
        start: the first stored layer to drop.
        count: how many to drop; 0 leaves the program as it is.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a negative count.
        ProgramError: a layer that does not exist or is not visited, or nothing is left.
        FamilyError: the family cannot do without a layer.
    """
    if count < 0:
        raise UsageError(f"drop_block: a block has 0 layers or more, got {count}")
    return _dropped(ck, range(start, start + count), tower, "drop-block")


def _dropped(ck: Checkpoint, layers: Iterable[int], tower: str, name: str) -> tuple[Checkpoint, Report]:
    found, key = tower_key(ck, tower)
    gone = sorted(set(layers))
    require_layers(ck, found, gone)
    if not gone:
        return ck, report(ck, ck, found.name, name, "dropped nothing")
    program, note = transforms.prune(ck.program, gone, ck.depth[found.name], key)
    made = ck.apply(program)
    return made, report(ck, made, found.name, name, note)
