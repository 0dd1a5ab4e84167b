r"""A wider model that computes the same: wider stream, more heads, wider feed-forwards.

    stream    d -> d'        every tensor that reads or writes it, norms and embeddings included
    heads     h -> h'        copied whole, keys and values with the queries of their group; the head size stays
    hidden    m -> m'        rows of gate, up, in are copied, columns of down, out are shared between the copies

A copied hidden value or head is read with weights that add up to 1: 1/n each in `fpi`, unequal in `lemon`, so that
copies learn apart. The stream cannot be copied so freely, since a norm sees all of it:

    fpi      x' = x_{j mod d}; readers divide by the number of copies n.   Exact where d' is a multiple of d.
    lemon    RMSNorm     x' = [x, 0]                         gain' = gain sqrt(d/d')           eps' = eps d/d'
             LayerNorm   x' = [x, .., x, mean x, ..]         gain' = gain sqrt(f d/d') or 0    eps' = eps f d/d'
             with f = d' // d copies and the mean in the d' - f d places left.   Exact for every d'.

A tied head reads what the embedding writes, so the last gain is divided by the copies instead. Where queries and keys
have norms of their own with the same eps (Qwen 3), their matrices are multiplied by sqrt(d/d') as eps is.

Cost: parameters and FLOPs of the wider model. The result is a plain checkpoint of the family. The depth half of LEMON,
a copy that adds nothing behind each layer, is a program: `0 0!zero 1 1!zero ..`.

Chen et al., bert2BERT, arXiv:2110.07143 (fpi); Wang et al., LEMON: Lossless Model Expansion, arXiv:2310.07999. Scaling
eps, the head and the norms of queries and keys are what makes it exact here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from deepen.checkpoint.computed import Computed, ComputedSource, refuse_foreign
from deepen.checkpoint.recipes import Copy, Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.errors import FamilyError, UsageError, nearest
from deepen.registry import method
from deepen.surgery.place import tower_key
from deepen.surgery.report import Report, logit_difference, report
from deepen.surgery.widen_axes import SHAPES, Shape, Spread, Widths, spreads

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower

How = Literal["lemon", "fpi"]
HOW = ("lemon", "fpi")


@method(
    "widen",
    family="surgery",
    source="arXiv:2310.07999",
    title="LEMON: Lossless Model Expansion",
    mechanism="wider stream, more heads, wider feed-forwards, with weights that keep the function",
    cost="parameters and FLOPs of the wider model",
)
def widen(
    ck: Checkpoint,
    *,
    width: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    how: How = "lemon",
    seed: int = 0,
    measure: bool = False,
) -> tuple[Checkpoint, Report]:
    """Grows the widths of a model and keeps its function.

        wide, report = deepen.widen(ck, width=864, hidden=2304)

    Args:
        ck: what to grow: a decoder of the Llama shape, or GPT-2.
        width: values of the stream; None keeps them.
        hidden: hidden values of the feed-forwards; None keeps them.
        heads: query heads, in whole groups; None keeps them, or lets them fill the width (GPT-2).
        how: `lemon`, or `fpi`, which is exact only where the width is a multiple of the old one.
        seed: of the unequal shares of `lemon`.
        measure: compare the outputs with those of the original.

    Raises:
        UsageError: a width that is smaller than it was or that the model cannot have, or an unknown way.
        FamilyError: another family, or tensors that no rule is known for.
        CheckpointError: tensors whose values are codes, or widths that the config class refuses together.
    """
    if how not in HOW:
        raise UsageError(f"widen: no way {how!r}{nearest(how, HOW)}; expected one of {', '.join(HOW)}")
    tower, _ = tower_key(ck, "")
    shape = _shape(ck, tower)
    old, new = _widths(ck, shape, width, hidden, heads)
    tied = bool(ck.skeleton.config.tie_word_embeddings)
    rules = [
        spreads(shape, old, new, how, tied=tied, depth=ck.depth[tower.name], seed=seed + layer)
        for layer in range(ck.depth[tower.name])
    ]
    recipes = _recipes(ck, tower, shape, rules, tied) if old != new else {}
    made = replace(ck, source=ComputedSource(ck.source, recipes), config=_config(ck, shape, old, new, how))
    exact = how == "lemon" or new.stream % old.stream == 0
    before, after = (sum(info.numel for info in each.source.infos.values()) for each in (ck, made))
    told = report(
        ck, made, tower.name, "widen",
        f"widened by {how}: stream {old.stream} to {new.stream}, feed-forward {old.hidden} to {new.hidden}, "
        f"{old.heads} to {new.heads} heads" + ("" if exact else "; the norms see other statistics: not the function"),
        folded=tuple(sorted(recipes)),
        same_as=str(ck.program) if exact else None,
        figures={"parameters": after / before},
    )  # fmt: skip
    return made, replace(told, max_logit_difference=logit_difference(made, ck)) if measure else told


def _shape(ck: Checkpoint, tower: Tower) -> Shape:
    """The rules of the family.

    Raises:
        FamilyError: there are none, or the checkpoint has layers of several widths.
    """
    shape = SHAPES.get(ck.family.model_type)
    if shape is None:
        raise FamilyError(
            f"widen: no exact rule is known for {ck.family.model_type}; known are {', '.join(sorted(SHAPES))}"
        )
    refuse_foreign(ck, tower)
    if any(own.get(tower.name) for own in (ck.widths, ck.factors, ck.experts)):
        raise FamilyError(f"{ck.where}: some layers have a width, factors or experts of their own; widen before that")
    return shape


def _widths(
    ck: Checkpoint, shape: Shape, width: int | None, hidden: int | None, heads: int | None
) -> tuple[Widths, Widths]:
    """The widths that are and that are asked for.

    Raises:
        UsageError: one is smaller than it was, or does not divide into heads and groups.
    """
    config = ck.skeleton.config
    stream, queries = config.hidden_size, config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or stream // queries
    inner = getattr(config, shape.hidden) or 4 * stream
    old = Widths(stream=stream, hidden=inner, heads=queries, groups=keys, size=size)
    new_stream = stream if width is None else width
    if shape.fills:
        if new_stream % size:
            raise UsageError(
                f"widen: heads of {size} values fill the stream of {ck.family.model_type}, so its width is a multiple "
                f"of {size}; got {new_stream}"
            )
        if heads not in (None, new_stream // size):
            raise UsageError(f"widen: a width of {new_stream} has {new_stream // size} heads of {size}, not {heads}")
        heads = new_stream // size
    new_heads = queries if heads is None else heads
    group = queries // keys
    if new_heads % group:
        raise UsageError(f"widen: {group} heads share their keys, so heads are a multiple of {group}; got {new_heads}")
    new = Widths(
        stream=new_stream,
        hidden=inner if hidden is None else hidden,
        heads=new_heads,
        groups=new_heads // group,
        size=size,
    )
    for name in ("stream", "hidden", "heads"):
        if getattr(new, name) < getattr(old, name):
            raise UsageError(
                f"widen: {name} would go from {getattr(old, name)} to {getattr(new, name)}; expected at least as much"
            )
    return old, new


def _config(ck: Checkpoint, shape: Shape, old: Widths, new: Widths, how: str) -> dict[str, object]:
    """The config of the wider model."""
    config = copy.deepcopy(dict(ck.config))
    if old == new:
        return config
    stated = {shape.stream: new.stream, shape.heads: new.heads, shape.hidden: new.hidden}
    if not shape.fills:
        stated |= {"num_key_value_heads": new.groups, "head_dim": new.size}
    if how == "lemon":
        stated[shape.eps] = getattr(ck.skeleton.config, shape.eps) * shape.live(old, new)
    return {**config, **stated}


def _recipes(
    ck: Checkpoint, tower: Tower, shape: Shape, rules: Sequence[Mapping[str, Spread]], tied: bool
) -> dict[str, Recipe]:
    """A recipe for every tensor that changes.

    Raises:
        FamilyError: a tensor that no rule is known for.
    """
    disk, infos = ck.disk[tower.name], ck.source.infos
    axes: dict[str, tuple[tuple[str | None, ...], Mapping[str, Spread]]] = {}
    for layer, names in enumerate(disk.layers):
        for name, full in names.items():
            axes[full] = (_axes(ck, shape.layer, name, full), rules[layer])
    for full in infos.keys() - axes.keys():
        inner = full.removeprefix(f"{ck.skeleton.model_class.base_model_prefix}.")
        found = _axes(ck, shape.ends, inner, full)
        if tied and inner == "lm_head.weight":
            found = (None, "write")
        axes[full] = (found, rules[0])
    recipes: dict[str, Recipe] = {}
    for full, (roles, rule) in axes.items():
        moves = [(axis, rule[role]) for axis, role in enumerate(roles) if role is not None]
        if all(spread.unchanged for _, spread in moves):
            continue
        size = list(infos[full].shape)
        for axis, spread in moves:
            size[axis] = len(spread.index)
        recipes[full] = Computed(
            TensorInfo(infos[full].dtype, tuple(size)), (Copy(full, infos[full]),), _spread(moves), f"widening {full}"
        )
    return recipes


def _axes(ck: Checkpoint, known: Mapping[str, tuple[str | None, ...]], name: str, full: str) -> tuple[str | None, ...]:
    if name not in known:
        raise FamilyError(f"{ck.where}: widen knows no rule for the tensor {full} of {ck.family.model_type}")
    return known[name]


def _spread(moves: Sequence[tuple[int, Spread]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies and scales a tensor along its axes."""

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        for axis, rule in moves:
            tensor = rule.along(tensor, axis)
        return tensor

    return spread
