"""Grow a model in depth by stacking copies of its layers, for training to go on from.

    whole       0-5 g times              0 .. 5 0! .. 5! ..           layer i of the result is layer i mod L
    in place    each layer g times       0 0! .. 1 1! .. 5 5!         layer i of the result is layer i div g
    a list      whatever it says         [0,1,0,2] -> 0 1 0! 2
    last k      the last k once more     0 .. 5 4! 5!
    middle k    a middle block of k      0 .. 3 2! 3! 4 5

A copy begins with the weights of its layer and shares none: at first the result computes what the same visits compute
with one set of weights, a loop, and not what the model computes. Once, the last 0 and the middle 0 are the identity.
Embedding, final norm and head stay. The paper of the first trains on with a fresh optimiser and a new warm-up, on data
that was not seen yet; stacking whole is the best of its ways, in place a worse one.

Cost: that of the layers which are visited once more.

Du et al., Stacking Your Transformers, arXiv:2405.15319 (whole, in place, a list, and when to grow); Gong et al.,
Efficient Training of BERT by Progressively Stacking, ICML 2019 (whole, twice); Yang et al., Progressively Stacking 2.0,
arXiv:2011.13635 (last); Saunshi et al., On the Inductive Bias of Stacking Towards Improving Reasoning, arXiv:2409.19044
(middle, of blocks). Of two middle blocks the earlier one is taken, which is a choice made here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from deepen.errors import UsageError, nearest
from deepen.program import transforms
from deepen.registry import method
from deepen.surgery.copies import blocks_of, fresh, measured, plain_visits, start_of
from deepen.surgery.place import joined, require_layers, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

Order = Literal["whole", "interleaved"]
ORDERS = ("whole", "interleaved")


@method(
    "g-stack",
    family="surgery",
    source="arXiv:2405.15319",
    title="Stacking Your Transformers: A Closer Look at Model Growth for Efficient LLM Pre-Training",
    mechanism="the whole program several times over, each time after the first through copies",
    cost="that of the program, times the factor",
)
def g_stack(
    ck: Checkpoint, factor: int, *, order: Order = "whole", measure: bool = False, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Visits everything `factor` times, each time after the first through copies.

        grown, report = deepen.g_stack(ck, 4)                     # 6 layers become 24

    Args:
        ck: what to change.
        factor: how often; 1 is the identity.
        order: `whole`, the program over and over, or `interleaved`, each of its elements over and over in place.
        measure: compare the outputs with those of the same visits without copies.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a factor below 1, or an unknown order.
        ProgramError: the program has copies with labels, or becomes too long.
        FamilyError: the family cannot have the copies.
        DataError: outputs that are not finite, when measured.
    """
    found, key = tower_key(ck, tower)
    if order not in ORDERS:
        raise UsageError(f"stack: no order {order!r}{nearest(order, ORDERS)}; expected one of {', '.join(ORDERS)}")
    if factor < 1:
        raise UsageError(f"stack: a program is stacked once or more, got {factor}")
    if factor == 1:
        return ck, report(ck, ck, found.name, "g-stack", "once: nothing changed", **measured(ck, ck, measure))
    grow = transforms.stack if order == "whole" else transforms.interleave
    program, note = grow(ck.program, factor, ck.depth[found.name], key)
    made = ck.apply(program)
    return made, report(ck, made, found.name, "g-stack", note, **measured(made, start_of(made, tower), measure))


