"""Recipes of initial values: a standard deviation for each kind of matrix, as a function of width and depth.

| recipe | matrices | output matrices | embedding | source |
|---|---|---|---|---|
| `gpt2` | 0.02 | 0.02 / sqrt(sites) | 0.02 | Radford et al., 2019 |
| `normal` | 0.02 | 0.02 | 0.02 | Llama of transformers |
| `small` | sqrt(2 / (5 D)) | sqrt(2 / (5 D)) | sqrt(2 / (5 D)) | Nguyen and Salazar, arXiv:1910.05895 |
| `small-out` | sqrt(2 / (5 D)) | 2 / (visits sqrt(D)) | sqrt(2 / (5 D)) | Wang and Komatsuzaki, GPT-J, 2021 |
| `tiny` | sqrt(1 / (2 D visits)) | sqrt(1 / (2 D visits)) | 0.5 | Pangu Ultra, arXiv:2504.07866 |

Output matrices are those that write to the stream. `visits` and `sites` count every turn of a loop at its maximum.
Norms begin at 1, biases at 0. Copies `!` begin equal to their layer, copies `!zero` with output matrices and biases
of 0, copies `!rand` by the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from deepen.errors import UsageError, nearest

if TYPE_CHECKING:
    from deepen.stack.stack import Stack

OUTPUTS = ("out", "down")


class Deviations(NamedTuple):
    """Standard deviations of matrices, output matrices and embeddings."""

    matrix: float
    output: float
    embedding: float


def _small(width: int) -> float:
    return math.sqrt(2 / (5 * width))


def _tiny(width: int, visits: int) -> float:
    return math.sqrt(1 / (2 * width * visits))


# (width, visits, sites) -> deviations
RECIPES: Mapping[str, Callable[[int, int, int], Deviations]] = {
    "gpt2": lambda width, visits, sites: Deviations(0.02, 0.02 / math.sqrt(sites), 0.02),
    "normal": lambda width, visits, sites: Deviations(0.02, 0.02, 0.02),
    "small": lambda width, visits, sites: Deviations(_small(width), _small(width), _small(width)),
    "small-out": lambda width, visits, sites: Deviations(_small(width), 2 / (visits * math.sqrt(width)), _small(width)),
    "tiny": lambda width, visits, sites: Deviations(_tiny(width, visits), _tiny(width, visits), 0.5),
}


def initialise(stack: Stack, seed: int | None) -> None:
    """Gives every parameter of a stack its initial value, the same for the same seed.

    Raises:
        UsageError: an unknown recipe.
    """
    name = stack.config.init
    if name not in RECIPES:
        raise UsageError(
            f"no recipe of initial values {name!r}{nearest(name, RECIPES)}; known are {', '.join(RECIPES)}"
        )
    sites = sum(len(own) for own in stack.sites)
    deviations = RECIPES[name](stack.config.width, len(stack.sites), max(1, sites))
    with torch.random.fork_rng(enabled=seed is not None), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        nn.init.normal_(stack.embedding.weight, std=deviations.embedding)
        if stack.positions is not None:
            nn.init.normal_(stack.positions.weight, std=deviations.embedding)
        if not stack.config.tied:
            nn.init.normal_(stack.head.weight, std=deviations.matrix)
        for layer in stack.layers:
            fill(layer, deviations)
        stack.wiring.reset()
        stack.wiring.initialise(dict(enumerate(stack.layers)))
        stack.owned.reset()
        _copies(stack)


def fill(layer: nn.Module, deviations: Deviations) -> None:
    """Random matrices, biases of 0 and norms of 1."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            output = path.rpartition(".")[2] in OUTPUTS
            nn.init.normal_(module.weight, std=deviations.output if output else deviations.matrix)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _copies(stack: Stack) -> None:
    """Copies of a layer begin as the program says."""
    plan = stack.written
    children = {key: stack.layers[index] for index, key in enumerate(plan.keys)}
    for key, kind in plan.inits.items():
        origin = children.get(key._replace(copy=None))
        if kind == "rand":
            continue
        if origin is not None:
            children[key].load_state_dict(origin.state_dict())
        if kind == "zero":
            for path, parameter in children[key].named_parameters():
                if any(f".{name}." in path for name in OUTPUTS):
                    nn.init.zeros_(parameter)
