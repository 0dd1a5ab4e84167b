"""What a checkpoint looks like when it is written: one form, its layers, its config and a recipe for every tensor.

Three forms. *plain*: the family's own format, possible when no layer is shared and nothing needs deepen. *native*:
each stored layer once, with the program beside the original config. *baked*: the plain format with shared layers
written out, as far as the family can express it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from deepen import __version__
from deepen.checkpoint.depth_fields import scope, select
from deepen.checkpoint.disk import AHEAD, DiskTower, check_tensors, output_tensors
from deepen.checkpoint.expert_record import made_whole, needs_experts, stored_experts
from deepen.checkpoint.factored import multiplied_out, needs_factors, stored_factors
from deepen.checkpoint.family import Tower
from deepen.checkpoint.layer_names import layer_names, quantisation
from deepen.checkpoint.original import spread
from deepen.checkpoint.owned import folded, left_out, owned_names, refuse_baked
from deepen.checkpoint.recipes import Copy, Recipe, Scaled
from deepen.checkpoint.scaled_columns import ScaledQuery
from deepen.checkpoint.skeleton import Skeleton, build_config, same_layers
from deepen.checkpoint.slabs import cut_slab, slab_of
from deepen.checkpoint.widths import refuse_widths
from deepen.errors import CheckpointError, FamilyError, SaveError
from deepen.program import Blend, Enter, Fork, Gate, Join, Plan, Record, Run, Visit
from deepen.program.stored import stored_text

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

NATIVE_TYPE = "deepen_checkpoint"
PROGRAM_VERSION = 1
Form = Literal["plain", "native", "baked"]


@dataclass(frozen=True)
class NewLayer:
    """One layer to write.

    Attributes:
        stored: the stored layer it comes from.
        factors: per part, what its output matrices and biases are multiplied by; 0 removes the part.
        lora: the visit whose adapters are folded into it.
    """

    stored: int
    factors: Mapping[str, float] = field(default_factory=dict)
    lora: Visit | None = None


@dataclass(frozen=True)
class Layout:
    """A checkpoint ready to be written."""

    form: Form
    config: dict[str, Any]
    tensors: Mapping[str, Recipe]
    layers: Mapping[str, tuple[NewLayer, ...]]
    notes: tuple[str, ...]


def bank_layers(plan: Plan) -> tuple[NewLayer, ...]:
    """The layers of the native form: every key once, in order of first use; `!zero` copies with zero outputs."""
    return tuple(
        NewLayer(key.layer, {"a": 0.0, "f": 0.0} if plan.inits.get(key) == "zero" else {}) for key in plan.keys
    )


def layout(ck: Checkpoint, *, bake: bool = False) -> Layout:
    """Chooses the form of a save and describes it in full.

    Raises:
        SaveError: `bake` asks for what the plain format has no place for; the message names the visit.
        FamilyError: `bake` asks for a depth pattern that the family's config cannot state.
    """
    ck.require_executable()
    plans = {tower.name: ck.plan(tower.name) for tower in ck.family.towers}
    if bake:
        layers, notes = {}, []
        for name, plan in plans.items():
            layers[name], told = _baked(ck, plan, ck.family.tower(name))
            notes += told
        return _plain(ck, layers, "baked", notes)
    stored = {name: bank_layers(plan) for name, plan in plans.items()}
    reasons = [reason for name, plan in plans.items() if (reason := needs_deepen(plan, ck.family.tower(name)))]
    reasons += [reason for needs in (needs_factors, needs_experts) if (reason := needs(ck, stored))]
    if not reasons:
        try:
            return _plain(ck, stored, "plain", [])
        except FamilyError as error:
            reasons.append(str(error))
    if left := left_out(ck):
        reasons.append(left)
    tensors = tensors_of(ck, stored) | ck.owned_tensors
    return Layout("native", native_config(ck, plans), dict(sorted(tensors.items())), stored, tuple(reasons))


def needs_deepen(plan: Plan, tower: Tower) -> str | None:
    """Why the plain format cannot hold this plan, or None."""
    order = [plan.keys.index(visit.key) for visit in plan.visits]
    repeated = tower.repeats and order == spread(len(order), len(plan.keys))
    if len(plan.visits) != len(plan.keys) and not repeated:
        twice = next(visit for visit in plan.visits if sum(other.key == visit.key for other in plan.visits) > 1)
        return f"native form: layer {twice.key} is visited more than once and stored once"
    for loop in plan.loops:
        if loop.minimum != loop.maximum:
            return f"native form: the count of the loop {loop.text} is chosen at run time"
    for op in plan.tape():
        if isinstance(op, (Fork, Join, Blend)):
            return "native form: the program has groups or scales"
        if isinstance(op, (Enter, Gate)) or (isinstance(op, Run) and op.visit.lora is not None):
            own = op.visit.lora if isinstance(op, Run) else op.own
            return f"native form: the program owns parameters ({own.kind})" if own is not None else None
        if isinstance(op, Record):
            return f"native form: the program records the stream at {op.name!r}"
        if isinstance(op, Run) and len(op.visit.parts) < len(tower.parts.letters):
            return f"native form: visit {op.visit.index} runs only part {op.visit.parts!r} of layer {op.visit.key}"
    return None


def _baked(ck: Checkpoint, plan: Plan, tower: Tower) -> tuple[tuple[NewLayer, ...], list[str]]:
    """One plain layer a visit; what the plain format cannot hold is refused, what is fixed by it is stated."""
    notes: list[str] = []
    layers: list[NewLayer] = []
    factor: dict[int, dict[str, float]] = {}
    stack: list[int] = []
    ops = plan.tape()
    for position, op in enumerate(ops):
        if isinstance(op, Fork):
            stack.append(position)
        elif isinstance(op, Join):
            inside = _visits(ops[stack.pop() : position])
            raise SaveError(
                f"bake: {_name(inside)} run side by side, and a plain checkpoint only knows one layer after another; "
                "save without --bake"
            )
        elif isinstance(op, Blend):
            inside = _visits(ops[stack.pop() : position])
            if (
                len(inside) != 1
                or len(inside[0].parts) != 1
                or tower.parts.kind not in ("serial", "single", "parallel")
            ):
                raise SaveError(
                    f"bake: the scale {op.scale} on {_name(inside)} cannot be folded into one matrix; only a scale on "
                    "a single part, such as 3.f[scale=0.5], can. Save without --bake"
                )
            visit = inside[0]
            parts = factor.setdefault(visit.index, {})
            parts[visit.parts] = parts.get(visit.parts, 1.0) * op.scale
            notes.append(
                f"scale {op.scale} of visit {visit.index} is folded into the output of {visit.key}.{visit.parts}"
            )
        elif isinstance(op, (Enter, Gate)):
            inside = _visits(ops[position:])[:1] if isinstance(op, Enter) else _visits(ops[stack.pop() : position])
            refuse_baked(ck, tower, op.own, _name(inside))
            notes.append(f"{op.own.kind} at {_name(inside)} changes nothing and is left out")
        elif isinstance(op, Record):
            notes.append(f"the mark {op.name!r} is left out: a plain model records nothing")
    for loop in plan.loops:
        if loop.minimum != loop.maximum:
            notes.append(f"the loop {loop.text} is written with its default count {loop.maximum}")
    for visit in plan.visits:
        if visit.slot is not None and not visit.writes:
            raise SaveError(
                f"bake: visit {visit.index} of layer {visit.key} reuses the keys of an earlier turn (kv=first); "
                "a plain checkpoint computes them anew in each layer. Save without --bake"
            )
        factors = dict(factor.get(visit.index, {}))
        missing = [letter for letter in tower.parts.letters if letter not in visit.parts]
        for letter in missing:
            factors[letter] = 0.0
            notes.append(f"visit {visit.index}: part {letter} of layer {visit.key} is written with zero outputs")
        if plan.inits.get(visit.key) == "zero":
            factors = {"a": 0.0, "f": 0.0}
        if visit.lora is not None:
            notes.append(f"visit {visit.index}: the adapters {visit.lora.name} are folded into layer {visit.key}")
        layers.append(NewLayer(visit.key.layer, factors, visit if visit.lora is not None else None))
    return tuple(layers), notes


def _visits(ops: Sequence[object]) -> list[Visit]:
    return [op.visit for op in ops if isinstance(op, Run)]


def _name(visits: Sequence[Visit]) -> str:
    indices = ", ".join(str(visit.index) for visit in visits)
    keys = ", ".join(f"{visit.key}" for visit in visits)
    return f"visits {indices} (layers {keys})" if len(visits) != 1 else f"visit {indices} (layer {keys})"


def _plain(ck: Checkpoint, layers: Mapping[str, tuple[NewLayer, ...]], form: Form, notes: list[str]) -> Layout:
    """The family's own format; the config is changed with the layers and checked against the class it builds."""
    config = dict(ck.config)
    for tower in ck.family.towers:
        origins = [ck.banks[tower.name][layer.stored] for layer in layers[tower.name]]
        refuse_widths(ck, tower, [layer.stored for layer in layers[tower.name]])
        build = lambda raw: build_config(raw, ck.where)  # noqa: E731
        config = select(config, build, ck.family, tower, origins, ck.where)
        if tower.repeats:
            scope(config, tower)[tower.repeats] = len(origins) if form == "baked" else len(ck.plan(tower.name).visits)
    names = layer_names(ck, layers)
    config = quantisation(config, names)
    if left := left_out(ck):
        notes.append(left)
    folds = {name: module for name, module in ck.family.folds_index.items() if config.get(name)}
    for name in folds:
        config[name] = False
        notes.append(f"{name} is folded into the query of each layer, since its number changes")
    old = ck.skeleton
    new = Skeleton(ck.family, config, ck.where)
    if not folds:
        for tower in ck.family.towers:
            same_layers(old, new, tower, [ck.banks[tower.name][layer.stored] for layer in layers[tower.name]])
    tensors = multiplied_out(ck, layers, tensors_of(ck, layers, folds), notes)
    tensors = made_whole(ck, layers, tensors, notes)
    _check_plain(ck, new, layers, tensors)
    tensors |= _ahead(ck, layers, config, notes)
    return Layout(form, config, tensors, dict(layers), tuple(notes))


