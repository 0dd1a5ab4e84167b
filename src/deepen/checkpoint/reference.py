"""The reference that deepen is compared with: the original model with its layers copied out by hand.

Written without deepen's runtime: every layer is deep-copied into a longer or shorter plain list, numbered anew, and the
per-layer lists of the config are selected. Nothing is shared, so every visit has its own parameters and cache entry.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Config lists with one entry a layer, stated here once more so that a slip in the table is seen.
LISTS = (
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
    "attention_layers",
    "layers_block_type",
    "layer_rope_theta",
    "attention_window",
)
# What a forward may call the cache that it is given back step by step.
STEPPED = ("cache", "past_key_values", "cache_params")
INDEX_NAMES = ("layer_idx", "layer_id", "layer_number")


def container_path(model: nn.Module, ends: str) -> str:
    """The module path of the outermost list whose path ends with `ends`."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return min((name for name in names if name == ends or name.endswith("." + ends)), key=len)


def unrolled(
    model: PreTrainedModel, container: str, order: Sequence[int], depth_names: Sequence[str]
) -> PreTrainedModel:
    """A deep copy of `model` whose list `container` holds copies of the layers `order`."""
    result = copy.deepcopy(model)
    path = container_path(result, container)
    owner_path, _, name = path.rpartition(".")
    owner = result.get_submodule(owner_path)
    old = getattr(owner, name)
    layers = nn.ModuleList(copy.deepcopy(old[index]) for index in order)
    for index, layer in enumerate(layers):
        for module in layer.modules():
            for attribute in INDEX_NAMES:
                if attribute in vars(module):
                    setattr(module, attribute, index)
    _move_relative_bias(old, layers)
    setattr(owner, name, layers)
    config = getattr(owner, "config", result.config)
    aliases = getattr(type(config), "attribute_map", {})
    for key in dict.fromkeys(aliases.get(name, name) for name in LISTS):
        value = getattr(config, key, None)
        if isinstance(value, list) and len(value) == len(old):
            chosen = [value[index] for index in order]
            if isinstance(getattr(type(config), key, None), property):
                config.__class__ = type("Selected", (type(config),), {key: chosen})  # pyright: ignore[reportAttributeAccessIssue]
            else:
                setattr(config, key, chosen)
    for key in depth_names:
        setattr(config, key, len(order))
    _select_blocks(owner, config, len(old), order)
    return result


def _select_blocks(owner: nn.Module, config: Any, depth: int, order: Sequence[int]) -> None:
    """Gemma 3n and 4: per-layer embeddings, the settings of single layers, and a cache entry for every layer."""
    for name, axis in (("embed_tokens_per_layer", 1), ("per_layer_model_projection", 0)):
        if module := getattr(owner, name, None):
            blocks = module.weight.detach().chunk(depth, axis)
            module.weight = nn.Parameter(torch.cat([blocks[index] for index in order], axis))
    if getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = 0
        if hasattr(owner, "first_kv_shared_layer_idx"):
            vars(owner)["first_kv_shared_layer_idx"] = None
    if getattr(config, "is_heterogeneous", False):
        given = {int(layer): settings for layer, settings in config.to_dict()["per_layer_config"].items()}
        config.per_layer_config = {new: given[index] for new, index in enumerate(order) if index in given}


def renumber_reads(model: PreTrainedModel, field: str, depth: int, order: Sequence[int], layers: bool) -> None:
    """Sets a field that says where a stream is read, in the config and in modules that copied it.

    Args:
        model: an unrolled model, changed in place.
        field: dotted config field, a number or a list of numbers.
        depth: layers of the original tower.
        order: the layer of the original that each layer of `model` is.
        layers: whether the field numbers layers: i is the stream after layer i, and not the one before it.
    """
    *scopes, leaf = field.split(".")
    config: Any = model.config
    for name in scopes:
        config = getattr(config, name)
    last = {layer: place for place, layer in enumerate(order)}

    def place(number: int) -> int:
        if layers:
            return last[number]
        return number if number in (0, -1) else last[number % (depth + 1) - 1] + 1

    old = getattr(config, leaf)
    new = [place(number) for number in old] if isinstance(old, (list, tuple)) else place(old)
    for holder in (config, *model.modules()):
        if leaf in vars(holder):
            setattr(holder, leaf, new)


def _move_relative_bias(old: Any, new: Any) -> None:
    """T5, WavLM: the first layer, whichever it is, computes the bias that the others reuse."""
    table = getattr(getattr(old[0], "attention", None), "rel_attn_embed", None)
    if table is not None:
        new[0].attention.rel_attn_embed = copy.deepcopy(table)
    if not hasattr(old[0], "layer"):
        return
    first, other = (next(iter(old[index].layer[0].children())) for index in (0, 1))
    if not getattr(first, "has_relative_attention_bias", False) or other.has_relative_attention_bias:
        return
    for index, block in enumerate(new):
        attention = next(iter(block.layer[0].children()))
        attention.has_relative_attention_bias = index == 0
        for name in ("relative_attention_bias", "global_relative_attention_bias"):
            if index == 0 and hasattr(first, name):
                setattr(attention, name, copy.deepcopy(getattr(first, name)))


def step_by_step(model: PreTrainedModel, inputs: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Logits of a cached pass: all tokens but the last `steps` at once, then one token at a time."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs[name]
    rest = {key: value for key, value in inputs.items() if key != name}
    pieces, cache = [], None
    with torch.no_grad():
        for piece in (ids[:, :-steps], *ids[:, -steps:].split(1, dim=1)):
            # A picture is seen once, with the tokens that stand for it; an encoder's input every time.
            kept = rest if name != "input_ids" else _front(rest, ids.shape, steps) if cache is None else {}
            call = {**kept, name: piece}
            if name == "input_ids" or not getattr(model.config, "use_cache", False):
                # Asked for by name, some models pass it on to an encoder that refuses it.
                call["use_cache"] = True
            if cache is not None:
                call[_cache_name(model)] = cache
            out = model(**call)
            cache = out[_cache_name(model)]
            pieces.append((out.logits if hasattr(out, "logits") else out.last_hidden_state).float())
    return torch.cat(pieces, dim=1)


def _front(inputs: dict[str, torch.Tensor], shape: torch.Size, steps: int) -> dict[str, torch.Tensor]:
    """The inputs without the last tokens, where they have one entry a token."""
    return {name: value[:, :-steps] if value.shape[:2] == shape else value for name, value in inputs.items()}


def _cache_name(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache."""
    names = inspect.signature(type(model).forward).parameters
    return next(name for name in STEPPED if name in names)
