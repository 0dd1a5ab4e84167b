"""The model class of a checkpoint, built without weights, to check every claim against.

Nothing is believed from a table alone: the layer list must be where the family says, as long as the config says, and
after a change of config each layer that the class builds must have the parameters and the settings (window, kind,
rotary switch ...) of the layer it stands for. What differs is refused by name.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
)

from deepen.checkpoint.depth_fields import LISTS, stated_depth
from deepen.checkpoint.family import Family, Tower
from deepen.errors import CheckpointError, FamilyError

# Attributes that number a layer; they may differ between a layer and the one it stands for. BigBird numbers by seed.
INDEX_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_number", "layer_num", "block_idx", "seed"})


# Fields that any config.json may have and no config class lists.
COMMON_FIELDS = frozenset(
    {"auto_map", "torch_dtype", "dtype", "quantization_config", "program", "transformers_weights"}
)


def build_config(raw: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """A transformers config from config.json.

    Raises:
        CheckpointError: transformers refuses the values.
        FamilyError: the config needs code of its own, which is never run.
    """
    model_type = str(raw.get("model_type"))
    if "auto_map" in raw and model_type not in CONFIG_MAPPING:
        raise FamilyError(
            f"{where}: the model needs code from its own repository (auto_map); deepen never runs such code"
        )
    if model_type not in CONFIG_MAPPING:
        raise FamilyError(
            f"{where}: transformers {transformers.__version__} does not know the model type {model_type!r}; install a "
            "version that does"
        )
    refuse_newer(raw, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CONFIG_MAPPING[model_type].from_dict(
                PreTrainedConfig._decode_special_floats(copy.deepcopy(dict(raw)))
            )
    except Exception as error:  # transformers raises many types here; the reason is its message
        raise CheckpointError(f"{where}: transformers refuses config.json: {error}") from error


def refuse_newer(raw: Mapping[str, Any], where: str) -> None:
    """Refuses a config that a newer transformers wrote with fields that the installed one would ignore.

    Raises:
        FamilyError: names the fields and the version that wrote them.
    """
    written = str(raw.get("transformers_version") or "0")
    if _release(written) <= _release(transformers.__version__):
        return
    kind: Any = CONFIG_MAPPING[str(raw["model_type"])]
    known = {*kind.attribute_map, *kind().to_dict(), *vars(PreTrainedConfig()), *COMMON_FIELDS}
    if unknown := sorted(name for name in raw.keys() - known if not name.startswith("_")):
        raise FamilyError(
            f"{where}: config.json was written by transformers {written} and has the fields {', '.join(unknown)}, "
            f"which transformers {transformers.__version__} does not know and would ignore; install {written} or "
            "newer, or remove the fields if they change nothing"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def model_class(raw: Mapping[str, Any], config: PreTrainedConfig, where: str) -> type[PreTrainedModel]:
    """The class named in `architectures`, else the generating or the plain model of the config's type.

    Raises:
        FamilyError: transformers has no such class.
    """
    names = raw.get("architectures") or []
    if names:
        found = getattr(transformers, names[0], None) or _registered(names[0], config)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
        raise FamilyError(
            f"{where}: transformers {transformers.__version__} has no class {names[0]!r} (architectures in config.json)"
        )
    generating = (
        (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
        if config.is_encoder_decoder
        else (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    )
    for mapping in (*generating, MODEL_MAPPING):
        found: Any = mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    # Towers of a model have classes of their own that no mapping lists.
    for found in vars(import_module(type(config).__module__.replace(".configuration_", ".modeling_"))).values():
        model = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config)
        if model and not found.__name__.endswith("PreTrainedModel"):
            return found
    raise FamilyError(f"{where}: config.json names no architecture and {type(config).__name__} has no default one")


def _registered(name: str, config: PreTrainedConfig) -> Any:
    """A class of this name that a program registered for its own config."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    classes = [mapping.get(type(config), None) for mapping in mappings]
    return next((found for found in classes if getattr(found, "__name__", "") == name), None)


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model class on the meta device, with its towers located."""

    family: Family
    raw: Mapping[str, Any]
    where: str

    @cached_property
    def config(self) -> PreTrainedConfig:
        return build_config(self.raw, self.where)

    @cached_property
    def model_class(self) -> type[PreTrainedModel]:
        return model_class(self.raw, self.config, self.where)

    @cached_property
    def model(self) -> PreTrainedModel:
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.model_class(copy.deepcopy(self.config))
        except FamilyError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.where}: {self.model_class.__name__} cannot be built from config.json: {error}"
            ) from error

    def container(self, tower: Tower) -> str:
        """The module path of the tower's layer list.

        Raises:
            FamilyError: there is none, or more than one, or it is not as long as the config says.
        """
        return locate(self.model, tower, self.depth(tower), self.where)

    def layers(self, tower: Tower) -> nn.ModuleList:
        found = self.model.get_submodule(self.container(tower))
        assert isinstance(found, nn.ModuleList)
        return found

    def depth(self, tower: Tower) -> int:
        return stated_depth(self.config, self.raw, tower, self.where)[1]


def locate(model: nn.Module, tower: Tower, depth: int, where: str) -> str:
    """The one ModuleList of `model` whose path ends with the tower's container and whose length is `depth`."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    ends = [name for name in lists if name == tower.container or name.endswith("." + tower.container)]
    found = [name for name in ends if not any(name.startswith(other + ".") for other in lists)]
    if len(found) != 1:
        raise FamilyError(
            f"{where}: {type(model).__name__} has {len(found)} layer lists named {tower.container!r} for its "
            f"{tower.name} tower; expected one. Seen: {', '.join(lists) or 'no lists'}"
        )
    if lists[found[0]] != depth:
        raise FamilyError(
            f"{where}: {found[0]} has {lists[found[0]]} layers where config.json says {depth}; the class repeats or "
            "omits layers by itself, which deepen does not support for this family"
        )
    return found[0]


