"""What goes into a sublayer and what comes out of it.

read = wiring.read(state, site)        Read: what the sublayer sees
out  = sublayer(norm(read), context)   Out: what it computes
wiring.write(state, site, read, out)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from deepen.program.site import Site
from deepen.sublayers.owned import Lora


class Read(NamedTuple):
    """What a wiring hands to a sublayer.

    Attributes:
        u: (B, T, D), the input; of an attention with `k` and `v`, the input of its queries alone.
        k: (B, T, D), the input of the keys where that is another one.
        v: (B, T, D), the input of the values where that is another one.
        carry: what the wiring wants back when the sublayer's output is written.
    """

    u: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    carry: Any = None


class Out(NamedTuple):
    """What a sublayer computes.

    Attributes:
        y: (B, T, D).
        losses: scalars to add to the training loss, by name; in training alone.
        stats: what the sublayer did, by name, such as the share of the tokens that each expert got; without gradients.
    """

    y: torch.Tensor
    losses: Mapping[str, torch.Tensor] = {}
    stats: Mapping[str, torch.Tensor] = {}


class Beside(NamedTuple):
    """Keys and values that a token has for itself alone, in one softmax with those of the sequence.

    Attributes:
        keys: of each source, (B, T, KV heads, head width), before their norm; they are never rotated.
        values: of each source, as many.
        rotary: whether the queries that meet them are rotated.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    rotary: bool


class Slot(Protocol):
    """Keys and values of the tokens so far, each (B, KV heads, S, head width)."""

    writes: bool

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes those of the new tokens; returns those of all."""
        ...

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all tokens, the new ones included, written by another visit."""
        ...


# The attention mask for a window (None: no window): a boolean mask, and whether the plain causal kernel is right.
Masks = Callable[[int | None], tuple[torch.Tensor | None, bool]]
# What a wiring makes of the queries, keys and values of a site, before rotary positions: (B, T, heads, head width).
OnKeys = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Context(NamedTuple):
    """Where and when a sublayer runs.

    Attributes:
        site: the part and visit; for telemetry, never to be computed with.
        rotary: cos and sin, each (T, head width) or (B, T, 1, head width); None without rotary positions.
        masks: the mask for a window.
        slot: keys and values of earlier tokens or of an earlier visit; None where nothing is kept.
        adapters: LoRA of the visit, by the name of the linear map in the sublayer.
        tokens: (B, T), the token ids.
        on_keys: the wiring's hook on queries, keys and values, or None.
        beside: keys and values that each token has of its own, or None.
        valid: (B, T), which tokens are no padding; None when all are. For statistics over tokens.
    """

    site: Site
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    masks: Masks
    slot: Slot | None
    adapters: Mapping[str, Lora]
    tokens: torch.Tensor | None
    on_keys: OnKeys | None = None
    beside: Beside | None = None
    valid: torch.Tensor | None = None


class Sublayer(Protocol):
    """A mixer or a feed-forward."""

    def __call__(self, read: Read, context: Context) -> Out: ...
