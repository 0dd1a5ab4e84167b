"""Which tensor of the files belongs to which layer.

Names on disk and names in the module may differ (a base model saved without its head's prefix, experts stored one by
one), so layers are found by the anchored prefix that the files themselves use, and only the layer number is renamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from torch import nn

from deepen.checkpoint.depth_fields import scope_object
from deepen.checkpoint.family import Tower
from deepen.checkpoint.skeleton import Skeleton
from deepen.checkpoint.slabs import slab_of, slab_shape
from deepen.checkpoint.sources import Source
from deepen.errors import CheckpointError

# How many layers behind the last one predict further tokens.
AHEAD = "num_nextn_predict_layers"


@dataclass(frozen=True)
class DiskTower:
    """The tensors of one tower.

    Attributes:
        prefix: what the names of its tensors begin with, before the number of the layer.
        layers: `layers[i]` maps the name inside layer i to the full name on disk.
        ahead: full names of tensors numbered behind the last layer, which predict further tokens (DeepSeek-V3) and
            which transformers leaves out.
    """

    prefix: str
    layers: tuple[Mapping[str, str], ...]
    ahead: tuple[str, ...] = ()


def read_towers(source: Source, skeleton: Skeleton, depths: Mapping[str, int], where: str) -> dict[str, DiskTower]:
    """Finds every tower's layers in the files.

    Raises:
        CheckpointError: a layer is missing, or there are more than the config says.
    """
    return {
        tower.name: _read_tower(source, skeleton, tower, depths[tower.name], where) for tower in skeleton.family.towers
    }


def _read_tower(source: Source, skeleton: Skeleton, tower: Tower, depth: int, where: str) -> DiskTower:
    path = skeleton.container(tower)
    base = skeleton.model_class.base_model_prefix
    parts = path.split(".")
    prefixes = [*tower.on_disk, f"{base}.{path}", *(".".join(parts[start:]) for start in range(len(parts)))]
    for prefix in prefixes:
        pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.(.+)")
        layers: dict[int, dict[str, str]] = {}
        for name in source.infos:
            if match := pattern.fullmatch(name):
                layers.setdefault(int(match[1]), {})[match[2]] = name
        if layers:
            break
    else:
        raise CheckpointError(
            f"{where}: no tensor of the {tower.name} tower found; expected names such as '{path}.0. ...', got "
            f"{', '.join(sorted(source.infos)[:3])} ..."
        )
    if missing := sorted(set(range(depth)) - layers.keys()):
        raise CheckpointError(
            f"{where}: config.json says {depth} layers in the {tower.name} tower, but the files hold no tensor of "
            f"layer {missing[0]}; download the missing shard or correct {tower.depth}"
        )
    predicting = getattr(scope_object(skeleton.config, tower), AHEAD, 0) or 0
    ahead = [index for index in sorted(layers) if depth <= index < depth + predicting]
    if extra := sorted(layers.keys() - {*range(depth), *ahead}):
        raise CheckpointError(
            f"{where}: config.json says {depth} layers in the {tower.name} tower (0-{depth - 1}), but the files also "
            f"hold layer {extra[0]}; correct {tower.depth}, since extra layers would be dropped silently"
        )
    names = tuple(name for index in ahead for name in layers[index].values())
    return DiskTower(prefix, tuple(layers[index] for index in range(depth)), names)


def check_tensors(
    infos: Mapping[str, Shaped],
    skeleton: Skeleton,
    towers: Mapping[str, DiskTower],
    modules: Mapping[str, Sequence[nn.Module]],
    where: str,
) -> None:
    """Checks shapes, and that no tensor of a layer is missing, against the class that the config builds.

    Families whose files hold other tensors than the modules (experts one by one) are checked where names agree, and
    again by transformers when they are loaded.

    Args:
        infos: what the files hold or will hold, by name.
        skeleton: the class that the config builds.
        towers: which of these tensors belongs to which layer.
        modules: for each tower, the layer of the class that each of these layers is.
        where: what errors call the checkpoint.

    Raises:
        CheckpointError: a shape contradicts the config, or a layer lacks a tensor.
    """
    for tower in skeleton.family.towers:
        specials = set(tower.first)
        for index, module in enumerate(modules[tower.name]):
            shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
            found = towers[tower.name].layers[index]
            for name, full in found.items():
                _check_shape(full, infos[full].shape, shapes.get(name), where)
            missing = sorted(shapes.keys() - found.keys() - specials)
            if missing and found.keys() <= shapes.keys() | specials:
                raise CheckpointError(
                    f"{where}: the tensor {towers[tower.name].prefix}.{index}.{missing[0]} is missing from the files"
                )
    owned = {full for disk in towers.values() for layer in disk.layers for full in layer.values()}
    base = skeleton.model_class.base_model_prefix
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.model.state_dict().items()}
    for name in infos.keys() - owned:
        for candidate in (name, f"{base}.{name}", name.removeprefix(f"{base}.")):
            if candidate in shapes:
                expected = shapes[candidate]
                for tower in skeleton.family.towers:
                    if (slab := slab_of(tower, name)) is not None:
                        expected = slab_shape(expected, slab, skeleton.depth(tower), len(modules[tower.name]))
                _check_shape(name, infos[name].shape, expected, where)
                break


class Shaped(Protocol):
    """Anything with a shape: what a file holds, or a recipe for it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...] | None, where: str) -> None:
    if expected is not None and got != expected:
        raise CheckpointError(
            f"{where}: {name} has the shape {list(got)}, but config.json describes {list(expected)}; the config and "
            "the weights are of different models"
        )


def output_tensors(layer: Mapping[str, str], patterns: Sequence[str]) -> list[str]:
    """Names, inside a layer, of the matrices and biases that write to the residual stream."""
    # Of a map of two factors, the one behind writes to the stream.
    leaves = ("", ".weight", ".bias", ".left.weight", ".left.bias")
    ends = [f"{pattern}{leaf}" for pattern in patterns for leaf in leaves]
    return [name for name in layer if any(_matches(name, end) for end in ends)]


def _matches(name: str, pattern: str) -> bool:
    if name.count(".") != pattern.count("."):
        return False
    return all(fnmatchcase(a, b) for a, b in zip(name.split("."), pattern.split("."), strict=True))