def settings(layer: nn.Module) -> dict[str, Any]:
    """Every plain setting of a layer and its submodules, and the shape of every tensor it owns."""
    found: dict[str, Any] = {}
    for path, module in layer.named_modules():
        found[path] = type(module).__name__
        for name, value in vars(module).items():
            # A per-layer list kept whole says nothing of one layer; what a layer takes from it is a setting of its own.
            kept_whole = name in LISTS and isinstance(value, (list, tuple))
            if name not in INDEX_ATTRIBUTES and not kept_whole and not name.startswith("_"):
                if isinstance(value, (bool, int, float, str, type(None))):
                    found[f"{path}.{name}".lstrip(".")] = value
                elif isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value):
                    found[f"{path}.{name}".lstrip(".")] = tuple(value)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        found[name] = tuple(tensor.shape)
    return found


def same_layers(old: Skeleton, new: Skeleton, tower: Tower, origins: Sequence[int]) -> None:
    """Checks that layer j built from the new config is, but for its number, layer origins[j] of the old one.

    Raises:
        FamilyError: a setting, a submodule or a shape differs: the config cannot express the result.
    """
    before, after = old.layers(tower), new.layers(tower)
    known = [settings(layer) for layer in before]
    special = {name.rsplit(".", 1)[0] for name in tower.first}
    flags = {path.rsplit(".", 1)[0] + ".has_relative_attention_bias" for path in special}
    for index, origin in enumerate(origins):
        built = settings(after[index])
        for name in sorted(built.keys() | known[origin].keys()):
            if name in flags or any(name.startswith(path) for path in special):
                continue
            if built.get(name) != known[origin].get(name):
                raise FamilyError(
                    f"{old.where}: a plain {old.family.model_type} config builds layer {index} with {name} = "
                    f"{built.get(name)!r} where layer {origin} of the original has {known[origin].get(name)!r}; this "
                    "family cannot express the program as a plain checkpoint"
                )
