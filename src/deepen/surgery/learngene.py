"""Make a model of any depth from a few learned layers: along a line through two, or stage by stage.

    line       W_l = B + ((l + offset) / L) A,  l = 1 .. L         every tensor of the layer, norms and biases too
    stages     0 1 2   of a model that loops each of them   ->   0 0! 0! 1 1! 2 2!

Line: two stored layers, base B and slope A, give all L layers. A = 0 gives L equal layers, the loop `B*L` with weights
of its own for each turn; the middle one of three is the mean of the other two. The paper trains A and B through this
sum by distillation, which is no part of this file. Whether it counts l from 1 or from 0 is not certain: offset 0 or -1.

Stages: a model trained with one layer for each stage, such as `0*3 1*3 2*4 3*3 4*3`, gives one of another depth whose
layers begin as copies of their stage's. The list of the paper for 12 of 5 stages is 0 0 0 1 1 1 2 2 3 3 4 4; the rule
for other depths, counts as even as possible with what is over to the earliest stages, is a reconstruction that gives
this list.

Computed wide and rounded once. Cost: that of the layers made.

Xia et al., Transformer as Linear Expansion of Learngene, arXiv:2312.05614 (line); Xia et al., Exploring Learngene via
Stage-wise Weight Sharing for Initializing Variable-sized Models, arXiv:2404.16897 (stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepen.checkpoint.computed import Computed, layer_tensors, with_layers
from deepen.checkpoint.recipes import NUMBERS, Copy, Recipe
from deepen.errors import FamilyError, UsageError
from deepen.registry import method
from deepen.surgery.copies import fresh, measured, start_of
from deepen.surgery.place import joined, require_layers, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower


@method(
    "expand-linear",
    family="surgery",
    source="arXiv:2312.05614",
    title="Transformer as Linear Expansion of Learngene",
    mechanism="layer l of L is base + l/L slope, tensor by tensor, from two stored layers",
    cost="that of the layers made",
)
def expand_linear(
    ck: Checkpoint, depth: int, *, base: int, slope: int, offset: int = 0, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Puts `depth` layers on the line from `base` in the direction of `slope` in the place of the program.

        model, report = deepen.expand_linear(ck, 12, base=0, slope=1)

    Args:
        ck: what to change; its program is replaced.
        depth: layers of the result, at least 1.
        base: the stored layer that the line begins at.
        slope: the stored layer that is added by parts: l / depth of it to layer l.
        offset: added to l; 0 counts layers from 1, -1 from 0.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a depth below 1.
        ProgramError: a layer that does not exist.
        FamilyError: the two layers are of different kinds, or the checkpoint can have no computed layers.
        CheckpointError: tensors whose values are codes.
    """
    found, _ = tower_key(ck, tower)
    require_layers(ck, found, (base, slope))
    if depth < 1:
        raise UsageError(f"expand_linear: expected a depth of 1 or more, got {depth}")
    _require_alike(ck, found, base, slope)
    shares = [(layer + offset) / depth for layer in range(1, depth + 1)]
    wide = with_layers(ck, found, base, [_on_line(ck, found, base, slope, share) for share in shares])
    first = ck.depth[found.name]
    layers = range(first, first + depth)
    made = joined(wide, tower, (), fresh(layers), ())
    note = f"made layers {first} to {first + depth - 1} of layer {base} and shares of layer {slope}"
    merged = dict.fromkeys(layers, (base, slope))
    return made, report(ck, made, found.name, "expand-linear", note, merged=merged)


def _require_alike(ck: Checkpoint, tower: Tower, base: int, slope: int) -> None:
    """Refuses two layers whose tensors or settings differ.

    Raises:
        FamilyError: says in what.
    """
    from deepen.checkpoint.skeleton import settings
    from deepen.checkpoint.widths import bank_modules

    modules = bank_modules(ck, tower)
    shapes = [
        {name: ck.source.infos[full].shape for name, full in layer_tensors(ck, tower, layer).items()}
        for layer in (base, slope)
    ]
    kinds = [{**settings(modules[layer]), **own} for layer, own in zip((base, slope), shapes, strict=True)]
    differing = [name for name in kinds[0] | kinds[1] if kinds[0].get(name) != kinds[1].get(name)]
    if differing:
        name = min(differing)
        raise FamilyError(
            f"{ck.where}: layers {base} and {slope} are of different kinds: {name or 'its class'} is "
            f"{kinds[0].get(name)!r} in one and {kinds[1].get(name)!r} in the other; a line needs two of one kind"
        )


