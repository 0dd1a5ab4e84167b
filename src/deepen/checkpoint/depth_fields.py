"""Config fields that depend on depth, selected with the layers they describe.

A length list follows its layers (`layer_types`), an index list is renumbered (`mlp_only_layers`), a prefix count is
counted again (`first_k_dense_replace`), a period is solved for or replaced by the explicit list that the class allows.
A field that changes with depth and is not known here is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from deepen.checkpoint.family import Family, Tower
from deepen.errors import CheckpointError, FamilyError

# One entry per layer.
LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "attention_layers",
    "indexer_types",
    "attention_window",
    "activation_sparsity_pattern",
    "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer",
    "layer_rope_theta",
    "intermediate_size",
)
# Numbers of the layers that are of a special kind.
INDEXES = (
    "cross_attention_layers",
    "hybrid_layer_ids",
    "fullatt_block_indexes",
    "full_attn_idxs",
    "global_attn_indexes",
    "window_block_indices",
    "residual_block_indices",
    "attn_layer_indices",
    "moe_layers",
)
# A pattern of kinds, repeated until every layer has one.
PATTERNS = ("block_types",)
# Derived by the config class from the depth and from the fields above; they carry no choice of their own.
DERIVED = ("stage_names", "out_features", "out_indices", "hybrid_override_pattern", "final_w_init_variance_scale")
# Read only to derive a list above; inert once that list is written out.
SUPERSEDED = ("max_window_layers", "sliding_window_pattern", "no_rope_layer_interval")
# The first k layers have a dense feed-forward, the others experts.
PREFIXES = ("first_k_dense_replace", "num_dense_layers")
# The last k layers reuse the keys and values of earlier ones.
SUFFIXES = ("num_kv_shared_layers",)
# Settings of single layers, by their number.
OVERRIDES = ("per_layer_config",)
# (period, offset): layer i is of the special kind when i % period == offset.
PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))


def scope(config: dict[str, Any], tower: Tower) -> dict[str, Any]:
    """The (nested) config dictionary that holds the tower's depth; made where the file leaves it out."""
    for name in tower.depth.split(".")[:-1]:
        config = config.setdefault(name, {})
    return config


def scope_object(config: Any, tower: Tower) -> Any:
    """The (nested) config object that holds the tower's depth."""
    for name in tower.depth.split(".")[:-1]:
        config = getattr(config, name)
    return config


def stated_depth(config: Any, raw: Mapping[str, Any], tower: Tower, where: str) -> tuple[str, int]:
    """The name under which config.json states the tower's depth (`n_layer`, `num_hidden_layers` ...), and the depth.

    A nested config may leave the key out, since files of multimodal models state only what differs from the class;
    the number of layers in the files is checked against it all the same.

    Raises:
        CheckpointError: no such key, or its value is not a positive integer; a default is never assumed.
    """
    inner, built = scope(copy.deepcopy(dict(raw)), tower), scope_object(config, tower)
    leaf = tower.depth.rsplit(".", 1)[-1]
    aliases = getattr(type(built), "attribute_map", {})
    canonical = aliases.get(leaf, leaf)
    names = [leaf, canonical, *(alias for alias, target in aliases.items() if target == canonical)]
    name = next((name for name in dict.fromkeys(names) if name in inner), None)
    if name is None and "." in tower.depth:
        name = canonical
        inner[name] = getattr(built, canonical)
    if name is None and is_computed(built, canonical):
        # The length of a list that config.json holds.
        name = canonical
        inner[name] = getattr(built, canonical)
    if name is None:
        raise CheckpointError(
            f"{where}: config.json does not say how many layers the {tower.name} tower has; expected the key "
            f"{tower.depth!r}. Add it: a default depth would be a guess"
        )
    depth = inner[name]
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise CheckpointError(f"{where}: config.json says {name} = {depth!r}; expected a positive integer")
    return name, depth


