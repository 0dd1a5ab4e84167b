"""Parametrisation: how initial values, factors and learning rates of each parameter follow from width and depth.

    rule(scale).record(place) -> Record: what the recipe, the stack and the optimiser multiply by

A stack reads the factors `forward`, its initial values `init`, and the optimiser the others: `records(stack)`. Three
places have a factor in the forward pass: the norm before a branch, the branch's output matrix, and the head. Depth
counts blocks of two sites, every turn of a loop at its maximum. A factor that depends on the block belongs to a visit;
an initial value or a rate that does is that of the first visit.

The rules are one file each in `deepen.stack.parametrisations`. Factors that a rule says nothing of are 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from deepen.program.site import Site

if TYPE_CHECKING:
    from deepen.stack.stack import Stack

# What a parameter is. `norm`: before a branch; `final`: before the head; `output`: a matrix that writes to the stream;
# `matrix`: any other of a layer; `vector`: all else, what wirings and programs own included.
Kind = Literal["embedding", "norm", "matrix", "output", "vector", "final", "head"]
OUTPUTS = ("out", "down")

# Wirings that a factor of depth would be a second one for, or does nothing in, each with the reason.
WITHOUT_DEPTH: Mapping[str, str] = {
    "deepnorm": "its alpha and beta follow from depth already",
    "deeploop": "its alpha and beta follow from depth already",
    "depth-scaled-sandwich": "its second norm begins at c / sqrt(blocks) already",
    "looped-scaling": "its updates are divided by rounds and the root of the layers already",
    "layer-scale": "its gains begin at a value that follows from depth already",
    "elc-bert": "its feed-forwards begin smaller with depth already, and it reads means of outputs",
    "attention-residuals": "it reads means of outputs, whose size does not grow with depth",
    "vertical-attention": "it reads a mean of outputs divided by their size",
    "sandwich": "its second norm takes a factor of the branch out again",
    "deep-delta": "it takes the direction of an output alone, which has no size",
    "deep-delta-matrix": "it takes the direction of an output alone, which has no size",
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """Multipliers of one parameter.

    Attributes:
        init: of the standard deviation that the recipe of initial values gives.
        forward: of what it computes.
        lr: of the learning rate.
        weight_decay: of the weight decay, which the optimiser multiplies by the rate again.
        eps: of the optimiser's epsilon.
    """

    init: float = 1.0
    forward: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter is.

    Attributes:
        kind: what it is.
        block: the block of two sites in which its part runs, or first runs, counted from 1; 0 outside of layers.
    """

    kind: Kind
    block: int = 0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a model is.

    Attributes:
        width: D.
        depth: blocks of two sites, loops at their maximum.
        tied: whether the head is the embedding.
    """

    width: int
    depth: float
    tied: bool = True


class Rule:
    """The base of every rule, and what all multipliers of 1 are.

    Class attributes:
        recipes: the recipes of initial values that it goes with, the default first; empty for all.
        deep: whether it has factors of depth, which wirings with constants of their own refuse.
        reads_norms: whether it changes what the norm before a branch gives.

    Attributes:
        optimiser: what its rates are for; Adam stands for all that take signs.
    """

    recipes: ClassVar[Sequence[str]] = ()
    deep: ClassVar[bool] = False
    reads_norms: ClassVar[bool] = False

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.optimiser: Literal["adamw", "sgd"] = "adamw"

    def record(self, place: Place) -> Record:
        """The multipliers of a parameter."""
        return Record()

    def factors(self, site: Site) -> tuple[float, float]:
        """What the normalised input and the output of a site's branch are multiplied by."""
        block = _block(site)
        norm, output = Place(kind="norm", block=block), Place(kind="output", block=block)
        return self.record(norm).forward, self.record(output).forward


def require_recipe(rule: str, kind: type[Rule], recipe: str) -> None:
    """Refuses initial values that have a factor of width or depth of their own.

    Raises:
        ValueError: names both.
    """
    if kind.recipes and recipe not in kind.recipes:
        raise ValueError(
            f"init {recipe} does not go with the parametrisation {rule}, which scales initial values itself or needs "
            f"them free of depth; use init {' or '.join(kind.recipes)}"
        )


def require_wiring(rule: str, kind: type[Rule], wiring: str, before: str) -> None:
    """Refuses a second factor of depth.

    Args:
        rule: its name.
        kind: what it is.
        wiring: its name.
        before: the parts whose input the wiring normalises.

    Raises:
        ValueError: names both, with the reason.
    """
    if kind.deep and wiring in WITHOUT_DEPTH:
        raise ValueError(
            f"the parametrisation {rule} does not go with the wiring {wiring}: {WITHOUT_DEPTH[wiring]}; "
            "use one of the two"
        )
    if kind.reads_norms and before != "af":
        raise ValueError(
            f"the parametrisation {rule} does not go with the wiring {wiring}, which has no norm before its branches"
        )


def records(stack: Stack) -> dict[str, Record]:
    """The multipliers of every parameter of a stack, by its name; a shared one is there once."""
    return {name: stack.rule.record(place) for name, place in places(stack).items()}


def places(stack: Stack) -> dict[str, Place]:
    """What every parameter of a stack is, by its name."""
    ranks = stack.wiring.shape.depth.ranks
    sites = [replace(site, index=ranks[site.index]) for own in stack.sites for site in own]
    first = {(site.key.layer, site.part): _block(site) for site in reversed(sites)}
    tables = {name for name, module in stack.named_modules() if isinstance(module, nn.Embedding)}
    return {name: _place(name, parameter, first, tables) for name, parameter in stack.named_parameters()}


def _block(site: Site) -> int:
    return site.index // 2 + 1


def _place(name: str, parameter: nn.Parameter, first: Mapping[tuple[int, str], int], tables: set[str]) -> Place:
    root, *inside, leaf = name.split(".")
    if root in ("embedding", "grams", "positions"):
        return Place(kind="embedding")
    if root == "norm":
        return Place(kind="final")
    if root == "head":
        return Place(kind="head")
    if root != "layers":
        return Place(kind="vector")
    # a part that no visit runs never counts
    block = first.get((int(inside[0]), inside[1]), 1)
    if inside[2:] == ["norm"] and leaf == "weight":
        return Place(kind="norm", block=block)
    # experts hold their biases in one matrix
    if parameter.ndim < 2 or leaf.endswith("bias") or name.rpartition(".")[0] in tables:
        return Place(kind="vector", block=block)
    written = any(word in OUTPUTS for word in (*inside, leaf))
    return Place(kind="output" if written else "matrix", block=block)
