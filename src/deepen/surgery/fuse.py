r"""Fuse neighbouring feed-forwards into one wider one: they read one stream, and what they write is summed.

    i.a is kept or dropped, the other mixers are dropped

    x --> norm_i --> FFN_i --+                     x --> norm --> [ FFN_i | FFN_j | .. ] --> + x
    x --> norm_j --> FFN_j --+--> + x      =       one matrix product of the summed width

    gate, up, in    [W_i diag(g_i); W_j diag(g_j); ..]       rows one after another, [m_i + m_j, d]
    their biases    [b_i + W_i c_i; b_j + W_j c_j; ..]       g, c: gain and bias of each layer's own norm
    down, out       [V_i, V_j, ..]                           columns one after another, [d, m_i + m_j]
    its bias        a_i + a_j + ..
    norm            gain 1, bias 0

The result equals the program `{i.f|j.f|..}`, up to rounding: each layer's own gain is folded into its matrices, so that
one norm serves all. It is an approximation of `i j ..`, whose later feed-forwards read what the earlier ones wrote.

Cost: the same parameters and FLOPs as the group, in one large product instead of several small ones; the path is one
layer long. The plain format of a family has one width for all layers, so the result is saved in the native form.

Bercovich et al., FFN Fusion: Rethinking Sequential Computation in Large Language Models, arXiv:2503.18908 (which lets
the norm of the last layer serve all).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deepen.checkpoint.computed import Computed, layer_tensors, with_layer
from deepen.checkpoint.recipes import Copy, Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.errors import FamilyError, UsageError
from deepen.registry import method
from deepen.surgery.place import joined, require_run, stretch, tower_key
from deepen.surgery.report import Report, logit_difference, report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower
    from deepen.checkpoint.norms import Norm
    from deepen.checkpoint.widths import FeedForward


@method(
    "fuse",
    family="surgery",
    source="arXiv:2503.18908",
    title="FFN Fusion: Rethinking Sequential Computation in Large Language Models",
    mechanism="the feed-forwards of a run of layers become one wider one; gains are folded, mixers dropped",
    cost="the feed-forwards as before, in one product; a shorter path",
)
def fuse(
    ck: Checkpoint, first: int, last: int, *, mixer: bool = False, measure: bool = False, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Fuses the feed-forwards of the layers from `first` to `last`, both included, and drops their mixers.

        fused, report = deepen.fuse(ck, 8, 10)          # as `{8.f|9.f|10.f}`

    Args:
        ck: what to change.
        first: the first layer of the stretch.
        last: the last layer of the stretch.
        mixer: keep the mixer of the first layer, before the fused feed-forward: `8.a {8.f|9.f|10.f}`.
        measure: compare the outputs with those of the program that the result equals.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: the layers do not stand once each, in this order, outside of groups and loops.
        UsageError: a layer that is visited without its feed-forward, or a first one without the mixer to keep.
        FamilyError: feed-forwards that cannot be fused: experts, other shapes, a norm behind them, layers in parallel.
        CheckpointError: tensors whose values are codes.
        DataError: outputs that are not finite, when measured.
    """
    found, _ = tower_key(ck, tower)
    require_run(ck, found, first, last)
    before, refs, after = stretch(ck, tower, first, last, "fuse")
    layers = [ref.first.value for ref in refs]
    for at, ref in enumerate(refs):
        if ref.parts == "a" or (mixer and at == 0 and ref.parts == "f"):
            lacks = "feed-forward" if ref.parts == "a" else "mixer"
            raise UsageError(f"fuse: layer {ref.first} is visited without its {lacks}, in `{ck.program}`")
    shapes, norms = _shapes(ck, found, layers)
    tensors = _fused(ck, found, layers, shapes, norms)
    number = ck.depth[found.name]
    wide = with_layer(ck, found, layers[0], tensors, width=sum(shape.width for shape in shapes))
    made = joined(wide, tower, before, f"{number}" if mixer else f"{number}.f", after)
    group = (f"{first}.a " if mixer else "") + "{" + "|".join(f"{layer}.f" for layer in layers) + "}"
    same = joined(ck, tower, before, group, after)
    names = [f"{ck.disk[found.name].prefix}.{number}.{name}" for name in tensors if isinstance(tensors[name], Computed)]
    told = report(
        ck, made, found.name, "fuse",
        f"fused the feed-forwards of layers {', '.join(map(str, layers))} into layer {number}, "
        f"{sum(shape.width for shape in shapes)} wide; dropped {len(layers) - mixer} mixers",
        merged={number: tuple(layers)},
        folded=tuple(names),
        same_as=str(same.program),
    )  # fmt: skip
    return made, replace(told, max_logit_difference=logit_difference(made, same)) if measure else told