@method(
    "stack-list",
    family="surgery",
    source="arXiv:2405.15319",
    title="Stacking Your Transformers: A Closer Look at Model Growth for Efficient LLM Pre-Training",
    mechanism="an explicit list of source layers; each occurrence after the first is a copy",
    cost="that of the layers listed",
)
def stack_list(
    ck: Checkpoint, layers: Sequence[int], *, measure: bool = False, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Visits stored layers in the order of a list, through copies where a layer comes again.

        grown, report = deepen.stack_list(ck, [0, 1, 2, 3, 2, 3, 4, 5])

    Args:
        ck: what to change; its program is replaced.
        layers: stored layers, one for each layer of the result.
        measure: compare the outputs with those of the same visits without copies.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: an empty list.
        ProgramError: a layer that does not exist.
        FamilyError: the family cannot have these layers in this order.
        DataError: outputs that are not finite, when measured.
    """
    found, _ = tower_key(ck, tower)
    if not layers:
        raise UsageError("stack_list: expected the source of each layer of the result, got an empty list")
    require_layers(ck, found, layers)
    made = joined(ck, tower, (), fresh(layers), ())
    note = f"{len(layers)} layers made of {len(set(layers))}"
    return made, report(ck, made, found.name, "stack-list", note, **measured(made, start_of(made, tower), measure))


@method(
    "stack-last",
    family="surgery",
    source="arXiv:2011.13635",
    title="Progressively Stacking 2.0: A Multi-stage Layerwise Training Method for BERT Training Speedup",
    mechanism="the last layers once more, through copies at the end",
    cost="that of the last layers",
)
def stack_last(ck: Checkpoint, count: int, *, measure: bool = False, tower: str = "") -> tuple[Checkpoint, Report]:
    """Visits the last `count` layers of the program once more, through copies: a step of gradual stacking.

    Args:
        ck: what to change.
        count: how many; 0 is the identity.
        measure: compare the outputs with those of the same visits without copies.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a negative count, or more than the program visits.
        ProgramError: the program is not a plain list of layers.
        FamilyError: the family cannot have the copies.
        DataError: outputs that are not finite, when measured.
    """
    refs = plain_visits(ck, tower, "stack_last")[1]
    if not 0 <= count <= len(refs):
        raise UsageError(f"stack_last: expected 0 to {len(refs)} layers, as many as the program visits, got {count}")
    return _again(ck, len(refs) - count, count, "stack-last", measure, tower)


@method(
    "stack-middle",
    family="surgery",
    source="arXiv:2409.19044",
    title="On the Inductive Bias of Stacking Towards Improving Reasoning",
    mechanism="a middle block once more, through copies right after it",
    cost="that of the block",
)
def stack_middle(
    ck: Checkpoint, size: int, *, blocks: bool = True, measure: bool = False, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Visits the middle `size` layers of the program once more, through copies right after them.

    Args:
        ck: what to change.
        size: layers of the block; 0 is the identity.
        blocks: the program is cut into blocks of `size`, and the middle one is taken, the earlier of two; otherwise
            the `size` layers in the very middle, half a layer early where there is no middle.
        measure: compare the outputs with those of the same visits without copies.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a size that is negative or above the number of visits, or does not divide it where it must.
        ProgramError: the program is not a plain list of layers.
        FamilyError: the family cannot have the copies.
        DataError: outputs that are not finite, when measured.
    """
    refs = plain_visits(ck, tower, "stack_middle")[1]
    if not 0 <= size <= len(refs):
        raise UsageError(f"stack_middle: expected 0 to {len(refs)} layers, as many as the program visits, got {size}")
    if blocks and size and len(refs) % size:
        raise UsageError(
            f"stack_middle: {len(refs)} layers are no blocks of {size}; choose a divisor, or blocks=False for the "
            f"{size} layers in the middle"
        )
    start = size * ((len(blocks_of(refs, size)) - 1) // 2) if blocks and size else (len(refs) - size) // 2
    return _again(ck, start, size, "stack-middle", measure, tower)


def _again(ck: Checkpoint, start: int, count: int, name: str, measure: bool, tower: str) -> tuple[Checkpoint, Report]:
    """The visits from place `start` once more, through copies right after them."""
    found, _ = tower_key(ck, tower)
    before, refs, after = plain_visits(ck, tower, name)
    made = joined(ck, tower, before, fresh([*refs[: start + count], *refs[start:]]), after)
    names = ", ".join(str(ref.first) for ref in refs[start : start + count])
    note = f"visited layers {names} once more, through copies" if count else "nothing changed"
    return made, report(ck, made, found.name, name, note, **measured(made, start_of(made, tower), measure))


def growth_tokens(parameters: float, flops: float) -> float:
    """How many tokens to train the small model on before it is stacked to the size of the target, by a factor of 4.

        log10(d) = 0.88 log10(N) + 163.27 / log10(C) - 5.74

    Args:
        parameters: N, of the target, without embeddings.
        flops: C, that the target's training is to cost, 6 N times its tokens.

    Returns:
        d, in tokens.

    Raises:
        UsageError: a number that is not above 1.

    Example:
        >>> round(growth_tokens(7e9, 6 * 7e9 * 2e12) / 1e9, 2)
        11.11
    """
    for name, value in (("parameters", parameters), ("flops", flops)):
        if not 1 < value < math.inf:
            raise UsageError(f"growth_tokens: {name} is a number above 1, got {value}")
    return 10 ** (0.88 * math.log10(parameters) + 163.27 / math.log10(flops) - 5.74)
