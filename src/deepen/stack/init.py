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
of 0, copies `!rand` by the recipe. A parametrisation multiplies the deviations: `deepen.stack.parametrisation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from deepen.errors import UsageError, nearest
from deepen.stack.parametrisation import OUTPUTS, records
from deepen.sublayers.ffn.base import FeedForward
from deepen.sublayers.mixer.base import Mixer

if TYPE_CHECKING:
    from deepen.stack.stack import Stack

# Gives a tensor values of a standard deviation.
Fill = Callable[[torch.Tensor, float], object]


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
    if next(stack.parameters()).is_meta:
        return  # built for its sizes alone
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        fill(stack, lambda tensor, deviation: nn.init.normal_(tensor, std=deviation))


def fill(stack: Stack, with_: Fill) -> None:
    """Matrices by the recipe and the parametrisation, biases of 0 and norms of 1; then what the wiring changes."""
    sites = sum(len(own) for own in stack.sites)
    deviations = RECIPES[stack.config.init](stack.config.width, len(stack.sites), max(1, sites))
    multipliers = {name: record.init for name, record in records(stack).items()}
    with torch.no_grad():
        with_(stack.embedding.weight, deviations.embedding * multipliers["embedding.weight"])
        if stack.grams is not None:
            nn.init.zeros_(stack.grams.weight)
        if stack.positions is not None:
            with_(stack.positions.weight, deviations.embedding * multipliers["positions.weight"])
        if not stack.config.tied:
            with_(stack.head.weight, deviations.matrix * multipliers["head.weight"])
        mixers: list[Mixer] = []
        for path, module in stack.layers.named_modules(prefix="layers"):
            if isinstance(module, nn.Linear):
                output = path.rpartition(".")[2] in OUTPUTS
                deviation = deviations.output if output else deviations.matrix
                with_(module.weight, deviation * multipliers[f"{path}.weight"])
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, FeedForward):
                for name, parameter in module.unmapped():
                    deviation = deviations.output if name in module.outputs else deviations.matrix
                    with_(parameter, deviation * multipliers[f"{path}.{name}"])
                module.reset()
            elif isinstance(module, Mixer):
                mixers.append(module)
        for mixer in mixers:
            mixer.reset()
        stack.wiring.reset()
        stack.wiring.initialise(dict(enumerate(stack.layers)))
        stack.owned.reset()
        _copies(stack)


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
            silence(children[key])


def silence(layer: nn.Module) -> None:
    """Output matrices and biases of 0, so that a layer adds nothing."""
    feed_forward: Any = layer.get_submodule("f.sublayer")
    written = {f"f.sublayer.{name}" for name in feed_forward.outputs}
    for path, parameter in layer.named_parameters():
        if path.startswith("a.sublayer.out.") or path in written:
            nn.init.zeros_(parameter)
