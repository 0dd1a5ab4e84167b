"""Initial values of the matrices that a branch is proportional to: values, attention output and feed-forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepen.sublayers.mixer.attention import Attention
from deepen.wiring.base import Shape


def multiply_branches(layers: Iterable[nn.Module], shape: Shape, factor: float) -> None:
    """Multiplies the matrices of each layer that its output is proportional to; queries and keys stay as they are."""
    values = (shape.heads + shape.kv_heads) * shape.head_width
    with torch.no_grad():
        for layer in layers:
            attention: Any = layer.get_submodule("a.sublayer")
            # a mixer without values is proportional to its output matrix alone
            if isinstance(attention, Attention):
                attention.qkv.weight[values:] *= factor
            attention.out.weight *= factor
            feed_forward: Any = layer.get_submodule("f.sublayer")
            for matrix in feed_forward.matrices():
                matrix.mul_(factor)
