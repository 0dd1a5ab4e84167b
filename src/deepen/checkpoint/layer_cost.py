"""What each layer of a real model costs, read from the class that its config builds and from the files.

Parameters are what is stored: a layer counts in full as soon as one part of it is visited. FLOPs are those of the
linear maps (a mixture of experts by its active experts) plus attention by the keys that a query sees. Cache bytes come
from the caches that the model itself fills, on the meta device: no formula can disagree with it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributions import Distribution
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.pytorch_utils import Conv1D

from deepen.checkpoint.experts import used_shares
from deepen.checkpoint.factored import Factored
from deepen.checkpoint.family import Tower
from deepen.checkpoint.owned import owned_names, owned_recipes, stream_width
from deepen.checkpoint.owned_maps import feed_forward_names, part_maps
from deepen.checkpoint.slabs import slab_of
from deepen.checkpoint.sources import TensorInfo
from deepen.checkpoint.widths import bank_modules, sizes
from deepen.program.cost import Cost, Ends, LayerCost, cost

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

LINEAR = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)
PROBE_TOKENS = 2


def checkpoint_cost(ck: Checkpoint, context: int) -> Cost:
    """See `Checkpoint.cost`."""
    total: Cost | None = None
    for tower in ck.family.towers:
        found = tower_cost(ck, tower, context)
        total = found if total is None else _add(total, found)
    assert total is not None
    owned = {full for disk in ck.disk.values() for layer in disk.layers for full in layer.values()}
    for tower in ck.family.towers:
        owned.update((*ck.disk[tower.name].ahead, *owned_names(ck, tower)))
    outside = ck.source.infos.keys() - owned
    buffers = {name for name, _ in ck.skeleton.model.named_buffers()}
    params = total.params + sum(
        ck.source.infos[name].numel * kept_share(ck, name) for name in outside if name not in buffers
    )
    return replace(total, params=int(params), flops=total.flops + _end_flops(ck))


def kept_share(ck: Checkpoint, name: str) -> Fraction:
    """The share of a tensor outside the layers that the program keeps: of a slab, the blocks of its layers."""
    for tower in ck.family.towers:
        if slab_of(tower, name) is not None:
            return Fraction(len(ck.plan(tower.name).keys), ck.depth[tower.name])
    return Fraction(1)


def tower_cost(ck: Checkpoint, tower: Tower, context: int) -> Cost:
    """The cost of one tower without the ends (embeddings, heads)."""
    plan = ck.plan(tower.name)
    layers = layer_costs(ck, tower)
    found = cost(plan, layers, Ends(params=0, flops=0.0), context)
    disk = ck.disk[tower.name]
    modules = bank_modules(ck, tower)
    stored = sum(
        ck.source.infos[full].numel
        for key in plan.keys
        for name, full in disk.layers[key.layer].items()
        if name not in {buffer for buffer, _ in modules[key.layer].named_buffers()}
    )
    own = sum(prod(recipe.shape) for recipe in owned_recipes(ck, tower).values())
    return replace(found, params=stored + own)


def layer_costs(ck: Checkpoint, tower: Tower) -> list[LayerCost]:
    """One entry per stored layer, in bank order."""
    modules = bank_modules(ck, tower)
    caches = cache_layers(ck, tower) if tower.caches else {}
    return [
        _layer_cost(ck, tower, modules[index], ck.disk[tower.name].layers[index], caches.get(origin, ()))
        for index, origin in enumerate(ck.banks[tower.name])
    ]


@dataclass(frozen=True)
class SlotBytes:
    """Bytes that one slot holds: `fixed` always, `per_token` for each of at most `window` tokens."""

    fixed: float
    per_token: float
    window: int | None

    def __call__(self, context: int) -> float:
        tokens = context if self.window is None else min(context, self.window)
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class Keys:
    """Keys that a query sees, itself included, at a context."""

    window: int | None

    def __call__(self, context: int) -> float:
        return context if self.window is None else min(context, self.window)


def _layer_cost(
    ck: Checkpoint, tower: Tower, layer: nn.Module, names: Mapping[str, str], caches: tuple[Any, ...]
) -> LayerCost:
    parts = tower.parts
    feed_forward = feed_forward_names(layer, parts)
    params = dict.fromkeys(parts.letters, 0)
    for name, full in names.items():
        letter = "f" if name.split(".")[0] in feed_forward and "f" in params else "a"
        params[letter] += ck.source.infos[full].numel
    flops = dict.fromkeys(parts.letters, 0.0)
    linears = {letter: [sizes(each) for each in part_maps(layer, parts, letter).values()] for letter in parts.letters}
    shares = {id(each): share for each, share in used_shares(layer)}
    for path, module in layer.named_modules():
        letter = "f" if path.split(".")[0] in feed_forward else "a"
        if isinstance(module, LINEAR):
            flops[letter] += float(2 * module.weight.numel() * shares.get(id(module), 1))
        flops[letter] += 2.0 * _active_expert_values(module, ck)
    window, per_key = _window(caches), _flops_per_key(layer, tower, ck)
    return LayerCost(
        params=params,
        flops=flops,
        flops_per_key=per_key,
        cache=_slot_bytes(caches, _value_bytes(ck)),
        keys=Keys(window + 1 if window is not None else None),
        linears=linears,
        width=stream_width(ck, tower),
    )


def _active_expert_values(module: nn.Module, ck: Checkpoint) -> float:
    """Values of stacked expert matrices [experts, out, in] that one token uses."""
    stacked = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.ndim == 3]
    if not stacked or isinstance(module, LINEAR):
        return 0.0
    experts = stacked[0].shape[0]
    active = getattr(ck.skeleton.config.get_text_config(), "num_experts_per_tok", experts) or experts
    return sum(parameter.numel() for parameter in stacked) * min(active, experts) / experts


def _flops_per_key(layer: nn.Module, tower: Tower, ck: Checkpoint) -> float:
    """2 (q.k) + 2 (weights.v) for every head and its size; 0 for a recurrent mixer."""
    heads = [
        module
        for module in layer.modules()
        if any(hasattr(module, name) for name in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim"))
        and any(isinstance(child, (*LINEAR, Factored)) for child in module.children())
        and not hasattr(module, "A_log")
    ]
    total = 0.0
    for module in heads:
        size = next(
            getattr(module, name)
            for name in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
            if hasattr(module, name)
        )
        names = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads")
        count = next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)
        if count is None:
            count = getattr(ck.skeleton.config.get_text_config(), "num_attention_heads", 0)
        keys = getattr(module, "qk_head_dim", size)
        values = getattr(module, "v_head_dim", size)
        if isinstance(size, int) and isinstance(count, int):
            total += 2.0 * count * (keys + values)
    return total


def cache_layers(ck: Checkpoint, tower: Tower) -> dict[int, tuple[Any, ...]]:
    """The cache layers that the model fills for each of its layers, from a pass of two tokens on the meta device."""
    from deepen.checkpoint.tiny import tiny_inputs

    config = copy.deepcopy(ck.skeleton.config)
    # The variants that look at no values, since the meta device has none.
    config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
    with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(), _unvalidated():
        warnings.simplefilter("ignore")
        model = ck.skeleton.model_class(config).eval()
        inputs = {name: value.to("meta") for name, value in tiny_inputs(model, tokens=PROBE_TOKENS, batch=1).items()}
        out = model(**inputs, use_cache=True)
    found = getattr(out, "cache", None) or getattr(out, "past_key_values", None) or getattr(out, "cache_params", None)
    if isinstance(found, EncoderDecoderCache):
        pairs = zip(found.self_attention_cache.layers, found.cross_attention_cache.layers, strict=True)
        return dict(enumerate(pairs))
    assert isinstance(found, Cache)
    return {index: (layer,) for index, layer in enumerate(found.layers)}


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Distributions (Gemma 3n has one) that do not look at their arguments: the meta device has no values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _window(caches: tuple[Any, ...]) -> int | None:
    """Tokens that a sliding cache layer keeps between calls; None without a window."""
    for layer in caches:
        if getattr(layer, "is_sliding", False):
            return layer.sliding_window - 1
    return None


def _slot_bytes(caches: tuple[Any, ...], value_bytes: int) -> SlotBytes:
    fixed = per_token = 0.0
    for layer in caches:
        if isinstance(layer, CacheLayerMixin):
            for tensor in (layer.keys, layer.values):
                if tensor is not None and tensor.ndim == 4:
                    per_token += prod(tensor.shape) // tensor.shape[2] * value_bytes
        for name in ("conv_states", "recurrent_states"):
            for tensor in (getattr(layer, name, None) or {}).values():
                if tensor is not None:
                    fixed += tensor.numel() * value_bytes
    return SlotBytes(fixed, per_token, _window(caches))


def _value_bytes(ck: Checkpoint) -> int:
    """Bytes of one cached value: the dtype of the weights."""
    floating = [item.dtype for item in ck.source.infos.values() if item.dtype in ("F64", "F32", "F16", "BF16")]
    return TensorInfo(floating[0], (1,)).nbytes if floating else 2


def _end_flops(ck: Checkpoint) -> float:
    """FLOPs a token of the linear maps outside the towers, the head above all."""
    containers = [ck.skeleton.container(tower) + "." for tower in ck.family.towers]
    return sum(
        2.0 * module.weight.numel() * float(kept_share(ck, f"{name}.weight"))
        for name, module in ck.skeleton.model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not any(name.startswith(prefix) for prefix in containers)
    )


def _add(one: Cost, two: Cost) -> Cost:
    return replace(
        one,
        params=one.params + two.params,
        layers=Fraction(one.layers + two.layers),
        path=one.path + two.path,
        flops=one.flops + two.flops,
        slots=one.slots + two.slots,
        cache_bytes=one.cache_bytes + two.cache_bytes,
        visits=one.visits + two.visits,
    )