def _ahead(
    ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]], config: dict[str, Any], notes: list[str]
) -> dict[str, Recipe]:
    """Tensors that predict further tokens stay with the model they were trained on; transformers does not run them."""
    kept: dict[str, Recipe] = {}
    for tower in ck.family.towers:
        ahead = ck.disk[tower.name].ahead
        if layers[tower.name] == tuple(NewLayer(index) for index in range(ck.depth[tower.name])):
            kept |= {name: Copy(name, ck.source.infos[name]) for name in ahead}
        elif ahead:
            scope(config, tower)[AHEAD] = 0
            notes.append(f"the {len(ahead)} tensors that predict further tokens from the last layer are left out")
    return kept


def _check_plain(
    ck: Checkpoint, new: Skeleton, layers: Mapping[str, Sequence[NewLayer]], tensors: Mapping[str, Recipe]
) -> None:
    """Every tensor has the shape that the new config builds; one with a depth axis does not."""
    towers = {}
    for name, chosen in layers.items():
        prefix = ck.disk[name].prefix
        stems = [f"{prefix}.{index}." for index in range(len(chosen))]
        towers[name] = DiskTower(
            prefix,
            tuple({full[len(stem) :]: full for full in tensors if full.startswith(stem)} for stem in stems),
        )
    modules = {tower.name: list(new.layers(tower)) for tower in ck.family.towers}
    try:
        check_tensors(tensors, new, towers, modules, ck.where)
    except CheckpointError as error:
        raise FamilyError(f"the plain format cannot hold the result: {error}") from error