def _shapes(ck: Checkpoint, tower: Tower, layers: Sequence[int]) -> tuple[list[FeedForward], list[Norm]]:
    """The feed-forward of each layer and the norm before it.

    Raises:
        FamilyError: a layer whose feed-forward cannot be fused with those before it; named.
    """
    from deepen.checkpoint.norms import norms_before
    from deepen.checkpoint.skeleton import settings
    from deepen.checkpoint.widths import bank_modules, feed_forward

    if tower.parts.kind != "serial" or tower.parts.post_norm:
        reason = tower.parts.reason or (
            "its mixer and feed-forward share their input"
            if tower.parts.kind == "parallel"
            else "it has no feed-forward part of its own"
        )
        raise FamilyError(f"fuse: the feed-forwards of {ck.family.model_type} cannot be fused: {reason}")
    modules = bank_modules(ck, tower)
    shapes = [feed_forward(modules[layer], tower.parts, f"{ck.where}: layer {layer}") for layer in layers]
    norms = norms_before(ck, tower, list(layers), shapes[0].module)
    for layer, shape, norm in zip(layers, shapes, norms, strict=True):
        kind = [settings(modules[each].get_submodule(shapes[0].module)) for each in (layers[0], layer)]
        alike = kind[0] == kind[1] or shape.width != shapes[0].width
        if not alike or replace(shape, width=0) != replace(shapes[0], width=0) or norm.name != norms[0].name:
            raise FamilyError(
                f"{ck.where}: the feed-forwards of layers {layers[0]} and {layer} are of different shapes"
            )
        owned = layer_tensors(ck, tower, layer)
        if norm.bias and any(f"{name}.bias" not in owned for name in shape.inputs):
            raise FamilyError(
                f"{ck.where}: {norm.name} of layer {layer} has a bias and {shape.inputs[0]} has none to fold it into"
            )
        needed = [*shape.inputs, shape.output, *([norm.name] if norm.gain else [])]
        if missing := [name for name in needed if f"{name}.weight" not in owned]:
            raise FamilyError(f"{ck.where}: the files hold no {missing[0]}.weight of layer {layer} under that name")
    return shapes, norms


def _fused(
    ck: Checkpoint, tower: Tower, layers: Sequence[int], shapes: Sequence[FeedForward], norms: Sequence[Norm]
) -> dict[str, Recipe]:
    """The tensors of the fused layer; those of the mixer are the first layer's."""
    from deepen.checkpoint.widths import bank_modules, output_axis

    infos = ck.source.infos
    owned = [layer_tensors(ck, tower, layer) for layer in layers]
    module, shape, norm = bank_modules(ck, tower)[layers[0]], shapes[0], norms[0]

    def of(name: str) -> tuple[Copy, ...]:
        return tuple(Copy(names[name], infos[names[name]]) for names in owned)

    tensors: dict[str, Recipe] = {name: Copy(full, infos[full]) for name, full in owned[0].items()}
    total, dtype = sum(each.width for each in shapes), infos[owned[0][f"{shape.output}.weight"]].dtype
    gains = of(f"{norm.name}.weight") if norm.gain else ()
    biases = of(f"{norm.name}.bias") if norm.bias else ()
    what = f"fusing layers {', '.join(map(str, layers))}"
    for name in shape.inputs:
        axis = output_axis(module.get_submodule(name))
        size = (total, shape.stream) if axis == 0 else (shape.stream, total)
        weights = of(f"{name}.weight")
        tensors[f"{name}.weight"] = Computed(
            TensorInfo(dtype, size), (*weights, *gains), _stacked(len(layers), axis, norm.offset), what
        )
        if f"{name}.bias" in owned[0]:
            tensors[f"{name}.bias"] = Computed(
                TensorInfo(dtype, (total,)), (*of(f"{name}.bias"), *weights, *biases), _shifted(len(layers), axis), what
            )
    axis = 1 - output_axis(module.get_submodule(shape.output))
    size = (shape.stream, total) if axis == 1 else (total, shape.stream)
    outputs = of(f"{shape.output}.weight")
    tensors[f"{shape.output}.weight"] = Computed(TensorInfo(dtype, size), outputs, _stacked(len(layers), axis), what)
    if f"{shape.output}.bias" in owned[0]:
        ends = of(f"{shape.output}.bias")
        tensors[f"{shape.output}.bias"] = Computed(ends[0].info, ends, _summed, what)
    for inputs, value, leaf in ((gains, 1 - norm.offset, "weight"), (biases, 0.0, "bias")):
        if inputs:
            unit = lambda old, value=value: old.new_full(old.shape, value)  # noqa: E731
            tensors[f"{norm.name}.{leaf}"] = Computed(inputs[0].info, inputs[:1], unit, what)
    return tensors


def _stacked(count: int, axis: int, offset: float = 0.0) -> Callable[..., torch.Tensor]:
    """Matrices one after another along `axis`, each with its norm's gain, if given, multiplied into what it reads."""

    def stack(*given: torch.Tensor) -> torch.Tensor:
        import torch

        weights, gains = given[:count], given[count:]
        if gains:
            pairs = zip(weights, gains, strict=True)
            weights = [w * (g + offset if axis == 0 else (g + offset)[:, None]) for w, g in pairs]
        return torch.cat(list(weights), axis)

    return stack


def _shifted(count: int, axis: int) -> Callable[..., torch.Tensor]:
    """Biases one after another, each with what its matrix makes of its norm's bias, if given."""

    def shift(*given: torch.Tensor) -> torch.Tensor:
        import torch

        biases, weights, norms = given[:count], given[count : 2 * count], given[2 * count :]
        if norms:
            triples = zip(biases, weights, norms, strict=True)
            biases = [b + (w @ c if axis == 0 else c @ w) for b, w, c in triples]
        return torch.cat(list(biases))

    return shift


def _summed(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return sum(others, first)
