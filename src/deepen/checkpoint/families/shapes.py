"""Shapes that many families share: towers, parts, and the configs of their tiny models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.family import Parts, Tower

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        """torch, imported when an input is made: the table alone is read without it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch()

Names = tuple[str, ...] | str

POST_NORM = "it normalises after the addition, so a part alone is not the layer without the other"
NO_MODULE = "its layer has no feed-forward module, only fc1 and fc2"
ADDS_ITSELF = "its sublayers add the residual themselves"

# What tiny models have in common; windows are 8 tokens, so that they bite on 14.
TINY: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {**TINY, "sliding_window": 8}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 3}
EXPERTS = {**TINY, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def outputs(mixer: Names, feed_forward: Names) -> dict[str, tuple[str, ...]]:
    """The modules that write to the stream, by part."""
    named = {"a": mixer, "f": feed_forward}
    return {letter: (names,) if isinstance(names, str) else names for letter, names in named.items()}


def whole(reason: str, mixer: Names, feed_forward: Names, *, post_norm: bool = False) -> Parts:
    """A layer whose parts cannot be run alone."""
    return Parts(kind="whole", outputs=outputs(mixer, feed_forward), post_norm=post_norm, reason=reason)


def text(container: str = "layers", depth: str = "num_hidden_layers", parts: Parts | None = None, **more: Any) -> Tower:
    """A causal text decoder."""
    return Tower(name="text", container=container, depth=depth, caches=True, parts=parts or Parts(), **more)