def select(
    raw: Mapping[str, Any],
    build: Callable[[dict[str, Any]], Any],
    family: Family,
    tower: Tower,
    origins: Sequence[int],
    where: str,
) -> dict[str, Any]:
    """The config of a model whose layers, in order, are the layers `origins` of the model that `raw` describes.

    Args:
        raw: config.json as read.
        build: makes a transformers config from such a dictionary.
        family: the family of the model.
        tower: the tower that changes.
        origins: for each new layer the index of the layer it comes from; repetition allowed.
        where: what errors call the checkpoint.

    Raises:
        FamilyError: the family's config cannot express the result; the message names the field.
    """
    built = build(copy.deepcopy(dict(raw)))
    key, depth = stated_depth(built, raw, tower, where)
    new = copy.deepcopy(dict(raw))
    if list(origins) == list(range(depth)):
        return new
    before, original = scope(built.to_dict(), tower), scope_object(built, tower)
    inner = scope(new, tower)
    inner[key] = len(origins)
    for name in DERIVED:
        inner.pop(name, None)
    wanted: dict[str, Any] = {}
    for name in LISTS:
        value = before.get(name)
        if isinstance(value, list) and value and name not in tower.foreign:
            if len(value) != depth:
                raise CheckpointError(
                    f"{where}: config.json has {len(value)} entries in {name} for {depth} layers; expected one a layer"
                )
            wanted[name] = [value[origin] for origin in origins]
    for name in INDEXES:
        if isinstance(before.get(name), list) and name not in tower.foreign:
            wanted[name] = renumbered(before[name], origins)
    inner.update({name: value for name, value in wanted.items() if not is_computed(original, name)})
    if "attention_types" in before and "attention_layers" in wanted:
        inner["attention_types"] = [[[kind], 1] for kind in wanted["attention_layers"]]
    for name in PATTERNS:
        if pattern := before.get(name):
            inner[name] = [pattern[origin % len(pattern)] for origin in origins]
    _renumber_dense(before, inner, origins)
    _recount_prefix(before, inner, origins, where)
    _recount_suffix(before, inner, depth, origins, where)
    _solve_periods(before, inner, origins, where)
    for name in OVERRIDES:
        if before.get(name):
            inner[name] = overrides(before[name], origins)
    for field, value in moved_features(built, family, tower, depth, origins, where).items():
        *scopes, leaf = field.split(".")
        holder = new
        for name in scopes:
            holder = holder.setdefault(name, {})
        holder[leaf] = value
    _refuse_unknown(raw, build, tower, key, depth, where)
    after = scope(build(copy.deepcopy(new)).to_dict(), tower)
    for name, value in wanted.items():
        if after.get(name) != value:
            raise FamilyError(f"{where}: a {family.model_type} config cannot state {name} = {value}")
    return new


def overrides(given: Mapping[Any, Any], origins: Sequence[int]) -> dict[str, Any]:
    """The settings of single layers under the new numbers of these layers."""
    by_layer = {int(layer): settings for layer, settings in given.items()}
    return {str(new): copy.deepcopy(by_layer[origin]) for new, origin in enumerate(origins) if origin in by_layer}


def renumbered(indexes: Sequence[int], origins: Sequence[int]) -> list[int]:
    """The new numbers of the layers that `indexes` names."""
    return [new for new, origin in enumerate(origins) if origin in indexes]


def moved_features(
    built: Any, family: Family, tower: Tower, depth: int, origins: Sequence[int], where: str
) -> dict[str, Any]:
    """The new values of the fields that say after which layer of a tower another part of the model reads its stream.

    Raises:
        FamilyError: the layer it reads after is not executed any more.
    """
    moved: dict[str, Any] = {}
    for fields, shift in ((family.features, 0), (family.taps, 1)):
        for field, fed in fields.items():
            value = attrgetter(field)(built) if fed == tower.name else None
            if value is None:
                continue
            many = isinstance(value, (list, tuple))
            places = [feature(index, depth, origins, field, where, shift) for index in (value if many else [value])]
            moved[field] = places if many else places[0]
    return moved


def feature(index: int, depth: int, origins: Sequence[int], field: str, where: str, shift: int = 0) -> int:
    """Where the hidden state `index + shift` is found after a change; a negative index counts from the end.

    Hidden state 0 is the stream before the first layer and -1 the end of the tower, whatever its layers; i is the
    stream after layer i - 1. Of a layer that is executed several times the last execution counts.

    Raises:
        FamilyError: that layer is not executed any more.
    """
    state = index + shift
    if state in (0, -1, -depth - 1):
        return -shift if state != -1 else index
    layer = (state if state > 0 else depth + 1 + state) - 1
    places = [new for new, origin in enumerate(origins) if origin == layer]
    if not places:
        raise FamilyError(
            f"{where}: {field} = {index} reads the stream after layer {layer}, which the program does not execute; "
            "keep it"
        )
    return (places[-1] + 1 if state > 0 else places[-1] - len(origins)) - shift


def is_computed(config: Any, name: str) -> bool:
    """Whether the config class computes the field, under this or its own name, so that it cannot be set."""
    name = getattr(type(config), "attribute_map", {}).get(name, name)
    return isinstance(getattr(type(config), name, None), property)


def select_live(live: Any, original: Any, tower: Tower, origins: Sequence[int]) -> dict[str, list[Any]]:
    """Sets the per-layer lists of a running model's config to those of its visits.

    Args:
        live: the config object that the model reads; a list that its class computes is set through a subclass.
        original: the same config before any change.
        tower: the tower whose visits these are.
        origins: the layer of the original model that each visit runs.

    Returns:
        What was set, by name.
    """
    selected: dict[str, list[Any]] = {}
    for name in (*LISTS, *INDEXES):
        value = None if name in tower.foreign else getattr(original, name, None)
        if isinstance(value, list) and (value or name in INDEXES):
            selected[name] = renumbered(value, origins) if name in INDEXES else [value[origin] for origin in origins]
    computed = {name: value for name, value in selected.items() if is_computed(original, name)}
    for name in selected.keys() - computed.keys():
        setattr(live, name, selected[name])
    if computed:
        # The class attribute, not the instance, is what a computed list is read from.
        base = type(original)
        live.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, **computed})
    for name in SUFFIXES:
        if getattr(original, name, None):
            # Layers know by themselves that they reuse keys and values; the config only takes cache slots away.
            setattr(live, name, 0)
    if getattr(original, "is_heterogeneous", False):
        given = original.to_dict()["per_layer_config"]
        live.per_layer_config = {int(layer): settings for layer, settings in overrides(given, origins).items()}
    return selected


