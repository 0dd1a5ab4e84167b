"""The matrices that blocks can be selected of: linear layers, by layer of the bank, and those of the feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from deepen.checkpoint.visit import VisitList
from deepen.errors import FamilyError, UsageError
from deepen.train.select import layer_prefixes, linears
from deepen.train.selective.block import TURNED

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel


def bank(model: PreTrainedModel, tower: str) -> dict[int, list[str]]:
    """What the names of the parameters of each visited layer begin with, by its number; copies have one each.

    Args:
        model: a model that `Checkpoint.load` gave.
        tower: the tower of the layers.
    """
    found: dict[int, list[str]] = {}
    for path, visits in model.named_modules():
        if isinstance(visits, VisitList) and visits.tower.name == tower:
            for child, key in enumerate(visits.plan.keys):
                found.setdefault(key.layer, []).append(f"{path}.{child}.")
    return found


def require_count(count: int, layers: int) -> None:
    """Refuses to choose more layers than there are.

    Raises:
        UsageError: that, or none.
    """
    if not 1 <= count <= layers:
        raise UsageError(f"--count {count}: expected 1 to {layers}, the layers that the program visits")


def highest(scores: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The layers with the highest scores, in ascending order; of equal ones the lower."""
    return tuple(sorted(sorted(scores, key=lambda layer: (-scores[layer], layer))[:count]))


def matrices(model: PreTrainedModel, tower: str, layers: Sequence[int | str] = ()) -> list[str]:
    """The names of the matrices of these layers' linear layers; of all layers when none is named.

    Raises:
        UsageError: a layer that the program does not visit.
        FamilyError: there is none.
    """
    found = [f"{name}.weight" for name in linears(model, layer_prefixes(model, tower, layers))]
    if not found:
        raise FamilyError(f"these layers of {type(model).__name__} hold no linear matrix; use --mode full or layers")
    return found


def feed_forwards(model: PreTrainedModel, tower: str, layers: Sequence[int | str] = ()) -> list[tuple[list[str], str]]:
    """The matrices of each dense feed-forward: those that read the stream, and the one that writes to it.

    Of two that read the stream, the gate is the first.

    Raises:
        UsageError: a layer that the program does not visit.
        FamilyError: a layer without a dense feed-forward made of linear layers.
    """
    writes = next(
        visits.tower.parts.outputs.get("f", ())
        for visits in model.modules()
        if isinstance(visits, VisitList) and visits.tower.name == tower
    )
    found = []
    for prefix in layer_prefixes(model, tower, layers):
        inside = linears(model, [prefix])
        last = next((n for n in inside if any(fnmatchcase(n, prefix + end) for end in writes)), None)
        near = "" if last is None else last.rpartition(".")[0] + "."
        first = [n for n in inside if n != last and near and n.startswith(near) and "." not in n[len(near) :]]
        if last is None or not first:
            raise FamilyError(
                f"{prefix.rstrip('.')} has no dense feed-forward of linear layers; use --mode layers, which trains all "
                "of a layer"
            )
        first.sort(key=lambda name: "gate" not in name.rpartition(".")[2])
        found.append(([f"{name}.weight" for name in first], f"{last}.weight"))
    return found


def sides(model: nn.Module, name: str) -> tuple[int, int]:
    """The rows (outputs) and columns (inputs) of the matrix of a linear layer."""
    matrix = model.get_parameter(name)
    turned = type(model.get_submodule(name.rpartition(".")[0])).__name__ == TURNED
    rows, columns = matrix.shape[::-1] if turned else matrix.shape
    return rows, columns
