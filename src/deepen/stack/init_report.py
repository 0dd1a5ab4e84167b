"""What initial values a stack should have, and what it has: a row for each matrix.

    expected: the recipe's deviation, times the parametrisation's, times what the wiring changes
    measured: the root of the mean square of the entries

Expected values come from the same code as the real ones, with the deviation itself written where numbers would be
drawn; so whatever a wiring does to initial values is in them. After training, `measured` says how far matrices moved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch

from deepen.stack.init import fill
from deepen.stack.parametrisation import Kind, places
from deepen.stack.stack import Stack


class Initial(NamedTuple):
    """A matrix, or the rows of one.

    Attributes:
        layer: of the bank; None outside of layers.
        name: in the layer, or in the stack; queries, keys and values apart.
        kind: what the parametrisation takes it for.
        expected: standard deviation of the initial values.
        measured: of the values as they are, around 0.
    """

    layer: int | None
    name: str
    kind: Kind
    expected: float
    measured: float


def init_report(stack: Stack) -> list[Initial]:
    """Expected and measured deviations of the embedding, the head and every matrix of every layer.

    Example:
        >>> from deepen.stack.config import StackConfig
        >>> row = init_report(Stack(StackConfig(layers=2, width=64, heads=4)))[0]
        >>> row.name, row.expected
        ('embedding.weight', 0.02)
    """
    twin = copy.deepcopy(stack)
    with torch.random.fork_rng(devices=[]):
        fill(twin, lambda tensor, deviation: tensor.fill_(deviation))
    expected, kinds = dict(twin.named_parameters()), places(stack)
    found: list[Initial] = []
    for name, parameter in stack.named_parameters():
        kind = kinds[name].kind
        if kind not in ("embedding", "matrix", "output", "head"):
            continue
        root, *inside = name.split(".")
        layer = int(inside[0]) if root == "layers" else None
        own = name if layer is None else ".".join(inside[1:])
        for label, rows in _rows(stack, own):
            sizes = (_size(each.detach()[rows]) for each in (expected[name], parameter))
            found.append(Initial(layer, label, kind, *sizes))
    return found


def _rows(stack: Stack, name: str) -> Iterator[tuple[str, slice]]:
    if not name.endswith("qkv.weight"):
        yield name, slice(None)
        return
    config = stack.config
    queries, others = config.heads * config.head, (config.kv_heads or config.heads) * config.head
    ends = (0, queries, queries + others, queries + 2 * others)
    for letter, start, end in zip("qkv", ends, ends[1:], strict=False):
        yield name.replace("qkv", letter), slice(start, end)


def _size(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
