"""The paths that a gradient takes from an output to each layer, read from the graph that torch recorded.

    paths = gradient_paths(stage, stage(x))           an ELAN stage of three stacks
    paths["stacks.1.1.conv"]                          Paths(2, 4, 2, ("merge.conv", "stacks.2.0.conv"))

A layer is a matrix or a kernel that is applied. The length of a path is the number of layers on it, the one it ends at
included. `sources` are the layers that hand their gradient to it without another layer between. Where a layer is
applied more than once, its paths are those of all its applications.

The measures of Wang et al., Designing Network Design Strategies Through Gradient Path Analysis, arXiv:2211.04800.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepen.errors import UsageError

OUTPUT = "output"


@dataclass(frozen=True)
class Paths:
    """From the output to one layer.

    Attributes:
        shortest: layers on the shortest path.
        longest: layers on the longest path.
        count: how many paths there are.
        sources: layers next to it on the way to the output, or `output`.
    """

    shortest: int
    longest: int
    count: int
    sources: tuple[str, ...]

    def __or__(self, other: Paths) -> Paths:
        sources = tuple(sorted({*self.sources, *other.sources}))
        return Paths(
            min(self.shortest, other.shortest), max(self.longest, other.longest), self.count + other.count, sources
        )


def gradient_paths(model: nn.Module, output: torch.Tensor, **inputs: torch.Tensor) -> dict[str, Paths]:
    """The paths to each layer of a model, by the name of its module, and to inputs that want a gradient, by theirs.

    Raises:
        UsageError: the output has no graph.
    """
    if output.grad_fn is None:
        raise UsageError("the output has no graph; compute it with gradients enabled")
    names = {id(each): name.removesuffix(".weight") for name, each in model.named_parameters() if each.ndim > 1}
    ends = {id(each): name for name, each in inputs.items()}
    found: dict[str, Paths] = {}
    reached = {output.grad_fn: Paths(0, 0, 1, (OUTPUT,))}
    for node in _ordered(output.grad_fn):
        paths = reached.pop(node)
        variable = id(getattr(node, "variable", None))
        if variable in ends:
            found[ends[variable]] = paths
        for name in (names[each] for each in _weights(node) if each in names):
            found[name] = found[name] | _with(paths, paths.sources) if name in found else _with(paths, paths.sources)
            paths = _with(paths, (name,))
        for next_, _ in node.next_functions:
            if next_ is not None:
                reached[next_] = reached[next_] | paths if next_ in reached else paths
    return found


def _with(paths: Paths, sources: tuple[str, ...]) -> Paths:
    """One layer longer."""
    return Paths(paths.shortest + 1, paths.longest + 1, paths.count, sources)


def _weights(node: Any) -> list[int]:
    """The ids of the variables that a node applies, transposed or not; a transposition alone applies nothing."""
    found: list[int] = []
    if node.name() == "TBackward0":
        return found
    for next_, _ in node.next_functions:
        while next_ is not None and next_.name() == "TBackward0":
            next_ = next_.next_functions[0][0]
        if next_ is not None and hasattr(next_, "variable"):
            found.append(id(next_.variable))
    return found


def _ordered(root: Any) -> list[Any]:
    """All nodes below one, each after all that lead to it."""
    finished: list[Any] = []
    seen, stack = {root}, [(root, iter(root.next_functions))]
    while stack:
        node, rest = stack[-1]
        for next_, _ in rest:
            if next_ is not None and next_ not in seen:
                seen.add(next_)
                stack.append((next_, iter(next_.next_functions)))
                break
        else:
            finished.append(node)
            stack.pop()
    return finished[::-1]
