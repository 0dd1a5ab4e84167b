"""What a program means, computed straight from its tree: no plan, no tape, no visit list.

`value` walks the tree as the language is defined (a group adds the updates of its branches, a scale damps an update, a
copy is a clone), calling deep copies of the original layers whose absent part has zero output matrices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from deepen.checkpoint.family import Parts
from deepen.checkpoint.reference import container_path
from deepen.program import Group, Loop, Mark, Node, Ref, Scope, Seq
from deepen.program.tree import value_of


class Meaning(nn.Module):
    """One module that stands for the whole layer list: `layers` are the originals, `tree` the normalised program."""

    def __init__(self, layers: nn.ModuleList, tree: Node, parts: Parts) -> None:
        super().__init__()
        self.tree, self.parts = tree, parts
        self.layers = layers
        self.clones: dict[tuple[int, str | None, bool], nn.Module] = {}

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pair = False

        def run(ref: Ref, x: torch.Tensor) -> torch.Tensor:
            nonlocal pair
            zero = ref.copy is not None and ref.copy.init == "zero"
            out = self.clone(ref.first.resolve(len(self.layers)), ref.parts, zero)(x, *args, **kwargs)
            pair = isinstance(out, tuple)
            return out[0] if pair else out

        result = value(self.tree, hidden_states, run)
        return (result, None) if pair else result

    def clone(self, index: int, part: str | None, zero: bool) -> nn.Module:
        if (index, part, zero) not in self.clones:
            layer = copy.deepcopy(self.layers[index])
            gone = self.parts.letters if zero else "".join(set(self.parts.letters) - set(part or self.parts.letters))
            for letter in gone:
                for path in self.parts.outputs[letter]:
                    for name, parameter in layer.named_parameters():
                        if name == path or name.startswith(path + "."):
                            nn.init.zeros_(parameter)
            self.clones[index, part, zero] = layer
        return self.clones[index, part, zero]


def value(node: Node, x: torch.Tensor, run: Callable[[Ref, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The stream after `node`."""
    match node:
        case Ref():
            return run(node, x)
        case Mark():
            return x
        case Seq(items=items):
            for item in items:
                x = value(item, x, run)
            return x
        case Group(branches=branches):
            updates = [value(branch, x, run) - x for branch in branches]
            total = torch.stack(updates).sum(0)
            return x + (total / len(updates) if value_of(node.attrs, "comb") == "mean" else total)
        case Scope(body=body):
            return x + _scale(node.attrs, 0) * (value(body, x, run) - x)
        case Loop(body=body, high=high):
            for turn in range(high):
                x = x + _scale(node.attrs, turn) * (value(body, x, run) - x)
            return x
    raise AssertionError(node)


def _scale(attrs: Any, turn: int) -> float:
    scales = value_of(attrs, "scale")
    if not isinstance(scales, tuple):
        return 1.0
    return float(scales[turn] if len(scales) > 1 else scales[0])


def with_meaning(model: Any, container: str, tree: Node, parts: Parts, attributes: Mapping[str, int]) -> Any:
    """A copy of `model` whose layer list is the one `Meaning` of the tree."""
    result = copy.deepcopy(model)
    path = container_path(result, container)
    owner_path, _, name = path.rpartition(".")
    owner = result.get_submodule(owner_path)
    setattr(owner, name, nn.ModuleList([Meaning(getattr(owner, name), tree, parts)]))
    for attribute, number in attributes.items():
        setattr(result.config, attribute, number)
    return result