def _renumber_dense(before: dict[str, Any], inner: dict[str, Any], origins: Sequence[int]) -> None:
    """Which layers keep a dense feed-forward, when experts come every n-th layer except listed ones."""
    if "mlp_only_layers" not in before or "mlp_layer_types" in before:
        return
    step, only = before.get("decoder_sparse_step", 1), before["mlp_only_layers"] or []
    dense = [new for new, origin in enumerate(origins) if origin in only or (origin + 1) % step]
    inner["mlp_only_layers"] = dense
    if step != 1:
        inner["decoder_sparse_step"] = 1


def _recount_prefix(before: dict[str, Any], inner: dict[str, Any], origins: Sequence[int], where: str) -> None:
    """The first k layers are dense: still a prefix after the change, or refused."""
    for name in PREFIXES:
        if before.get(name) is None or "mlp_layer_types" in before:
            continue
        dense = [origin < before[name] for origin in origins]
        count = sum(dense)
        if any(dense[count:]):
            kinds = " ".join("dense" if kind else "sparse" for kind in dense)
            raise FamilyError(
                f"{where}: {name} can only state dense layers that come first; the program asks for {kinds}. Keep the "
                "dense layers in front"
            )
        inner[name] = count


def _recount_suffix(
    before: dict[str, Any], inner: dict[str, Any], depth: int, origins: Sequence[int], where: str
) -> None:
    """The last k layers reuse keys and values: still a suffix after the change, or refused."""
    for name in SUFFIXES:
        if not before.get(name):
            continue
        reuse = [origin >= depth - before[name] for origin in origins]
        count = sum(reuse)
        if not all(reuse[len(reuse) - count :]):
            kinds = " ".join("reuse" if kind else "own" for kind in reuse)
            raise FamilyError(
                f"{where}: {name} can only state layers that come last; the program asks for {kinds}. Keep the layers "
                "that reuse keys and values behind the others"
            )
        inner[name] = count


def _solve_periods(before: dict[str, Any], inner: dict[str, Any], origins: Sequence[int], where: str) -> None:
    for period_name, offset_name in PERIODS:
        if before.get(period_name) is None:
            continue
        period, offset = before[period_name], before[offset_name]
        special = [origin % period == offset for origin in origins]
        for candidate in range(1, 2 * len(origins) + 2):
            for start in range(candidate):
                if [index % candidate == start for index in range(len(origins))] == special:
                    inner[period_name], inner[offset_name] = candidate, start
                    break
            else:
                continue
            break
        else:
            marks = "".join("x" if kind else "." for kind in special)
            raise FamilyError(
                f"{where}: {period_name} and {offset_name} can only state a regular pattern; the program asks for "
                f"{marks}. Keep the spacing of those layers regular"
            )


def _refuse_unknown(
    raw: Mapping[str, Any], build: Callable[[dict[str, Any]], Any], tower: Tower, key: str, depth: int, where: str
) -> None:
    """Refuses fields that the config class derives from the depth and that no rule above covers."""
    known = {
        *LISTS,
        *INDEXES,
        *DERIVED,
        *SUPERSEDED,
        *SUFFIXES,
        *OVERRIDES,
        "attention_types",
        tower.depth.rsplit(".", 1)[-1],
        key,
    }
    variants = []
    for count in (depth, depth + 1):
        variant = copy.deepcopy(dict(raw))
        inner = scope(variant, tower)
        inner[key] = count
        for name in (*LISTS, *INDEXES, *DERIVED, "attention_types"):
            if not isinstance(inner.get(name), int):
                inner.pop(name, None)
        if "attention_types" in raw:
            inner["attention_types"] = [[["global"], count]]
        variants.append(scope(build(variant).to_dict(), tower))
    aliases = getattr(type(scope_object(build(copy.deepcopy(dict(raw))), tower)), "attribute_map", {})
    known |= {alias for alias, target in aliases.items() if target in known} | {
        aliases.get(name, name) for name in known
    }
    changed = sorted(
        name for name in variants[0].keys() | variants[1].keys() if variants[0].get(name) != variants[1].get(name)
    )
    unknown = [name for name in changed if name not in known]
    suspicious = [
        name
        for name, value in scope(copy.deepcopy(dict(raw)), tower).items()
        if name not in known and name.endswith(("_layers", "_layer_types", "_per_layer", "layers_block_type"))
        and isinstance(value, list) and len(value) == depth
    ]  # fmt: skip
    for name in (*unknown, *suspicious):
        raise FamilyError(
            f"{where}: the config field {name!r} depends on the depth and deepen does not know how to change it; "
            "the result would be a guess"
        )