def _on_line(ck: Checkpoint, tower: Tower, base: int, slope: int, share: float) -> dict[str, Recipe]:
    """The tensors of the layer `base` + `share` x `slope`."""

    def step(start: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        return start + share * direction

    infos, tensors = ck.source.infos, dict[str, Recipe]()
    directions = layer_tensors(ck, tower, slope)
    for name, full in layer_tensors(ck, tower, base).items():
        start, direction = Copy(full, infos[full]), Copy(directions[name], infos[directions[name]])
        # a mask of bits or a counter is the same in every layer
        whole = start.dtype not in NUMBERS and not ck.config.get("quantization_config")
        what = f"adding {share:g} of {directions[name]} to {full}"
        tensors[name] = start if whole else Computed(start.info, (start, direction), step, what)
    return tensors


@method(
    "expand-stages",
    family="surgery",
    source="arXiv:2404.16897",
    title="Exploring Learngene via Stage-wise Weight Sharing for Initializing Variable-sized Models",
    mechanism="each layer begins as a copy of the one layer of its stage",
    cost="that of the layers made",
)
def expand_stages(
    ck: Checkpoint,
    depth: int | None = None,
    *,
    stages: Sequence[int] | None = None,
    measure: bool = False,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Gives each stage of the program, a layer that it visits, as many layers of its own as a depth or a list says.

        model, report = deepen.expand_stages(ck, 12)                                # ck runs 0*3 1*3 2*4 3*3 4*3

    Args:
        ck: what to change; the layers that its program visits are the stages, in this order.
        depth: layers of the result, in counts as even as possible, the larger ones first.
        stages: in place of a depth: the stage of each layer, from 0, in order.
        measure: compare the outputs with those of the same visits without copies.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: neither or both of depth and stages, fewer layers than stages, a list that goes back, or a program
            with copies.
        FamilyError: the family cannot have the copies.
        DataError: outputs that are not finite, when measured.
    """
    found, _ = tower_key(ck, tower)
    keys = ck.plan(found.name).keys
    if copied := next((key for key in keys if key.copy is not None), None):
        raise UsageError(f"expand_stages: `{ck.program}` has the copy {copied}; save the checkpoint first")
    if (depth is None) == (stages is None):
        raise UsageError("expand_stages: give either a depth or stages=")
    chosen = stage_list(len(keys), depth) if depth is not None else list(stages or ())
    if not chosen or sorted(chosen) != chosen or not 0 <= chosen[0] <= chosen[-1] < len(keys):
        raise UsageError(
            f"expand_stages: expected stages from 0 to {len(keys) - 1} that do not go back, got {chosen or 'none'}"
        )
    made = joined(ck, tower, (), fresh(keys[stage].layer for stage in chosen), ())
    counts = ", ".join(f"{chosen.count(stage)} of layer {key.layer}" for stage, key in enumerate(keys))
    note = f"{len(chosen)} layers of {len(keys)} stages: {counts}"
    return made, report(ck, made, found.name, "expand-stages", note, **measured(made, start_of(made, tower), measure))


def stage_list(stages: int, depth: int) -> list[int]:
    """The stage of each of `depth` layers: as even as possible, what is over to the earliest; a reconstruction.

    Raises:
        UsageError: fewer layers than stages.
    """
    if depth < stages:
        raise UsageError(f"expand_stages: {stages} stages need {stages} layers or more, got {depth}")
    each, over = divmod(depth, stages)
    return [stage for stage in range(stages) for _ in range(each + (stage < over))]
