"""What a checkpoint's program owns beside the bank: modules for a model, tensors for the files, and what is refused.

    model.layers.0.self_attn.q_proj.weight                    the bank
    model.layers.owned.lora.0.2.self_attn_q_proj.A            place 0, turn 2 (see `deepen.program.owned`)

The tensors of a stored program lie in the files under these names. Under another program the places are others, so
every set starts from its initial values again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deepen.checkpoint.depth_fields import scope_object
from deepen.checkpoint.family import Tower
from deepen.checkpoint.owned_maps import OWNED, Folded, Initial, label, part_maps
from deepen.checkpoint.recipes import NUMBERS, Copy, Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.checkpoint.widths import bank_modules, sizes
from deepen.errors import CheckpointError, FamilyError, ProgramError, SaveError
from deepen.program import Own, Visit
from deepen.sublayers.owned import Lora, branches, stream_module

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class OwnedSet:
    """One set of parameters.

    Attributes:
        own: what it is.
        modules: by the path of the linear map they stand beside; the empty path is the set itself.
        visit: the first visit that runs with it, None where it acts on the stream.
    """

    own: Own
    modules: Mapping[str, nn.Module]
    visit: Visit | None = None

    def module(self) -> nn.Module:
        """The set as one module."""
        return (
            self.modules[""]
            if "" in self.modules
            else branches({label(path): module for path, module in self.modules.items()})
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its name behind `owned.`."""
        return {
            ".".join(filter(None, (self.own.name, label(path), name))): tuple(tensor.shape)
            for path, module in self.modules.items()
            for name, tensor in module.named_parameters()
        }


def owned_sets(ck: Checkpoint, tower: Tower) -> dict[str, OwnedSet]:
    """The sets of a tower's program that have parameters, by name, without values (they are on the meta device).

    Raises:
        FamilyError: a layer has no linear maps that can be adapted, or the width of the stream is not known.
        ProgramError: a rank above that of every matrix.
    """
    plan = ck.plan(tower.name)
    found: dict[str, OwnedSet] = {}
    if not plan.owned:
        return found
    bank = bank_modules(ck, tower)
    with torch.device("meta"):
        for visit in plan.visits:
            if visit.lora is not None and visit.lora.name not in found:
                found[visit.lora.name] = _adapters(ck, tower, visit, visit.lora, bank[visit.key.layer])
        for own in plan.owned.values():
            if own.kind != "lora" and own.name not in found:
                module = stream_module(own, _width(ck, tower, own))
                if module is not None:
                    found[own.name] = OwnedSet(own, {"": module})
    return found


def _adapters(ck: Checkpoint, tower: Tower, visit: Visit, own: Own, layer: nn.Module) -> OwnedSet:
    what = f"{ck.where}: lora on layer {visit.key}"
    if tower.parts.kind == "single":
        raise FamilyError(f"{what}: {tower.parts.reason or 'its kernels read matrices without calling their maps'}")
    if visit.key.layer in ck.factors.get(tower.name, {}):
        raise FamilyError(f"{what}: some of its matrices are stored as two factors; write them out with --bake first")
    if visit.key.layer in ck.experts.get(tower.name, {}):
        raise FamilyError(f"{what}: its feed-forward is split into experts, which read their matrices themselves")
    stacked = next((name for name, tensor in layer.named_parameters() if tensor.ndim == 3), None)
    if stacked is not None:
        raise FamilyError(
            f"{what}: {stacked} stacks the matrices of its experts, which are no linear maps of their own"
        )
    maps = {path: sizes(module) for path, module in part_maps(layer, tower.parts, visit.parts).items()}
    rank = own.value
    assert isinstance(rank, int)
    if not maps:
        raise FamilyError(f"{what}: part {visit.parts!r} has no linear maps")
    path, size = max(maps.items(), key=lambda item: min(item[1]))
    if rank > min(size):
        raise ProgramError(
            f"lora={rank} on layer {visit.key}: no matrix has this rank; expected at most {min(size)}, the smaller "
            f"side of {path}",
            ck.plan(tower.name).text,
        )
    return OwnedSet(own, {path: Lora(rank, *size) for path, size in maps.items()}, visit)


def _width(ck: Checkpoint, tower: Tower, own: Own) -> int:
    width = stream_width(ck, tower)
    if not width:
        raise FamilyError(
            f"{ck.where}: {own.kind} needs the width of the stream, and the config of the {tower.name} tower of "
            f"{ck.family.model_type} states no single one"
        )
    return width


def stream_width(ck: Checkpoint, tower: Tower) -> int:
    """Values of a tower's stream; 0 where its config states no single one."""
    width = getattr(scope_object(ck.skeleton.config, tower), "hidden_size", None)
    if width is None and len(ck.family.towers) == 1:
        width = getattr(ck.skeleton.config.get_text_config(), "hidden_size", None)
    return width if isinstance(width, int) else 0


def owned_names(ck: Checkpoint, tower: Tower) -> list[str]:
    """The tensors of sets that the files hold for a tower, by full name."""
    stem = f"{ck.disk[tower.name].prefix}.{OWNED}."
    return [name for name in ck.source.infos if name.startswith(stem)]


def stored_here(ck: Checkpoint, tower: Tower) -> bool:
    """Whether the sets in the files are those of the tower's program."""
    if ck.owned is None:
        return False
    key = tower.name if len(ck.family.towers) > 1 else ""
    return (
        ck.owned.plan(ck.depth[tower.name], [tower.parts.letters] * ck.depth[tower.name], key).root
        == ck.plan(tower.name).root
    )


