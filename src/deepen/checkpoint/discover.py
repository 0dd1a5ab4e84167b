"""Finds the layer lists of a model type that is not in the table, by building its config at two depths.

What grows by one layer when a config field grows by one is a tower. Parts and output matrices cannot be found that way,
so a discovered family runs whole layers only. It is a candidate: `check` then examines it like any other.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deepen.checkpoint.depth_fields import LISTS
from deepen.checkpoint.examine import Verdict, examine
from deepen.checkpoint.families.shapes import TINY
from deepen.checkpoint.family import FAMILIES, REFUSED, Family, Parts, Tower, known_families
from deepen.checkpoint.load import quiet
from deepen.checkpoint.reference import STEPPED
from deepen.checkpoint.skeleton import model_class
from deepen.errors import DeepenError, FamilyError, nearest

# Fields that state a number of layers, as config classes call them.
DEPTH_NAMES = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
)
# Sizes that make a model tiny, where its config has them; the table's tiny configs use the common ones.
SMALL: Mapping[str, Any] = {
    **TINY,
    "d_model": 32,
    "n_embd": 32,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "d_ff": 48,
    "d_kv": 8,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "embedding_size": 32,
}
# Sizes that some classes derive from others, and the fewest changes that leave a model small enough to try.
DERIVED_SIZES = ("head_dim", "num_key_value_heads", "embedding_size", "max_position_embeddings")
FEW_WORDS: Mapping[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL_DEPTH = 4
# Parameters of the largest model that is tried.
LARGEST = 10_000_000
UNKNOWN = Parts(kind="whole", outputs={}, reason="its family is not in the table, so its parts are not known")


@dataclass(frozen=True)
class Report:
    """What became of a model type.

    Attributes:
        model_type: as in config.json.
        outcome: `right` (every operation is right or refused), `refused` (deepen will not open it) or `not buildable`.
        reason: why it was refused or cannot be built.
        verdicts: one an operation and tower, where it was examined.
        table: whether the family is in the table.
    """

    model_type: str
    outcome: Literal["right", "refused", "not buildable"]
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    table: bool = False


class NotBuildable(DeepenError):
    """A tiny model of the type cannot be made here."""


def check(model_type: str, folder: Path) -> Report:
    """Builds a tiny model of any installed model type and examines it.

    Args:
        model_type: such as `llama`; it need not be in the table.
        folder: an empty folder.

    Raises:
        FamilyError: transformers does not know the type.
    """
    if model_type not in CONFIG_MAPPING:
        raise FamilyError(f"transformers has no model type {model_type!r}{nearest(model_type, CONFIG_MAPPING.keys())}")
    known = known_families().get(model_type)
    if reason := REFUSED.get(model_type):
        return Report(model_type, "refused", reason)
    try:
        with quiet():
            family = known or discover(model_type)
            _check_size(family)
    except NotBuildable as error:
        return Report(model_type, "not buildable", str(error))
    except DeepenError as error:
        return Report(model_type, "refused", str(error))
    try:
        with trial(family):
            verdicts = tuple(examine(model_type, folder))
    except DeepenError as error:
        return Report(model_type, "refused", str(error), table=known is not None)
    except Exception as error:  # what a foreign model raises on inputs made here is unforeseeable
        return Report(
            model_type, "not buildable", f"the tiny model does not run: {brief(error)}", table=known is not None
        )
    wrong = [verdict for verdict in verdicts if verdict.outcome == "wrong"]
    if wrong:
        first = wrong[0]
        reason = f"{first.tower}, {first.operation}: {first.detail}; what would be needed is an entry in the table"
        return Report(model_type, "refused", reason, verdicts, known is not None)
    refused = next((verdict for verdict in verdicts if verdict.operation == "identity"), None)
    if refused is not None and refused.outcome == "refused":
        return Report(model_type, "refused", refused.detail, verdicts, known is not None)
    return Report(model_type, "right", "", verdicts, known is not None)


def _check_size(family: Family) -> None:
    size = sum(parameter.numel() for parameter in _meta_model(family.model_type, family.tiny).parameters())
    if size > LARGEST:
        raise NotBuildable(f"no small model of it can be made: with few layers it has {size:,} parameters")


@contextmanager
def trial(family: Family) -> Iterator[None]:
    """The family in the table for a while, unless it is there already."""
    new = family.model_type not in FAMILIES
    if new:
        FAMILIES[family.model_type] = family
    try:
        yield
    finally:
        if new:
            del FAMILIES[family.model_type]


def discover(model_type: str) -> Family:
    """The family as far as it can be found without the table.

    Raises:
        NotBuildable: no tiny model can be built.
        FamilyError: no config field grows one list of layers.
    """
    tiny, base = smallest(model_type)
    towers: dict[str, Tower] = {}
    forward = inspect.signature(type(_meta_model(model_type, tiny)).forward).parameters
    steps = any(name in forward for name in STEPPED)
    for path in depth_paths(model_type, tiny):
        try:
            grown = _lists(model_type, _with(tiny, path, SMALL_DEPTH + 1))
        except NotBuildable:
            continue
        longer = [name for name, length in grown.items() if length == base.get(name, length) + 1]
        outer = [name for name in longer if not any(name.startswith(other + ".") for other in grown if other != name)]
        if len(outer) == 1 and base[outer[0]] == SMALL_DEPTH and outer[0] not in towers:
            towers[outer[0]] = _tower(path, outer[0], model_type, steps)
    if not towers:
        seen = ", ".join(f"{name} ({length})" for name, length in base.items()) or "none"
        raise FamilyError(
            f"no config field of {model_type} grows exactly one list of layers by one; lists seen: {seen}. A uniform "
            "list of layers would be needed"
        )
    return Family(model_type=model_type, towers=tuple(_named_apart(towers.values())), tiny=tiny)


def _named_apart(towers: Iterable[Tower]) -> Iterator[Tower]:
    """Towers that would share a name are called after the module that holds them, or after their whole path."""
    towers = tuple(towers)
    names = [tower.name for tower in towers]
    taken = {name for name in names if names.count(name) == 1}
    holders = [tower.container.split(".")[0] for tower in towers]
    for tower, holder in zip(towers, holders, strict=True):
        if tower.name in taken:
            yield tower
        else:
            free = holders.count(holder) == 1 and holder not in taken
            yield replace(tower, name=holder if free else tower.container.replace(".", "_"))


def smallest(model_type: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Config values with which a small model can be built, and its layer lists; the smallest that the class accepts.

    Raises:
        NotBuildable: none can; the reason is that of the smallest.
    """
    reasons = []
    for sizes in (SMALL, {name: size for name, size in SMALL.items() if name not in DERIVED_SIZES}, FEW_WORDS, {}):
        try:
            values = small_values(model_type, sizes)
            return values, _lists(model_type, values)
        except NotBuildable as error:
            reasons.append(error)
    raise reasons[0]


