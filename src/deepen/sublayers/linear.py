"""A linear map with the adapter that a visit gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepen.sublayers.contract import Context


def linear(parent: nn.Module, name: str, x: torch.Tensor, context: Context, rows: slice | None = None) -> torch.Tensor:
    """The map `name` of a sublayer on x: (..., in), with the visit's LoRA; `rows` takes some of its outputs alone."""
    map_: Any = parent._modules[name]
    adapter = context.adapters.get(name)
    if rows is None:
        # a plain map without hooks is called as the function that it is
        plain = type(map_) is nn.Linear and not map_._forward_hooks and not map_._forward_pre_hooks
        y = F.linear(x, map_.weight, map_.bias) if plain else map_(x)
        return y if adapter is None else y + adapter(x)
    if type(map_) is nn.Linear:
        y = F.linear(x, map_.weight[rows], None if map_.bias is None else map_.bias[rows])
    else:
        # something stands in its place, such as an adapter of PEFT
        y = map_(x)[..., rows]
    return y if adapter is None else y + adapter(x, rows)