def owned_recipes(ck: Checkpoint, tower: Tower) -> dict[str, Recipe]:
    """A recipe for every tensor of the sets of a tower, by full name: from the files, else its initial value.

    Raises:
        CheckpointError: a tensor of the stored program is missing, has another shape, or belongs to none of its sets.
    """
    sets = ck.sets[tower.name]
    prefix, infos = ck.disk[tower.name].prefix, ck.source.infos
    stored = stored_here(ck, tower)
    recipes: dict[str, Recipe] = {}
    for owned in sets.values():
        dtype = _dtype(ck, tower, owned.visit)
        for name, shape in owned.tensors().items():
            full = f"{prefix}.{OWNED}.{name}"
            recipes[full] = Initial(name, TensorInfo(dtype, shape))
            if stored:
                if full not in infos:
                    raise CheckpointError(
                        f"{ck.where}: the tensor {full} is missing from the files; the program {ck.program} owns it"
                    )
                if infos[full].shape != shape:
                    raise CheckpointError(
                        f"{ck.where}: {full} has the shape {list(infos[full].shape)}, but the program {ck.program} "
                        f"describes {list(shape)}"
                    )
                recipes[full] = Copy(full, infos[full])
    if (stored or ck.owned is None) and (extra := sorted(set(owned_names(ck, tower)) - recipes.keys())):
        raise CheckpointError(f"{ck.where}: {extra[0]} belongs to nothing that the program {ck.program} owns")
    return recipes


def _dtype(ck: Checkpoint, tower: Tower, visit: Visit | None) -> str:
    """The type of the weights beside which the parameters stand: plain numbers of the layer, else of the files."""
    infos = ck.source.infos
    layer = ck.disk[tower.name].layers[0 if visit is None else visit.key.layer].values()
    found = [infos[full].dtype for full in (*layer, *infos) if infos[full].dtype in NUMBERS]
    return found[0] if found else "F32"


def left_out(ck: Checkpoint) -> str | None:
    """What to say of sets in the files that another program owns; None where there are none."""
    count = sum(len(owned_names(ck, tower)) for tower in ck.family.towers if not stored_here(ck, tower))
    return f"{count} tensors that belong to the program {ck.owned} are left out" if count else None


def folded(ck: Checkpoint, tower: Tower, visit: Visit, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The matrices of the layer of a visit with the adapters of the visit added, by their names inside the layer.

    Args:
        ck: the checkpoint.
        tower: the tower of the visit.
        visit: a visit with adapters.
        recipes: the tensors of its layer by their names inside it.

    Raises:
        SaveError: the files hold a matrix under another name than the model has.
    """
    made: dict[str, Recipe] = {}
    for path, place in map_tensors(ck, tower, visit).items():
        name = f"{path}.weight"
        if name not in recipes:
            raise SaveError(
                f"bake: the files of {ck.where} hold no {name} in layer {visit.key}, into which the adapter of visit "
                f"{visit.index} could be folded; save without --bake"
            )
        a, b = (ck.owned_tensors[place.tensors[letter][0]] for letter in "AB")
        made[name] = Folded(recipes[name], a, b, place.turned)
    return made


@dataclass(frozen=True)
class AdapterPlace:
    """Where the adapter of one linear map is stored.

    Attributes:
        tensors: for `A` and `B`, the full name and the shape.
        turned: the matrix of the map is stored [in, out] (Conv1D).
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    turned: bool


def map_tensors(ck: Checkpoint, tower: Tower, visit: Visit) -> dict[str, AdapterPlace]:
    """Where the adapters of a visit are stored, by the path of the map inside the layer."""
    assert visit.lora is not None
    layer = bank_modules(ck, tower)[visit.key.layer]
    places = {}
    for path, module in ck.sets[tower.name][visit.lora.name].modules.items():
        stem = f"{ck.disk[tower.name].prefix}.{OWNED}.{visit.lora.name}.{label(path)}"
        tensors = {name: (f"{stem}.{name}", tuple(tensor.shape)) for name, tensor in module.named_parameters()}
        places[path] = AdapterPlace(tensors, isinstance(layer.get_submodule(path), Conv1D))
    return places


def refuse_baked(ck: Checkpoint, tower: Tower, own: Own, visit: str) -> None:
    """Refuses to leave out what a set does to the stream, unless its values are those that change nothing.

    Args:
        ck: the checkpoint.
        tower: the tower.
        own: a set that acts on the stream.
        visit: what to call the visit next to it.

    Raises:
        SaveError: it changes the stream.
    """
    stem = f"{ck.disk[tower.name].prefix}.{OWNED}.{own.name}."
    recipes = [recipe for name, recipe in ck.owned_tensors.items() if name.startswith(stem)]
    neutral = own.kind in ("emb", "inject") or own.value in ("scalar", "vector")
    start = [Initial(f"{own.name}.value", TensorInfo(recipe.dtype, recipe.shape)) for recipe in recipes]
    if not (recipes and neutral) or not all(
        torch.equal(recipe.compute(ck.source), first.compute(ck.source))
        for recipe, first in zip(recipes, start, strict=True)
    ):
        raise SaveError(
            f"bake: {own.kind} at {visit} changes the stream, and a plain checkpoint has no place for it; save without "
            "--bake"
        )