def small_values(model_type: str, sizes: Mapping[str, Any] = SMALL) -> dict[str, Any]:
    """Config values that make the type small: nested configs keep to their own fields."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as error:  # every config class has its own complaints
        raise NotBuildable(f"its config cannot be made without values: {brief(error)}") from error
    values = _shrunk(config, sizes)
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            values[name] = {**_shrunk(inner, sizes), "model_type": inner.model_type}
    return values


def _shrunk(config: PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    fields = config.to_dict()
    values = {name: value for name, value in sizes.items() if isinstance(fields.get(name), int)}
    for name in DEPTH_NAMES:
        if isinstance(fields.get(name), int):
            values[name] = SMALL_DEPTH
    # Lists of a length that no longer holds are left to the class.
    values |= {name: None for name in LISTS if isinstance(fields.get(name), list) and fields[name]}
    return values


def depth_paths(model_type: str, tiny: Mapping[str, Any]) -> list[str]:
    """Dotted config fields that may state a depth."""
    paths = []
    for name, value in tiny.items():
        if name in DEPTH_NAMES:
            paths.append(name)
        elif isinstance(value, dict):
            paths += [f"{name}.{inner}" for inner in value if inner in DEPTH_NAMES]
    return paths


def _with(values: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
    changed = copy.deepcopy(dict(values))
    *scopes, leaf = path.split(".")
    inner = changed
    for name in scopes:
        inner = inner[name]
    inner[leaf] = depth
    return changed


def _lists(model_type: str, values: Mapping[str, Any]) -> dict[str, int]:
    """The layer lists of the type at these values, by module path."""
    model = _meta_model(model_type, values)
    return {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}


def _meta_model(model_type: str, values: Mapping[str, Any]) -> nn.Module:
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = CONFIG_MAPPING[model_type](**copy.deepcopy(dict(values)))
            return model_class({}, config, model_type)(config)
    except Exception as error:  # every model class has its own complaints
        raise NotBuildable(f"a tiny model cannot be built: {brief(error)}") from error


def _tower(path: str, container: str, model_type: str, steps: bool) -> Tower:
    """A tower named after what its config or its module path says."""
    words = f"{path}.{container}"
    kinds = ("vision", "audio", "encoder", "decoder", "text")
    name = next((kind for kind in kinds if kind in words.lower()), None) or "text"
    config = CONFIG_MAPPING[model_type]
    causal = steps and name in ("text", "decoder") and "vision" not in words
    name = "text" if name == "decoder" and not getattr(config(), "is_encoder_decoder", False) else name
    return Tower(name=name, container=container, depth=path, caches=causal, parts=UNKNOWN)


def brief(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
