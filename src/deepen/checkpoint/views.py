"""Views of a layer: the same parameters and hooks, with some submodules replaced for one visit.

A layer belongs to all of its visits, so what one visit leaves out or adds is never written to it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deepen.checkpoint.family import Parts
from deepen.sublayers.owned import Lora


class Absent(nn.Module):
    """Stands in for a part that a visit leaves out: adds nothing to the stream."""

    def __init__(self, returns: int) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else kwargs["hidden_states"]
        zeros = torch.zeros_like(stream)
        return (zeros, *(None for _ in range(1, self.returns))) if self.returns > 1 else zeros


def absent(layer: nn.Module, parts: Parts, missing: str) -> dict[str, nn.Module]:
    """What stands in for the parts `missing` of `layer`, by the names of the submodules."""
    names = (name for letter in missing for name in part_modules(layer, parts, letter))
    kinds = {name: type(layer._modules[name]).__name__ for name in names}
    return {name: Absent(parts.returns.get(kind) or _returned(layer, name)) for name, kind in kinds.items()}


def without(layer: nn.Module, parts: Parts, missing: str) -> nn.Module:
    """A view of `layer` whose parts `missing` add nothing."""
    return seen_with(layer, absent(layer, parts, missing))


def seen_with(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """A view of `module`, sharing its parameters, submodules and hooks, with others in the place of some submodules.

    Modes that transformers switches on the module later (training, gradient checkpointing) are read from the module.

    Args:
        module: what is seen.
        replaced: by path; `self_attn.q_proj` also makes a view of `self_attn`.
    """
    modules, deeper = dict(module._modules), dict[str, dict[str, nn.Module]]()
    for path, other in replaced.items():
        name, _, rest = path.partition(".")
        if rest:
            deeper.setdefault(name, {})[rest] = other
        else:
            modules[name] = other
    for name, inside in deeper.items():
        child = modules[name]
        # What is left out as a whole has nothing to replace inside.
        if child is not None and not isinstance(child, Absent):
            modules[name] = seen_with(child, inside)
    return _view(module, _view_class(type(module)), modules)


def adapted(layer: nn.Module, path: str, lora: Lora) -> nn.Module:
    """A view of a linear map inside `layer` that adds what the adapter gives."""
    parent, _, name = path.rpartition(".")
    holder = layer.get_submodule(parent)
    base = holder.get_submodule(name)
    view = _view(base, _adapted_class(type(base)), dict(base._modules))
    # Tuples, so that neither becomes a child of the view. The map is looked up anew in each call: it may be replaced.
    view.__dict__.update(place=(holder, name), lora=(lora,))
    # Hooks belong to the map, which the view calls; shared, they would run twice.
    view.__dict__.update({each: type(hooks)() for each, hooks in base.__dict__.items() if each.endswith("_hooks")})
    return view


def _view(module: nn.Module, kind: type[nn.Module], modules: dict[str, nn.Module | None]) -> nn.Module:
    view = object.__new__(kind)
    state = {name: value for name, value in module.__dict__.items() if name not in MODES}
    # A tuple, so that the whole module does not become a child of its own view.
    view.__dict__.update(state, _modules=modules, whole=(module,))
    return view


class _Adapted(nn.Module):
    """Mixed into the class of a linear map: W x + (alpha / r) B A x."""

    place: tuple[nn.Module, str]
    lora: tuple[Lora]

    @property
    def base(self) -> Any:
        holder, name = self.place
        return holder._modules[name]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.base(x, *args, **kwargs) + self.lora[0](x)

    @property
    def weight(self) -> torch.Tensor:
        """The sum of both, for code that reads the matrix and does not call the map."""
        base, update = self.base, self.lora[0].update()
        return base.weight + (update.T if isinstance(base, Conv1D) else update).to(base.weight.dtype)


MODES = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")


@cache
def _view_class(base: type[nn.Module]) -> type[nn.Module]:
    modes = {name: property(lambda self, name=name: getattr(self.whole[0], name)) for name in MODES}
    return type(base.__name__, (base,), {**modes, "__module__": base.__module__})


@cache
def _adapted_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (_Adapted, _view_class(base)), {"__module__": base.__module__})


def part_modules(layer: nn.Module, parts: Parts, letter: str) -> list[str]:
    """The names of the submodules of `layer` that make up its part `a` or `f`."""
    candidates = [names.split("+") for names in (parts.mixer if letter == "a" else parts.feed_forward)]
    return next(names for names in candidates if all(name in layer._modules for name in names))


def _returned(layer: nn.Module, name: str) -> int:
    """How many values the part `name` of a layer returns: as many as the layer unpacks, else as it is annotated."""
    for node in ast.walk(_tree(type(layer))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and _calls(node.value, name):
            return len(node.targets[0].elts)
    part = type(layer.get_submodule(name))
    annotation = inspect.signature(part.forward).return_annotation
    if annotation is not inspect.Signature.empty:
        return 2 if str(annotation).startswith(("tuple", "typing.Tuple", "Tuple")) else 1
    returns = [node.value for node in ast.walk(_tree(part)) if isinstance(node, ast.Return)]
    return max(len(value.elts) if isinstance(value, ast.Tuple) else 1 for value in returns)


def _calls(node: ast.expr, name: str) -> bool:
    """Whether an expression is `self.name(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


@cache
def _tree(kind: type[nn.Module]) -> ast.Module:
    """The syntax tree of a forward, without its decorators."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