def native_config(ck: Checkpoint, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """config.json of the native form; layer j of the files is layer `bank[j]` of the base config."""
    renumbered = {name: stored_text(plan) for name, plan in plans.items()}
    if len(renumbered) == 1:
        text = next(iter(renumbered.values()))
    else:
        text = " ".join(f"{name}: {body}" for name, body in renumbered.items())
    stored = {name: [key.layer for key in plan.keys] for name, plan in plans.items()}
    widths = {
        name: {str(at): ck.widths[name][key.layer] for at, key in enumerate(plan.keys) if key.layer in ck.widths[name]}
        for name, plan in plans.items()
        if name in ck.widths
    }
    return {
        "model_type": NATIVE_TYPE,
        "architectures": ["DeepenCheckpointModel"],
        "program": text,
        "program_version": PROGRAM_VERSION,
        "deepen_version": __version__,
        "bank": {name: [ck.banks[name][key.layer] for key in plan.keys] for name, plan in plans.items()},
        **({"widths": widths} if any(widths.values()) else {}),
        **stored_factors(ck, stored),
        **stored_experts(ck, stored),
        "base": copy.deepcopy(dict(ck.config)),
    }


def tensors_of(
    ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]], folds: Mapping[str, str] | None = None
) -> dict[str, Recipe]:
    """A recipe for every tensor, by its name on disk."""
    infos = ck.source.infos
    tensors: dict[str, Recipe] = {}
    owned: set[str] = set()
    for tower in ck.family.towers:
        disk = ck.disk[tower.name]
        owned.update(full for layer in disk.layers for full in layer.values())
        owned.update(disk.ahead)
        for index, new in enumerate(layers[tower.name]):
            for name, recipe in _layer_tensors(ck, tower, disk, index, new, folds or {}).items():
                tensors[f"{disk.prefix}.{index}.{name}"] = recipe
        owned.update(owned_names(ck, tower))
    for name in infos.keys() - owned:
        tensors[name] = Copy(name, infos[name])
        for tower in ck.family.towers:
            if (slab := slab_of(tower, name)) is not None:
                stored = [new.stored for new in layers[tower.name]]
                tensors[name] = cut_slab(tensors[name], slab, stored, ck.depth[tower.name])
    return dict(sorted(tensors.items()))


