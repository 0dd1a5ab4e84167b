"""Layers whose feed-forward is wider than the config says, as fused ones are.

    gated    down(act(gate x) * up x)     gate, up [m, d], down [d, m]        plain    out(act(in x))

The width m of a stored layer is that of its config unless the checkpoint's `widths` say otherwise. Only a feed-forward
of one output matrix and one or two input matrices, with nothing else that has parameters, can have another width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deepen.checkpoint.disk import output_tensors
from deepen.checkpoint.experts import Experts, in_experts
from deepen.checkpoint.factored import factored
from deepen.checkpoint.family import Parts, Tower
from deepen.errors import FamilyError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class FeedForward:
    """The matrices of a feed-forward, by their path inside the layer.

    Attributes:
        module: the feed-forward itself.
        inputs: matrices that read the stream, each of the same width.
        output: the matrix that writes to the stream.
        width: hidden values between them.
        stream: values of the stream.
    """

    module: str
    inputs: tuple[str, ...]
    output: str
    width: int
    stream: int


def output_matrix(layer: nn.Module, parts: Parts, letter: str, where: str) -> str:
    """The path of the one matrix with which a part writes to the stream.

    Raises:
        FamilyError: there is none, or more than one (experts).
    """
    names = [name for name, _ in layer.named_parameters()]
    found = output_tensors(dict.fromkeys(names, ""), parts.outputs.get(letter, ()))
    paths = {name.rpartition(".")[0] for name in found}
    if len(paths) != 1 or not isinstance(layer.get_submodule(next(iter(paths))), (nn.Linear, Conv1D)):
        raise FamilyError(
            f"{where}: part {letter!r} of a {type(layer).__name__} writes with {len(found)} tensors "
            f"({', '.join(found) or 'none known'}); expected one matrix"
        )
    return paths.pop()


def feed_forward(layer: nn.Module, parts: Parts, where: str) -> FeedForward:
    """The matrices of a layer's feed-forward.

    Raises:
        FamilyError: it is not of the gated or plain shape; the message names what it has besides.
    """
    output = output_matrix(layer, parts, "f", where)
    path = output.rpartition(".")[0]
    module = layer.get_submodule(path) if path else layer
    if isinstance(module, Experts):
        raise FamilyError(
            f"{where}: the feed-forward of this layer is split into {module.split.experts} experts already; change it "
            "before it is split"
        )
    if path not in parts.feed_forward:
        raise FamilyError(f"{where}: the feed-forward of a {type(layer).__name__} is no module of its own")
    width, stream = sizes(layer.get_submodule(output))
    matrices = {name: child for name, child in module.named_modules() if isinstance(child, (nn.Linear, Conv1D))}
    inputs = tuple(f"{path}.{name}" for name, child in matrices.items() if sizes(child) == (stream, width))
    inputs = tuple(name for name in inputs if name != output)
    owned = {f"{name}.{leaf}" for name in (*inputs, output) for leaf in ("weight", "bias")}
    others = [name for name, _ in layer.named_parameters() if name.startswith(f"{path}.") and name not in owned]
    if others or len(inputs) not in (1, 2):
        raise FamilyError(
            f"{where}: the feed-forward of a {type(layer).__name__} is not out(act(in x)) or down(act(gate x) * up x): "
            f"it has {len(inputs)} input matrices of {width} x {stream}"
            + (f", and {', '.join(others)}" if others else "")
        )
    return FeedForward(path, inputs, output, width, stream)


def sizes(matrix: nn.Module) -> tuple[int, int]:
    """Values that a linear map reads and gives."""
    if isinstance(matrix, Conv1D):
        return matrix.nx, matrix.nf
    assert isinstance(matrix, nn.Linear)
    return matrix.in_features, matrix.out_features


def output_axis(matrix: nn.Module) -> int:
    """The axis of the weight that counts what a linear map gives: 0 of [out, in], 1 of Conv1D's [in, out]."""
    return 1 if isinstance(matrix, Conv1D) else 0


def widened(layer: nn.Module, tower: Tower, width: int | None, where: str) -> nn.Module:
    """The layer itself, or a copy whose feed-forward has `width` hidden values, not initialised."""
    if width is None:
        return layer
    found = feed_forward(layer, tower.parts, where)
    if width == found.width:
        return layer
    made = copy.deepcopy(layer)
    for name in (*found.inputs, found.output):
        old = made.get_submodule(name)
        reads, gives = (width, found.stream) if name == found.output else (found.stream, width)
        resize(old, reads, gives)
    return made


def resize(matrix: nn.Module, reads: int, gives: int) -> None:
    """Gives a linear map other sizes; its values are left unset."""
    shape = (reads, gives) if isinstance(matrix, Conv1D) else (gives, reads)
    for name, size in (("weight", shape), ("bias", (gives,))):
        old = getattr(matrix, name)
        if old is not None:
            setattr(matrix, name, nn.Parameter(torch.empty(size, dtype=old.dtype, device=old.device)))
    names = ("nx", "nf") if isinstance(matrix, Conv1D) else ("in_features", "out_features")
    for name, value in zip(names, (reads, gives), strict=True):
        setattr(matrix, name, value)


def bank_modules(ck: Checkpoint, tower: Tower) -> list[nn.Module]:
    """For each stored layer, the layer that the model class builds for it, on the meta device."""
    modules = ck.skeleton.layers(tower)
    return [stored_layer(ck, tower, index, modules[origin]) for index, origin in enumerate(ck.banks[tower.name])]


def stored_layer(ck: Checkpoint, tower: Tower, index: int, layer: nn.Module) -> nn.Module:
    """A layer that the model class has built, or a copy of it with the shapes of stored layer `index`."""
    made = widened(layer, tower, ck.widths.get(tower.name, {}).get(index), ck.where)
    made = factored(made, ck.factors.get(tower.name, {}).get(index), ck.where)
    if (split := ck.experts.get(tower.name, {}).get(index)) is None:
        return made
    where = f"{ck.where}: layer {index}"
    return in_experts(made, feed_forward(made, tower.parts, where), split, where)


def refuse_widths(ck: Checkpoint, tower: Tower, stored: Sequence[int]) -> None:
    """Refuses the plain format for layers of another width than the config says.

    Raises:
        FamilyError: names the layer and both widths.
    """
    for index, layer in enumerate(stored):
        width = ck.widths.get(tower.name, {}).get(layer)
        if width is not None:
            usual = feed_forward(ck.skeleton.layers(tower)[ck.banks[tower.name][layer]], tower.parts, ck.where).width
            if width != usual:
                raise FamilyError(
                    f"{ck.where}: layer {index} of the {tower.name} tower has a fused feed-forward of width {width}, "
                    f"and a plain {ck.family.model_type} config states one width, {usual}, for all layers; save the "
                    "native form (without --bake), which deepen loads"
                )