def _layer_tensors(
    ck: Checkpoint, tower: Tower, disk: DiskTower, index: int, new: NewLayer, folds: Mapping[str, str]
) -> dict[str, Recipe]:
    infos = ck.source.infos
    names = dict(disk.layers[new.stored])
    for special in tower.first:
        names.pop(special, None)
        if index == 0 and special in disk.layers[0]:
            names[special] = disk.layers[0][special]
    recipes: dict[str, Recipe] = {name: Copy(full, infos[full]) for name, full in names.items()}
    if new.lora is not None:
        recipes |= folded(ck, tower, new.lora, recipes)
    for letter, factor in new.factors.items():
        patterns = tower.parts.outputs.get(letter, ())
        if not patterns:
            continue
        found = output_tensors(names, patterns)
        if not found:
            raise FamilyError(
                f"{ck.where}: layer {new.stored} has none of the output matrices of part {letter!r} that deepen knows "
                f"for {ck.family.model_type} ({', '.join(patterns)}); seen: {', '.join(sorted(names))}"
            )
        for name in found:
            recipes[name] = Scaled(recipes[name], factor)
    for module in folds.values():
        for name in recipes:
            if name.startswith(f"{module}."):
                recipes[name] = ScaledQuery(recipes[name], 1.0 / (ck.banks[tower.name][new.stored] + 1))
    return recipes
