"""LoSiA: of every matrix a subnet of rows X and columns Y is trained, and one layer after the other finds its own anew.

    step / T    0       1       2       3                     T = `every`, here 3 layers
    profiles    layer 0 layer 1 layer 2 layer 0 ...           localises at the end of its window

    importance of an entry   I = |w g - (w g)^2 / 2|          g: gradient of the batch, w: before the update
    over a window            Im <- .85 Im + .15 I,   Iv <- .85 Iv + .15 |I - Im|,   S = Im Iv
    subnet                   the best of: rows and columns apart; rows, then columns of these rows; columns, then rows

A layer that has localised starts AdamW anew, moments and step counter, and its rate rises from 0 over T steps; the
weights it trained before stay. Every layer has its window in each cycle.

LoSiA-Pro is the same with a backward pass that computes the gradient of the subnet only, from X[:, Y]. The whole
gradient is then computed for the layer whose window it is; in the plain form, for every layer.

Differences from the published code, all deliberate: the counter of AdamW restarts with its moments (there the first
update after a localisation is 3.16 times too large, which the rising rate hides); a bias gets the sum over tokens;
indices are sorted; no compiled extension is needed. The output head, which may be trained there, is left as it is.

Wang et al., LoSiA: Efficient High-Rank Fine-Tuning via Subnet Localization and Optimization, arXiv:2507.04487.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.registry import method
from deepen.train.selective.block import Block
from deepen.train.selective.matrices import sides
from deepen.train.selective.selection import Selection
from deepen.train.selective.sliced import Sliced

# What the running means of the importance keep of their value at every step.
KEEP = 0.85


@method(
    "losia",
    family="tune",
    source="arXiv:2507.04487",
    title="LoSiA: Efficient High-Rank Fine-Tuning via Subnet Localization and Optimization",
    mechanism="train a subnet of rows and columns of every matrix, localised anew layer by layer",
    cost="moments of p^2 of the matrices; their whole gradients, one matrix after the other; scores of one layer",
)
def subnets(model: nn.Module, layers: Sequence[Sequence[str]], **options: float | bool) -> Selection:
    """Selects a random subnet of every matrix, with whole gradients of which the subnet's are taken.

    Args:
        model: the model, which is changed until the selection is released.
        layers: the matrices of each layer, in the order in which layers localise.
        options: see `subnets_pro`.

    Raises:
        UsageError: a value outside its range.
    """
    return _select(model, layers, pro=False, **options)  # pyright: ignore[reportArgumentType]


@method(
    "losia-pro",
    family="tune",
    source="arXiv:2507.04487",
    title="LoSiA: Efficient High-Rank Fine-Tuning via Subnet Localization and Optimization",
    mechanism="LoSiA with a backward pass that computes the gradients of the subnets only",
    cost="gradients and moments of p^2 of the matrices, and whole gradients and scores of one layer at a time",
)
def subnets_pro(
    model: nn.Module,
    layers: Sequence[Sequence[str]],
    *,
    share: float = 0.125,
    every: int = 100,
    together: bool = False,
    seed: int = 0,
) -> Selection:
    """Selects a random subnet of every matrix.

    Args:
        model: the model, which is changed until the selection is released.
        layers: the matrices of each layer, in the order in which layers localise.
        share: p, of the rows and of the columns of a matrix; one of each at least.
        every: steps of a window.
        together: all layers profile and localise in the first window of each cycle.
        seed: of the subnets at the start.

    Raises:
        UsageError: a value outside its range.
    """
    return _select(model, layers, share=share, every=every, together=together, seed=seed, pro=True)


def _select(
    model: nn.Module,
    layers: Sequence[Sequence[str]],
    *,
    share: float = 0.125,
    every: int = 100,
    together: bool = False,
    seed: int = 0,
    pro: bool,
) -> Selection:
    if not 0 < share <= 1:
        raise UsageError(f"--share {share}: expected a share of the rows and columns above 0, at most 1")
    if every < 1:
        raise UsageError(f"--every {every}: expected 1 or more steps of a window")
    names = [name for layer in layers for name in layer]
    shapes = {name: sides(model, name) for name in names}
    sizes = {
        name: (max(1, int(share * rows)), max(1, int(share * columns))) for name, (rows, columns) in shapes.items()
    }
    generator = torch.Generator().manual_seed(seed)
    blocks = {}
    for name, (rows, columns) in shapes.items():
        drawn = [torch.randperm(side, generator=generator) for side in (rows, columns)]
        of_rows, of_columns = (
            every_one[:size].sort().values for every_one, size in zip(drawn, sizes[name], strict=True)
        )
        blocks[name] = Block(rows=of_rows, columns=of_columns)
    return Selection(model, blocks, Windows(layers, sizes, every, together, pro))


def localise(score: torch.Tensor, rows: int, columns: int) -> Block:
    """The subnet with the highest sum of scores that one of three greedy rules finds.

    Args:
        score: [n, m].
        rows: of the subnet.
        columns: of the subnet.
    """
    all_rows, all_columns = score.sum(1), score.sum(0)
    first_rows, first_columns = _top(all_rows, rows), _top(all_columns, columns)
    found = (
        (first_rows, first_columns),
        (first_rows, _top(score[first_rows].sum(0), columns)),
        (_top(score[:, first_columns].sum(1), rows), first_columns),
    )
    best = max(found, key=lambda each: score[each[0]][:, each[1]].sum().item())
    return Block(rows=best[0], columns=best[1])


def _top(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest values, ascending; of equal ones the first."""
    return values.argsort(descending=True, stable=True)[:count].sort().values


class Windows:
    """The schedule: whose window it is, what it has seen, and how far the rate has risen.

    Args:
        layers: the matrices of each layer.
        sizes: rows and columns of the subnets, by matrix.
        every: T.
        together: see `subnets_pro`.
        pro: watch the layer whose window it is only.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[str]],
        sizes: Mapping[str, tuple[int, int]],
        every: int,
        together: bool,
        pro: bool,
    ) -> None:
        self.layers, self.sizes, self.every, self.together, self.pro = layers, sizes, every, together, pro
        self.layer_of = {name: at for at, layer in enumerate(layers) for name in layer}
        self.mean: dict[str, torch.Tensor] = {}
        self.variation: dict[str, torch.Tensor] = {}

    def profiled(self, step: int) -> Collection[str]:
        """The matrices whose window a step is in."""
        layer = step // self.every % len(self.layers)
        if self.together:
            return list(self.layer_of) if layer == 0 else ()
        return self.layers[layer]

    def watched(self, step: int) -> Collection[str]:
        return self.profiled(step) if self.pro else list(self.layer_of)

    def look(self, step: int, parts: Mapping[str, Sliced]) -> None:
        for name in self.profiled(step):
            sliced = parts[name]
            # a layer that no visit of this pass runs has none
            if sliced.gradient is None:
                continue
            change = sliced.weight.detach().float() * sliced.gradient
            change = (change - change.square() / 2).abs()
            if sliced.turned:
                change = change.t()
            mean = self.mean.get(name, torch.zeros_like(change)).lerp(change, 1 - KEEP)
            variation = self.variation.get(name, torch.zeros_like(change)).lerp((change - mean).abs(), 1 - KEEP)
            self.mean[name], self.variation[name] = mean, variation

    def moves(self, step: int) -> Mapping[str, Block]:
        if (step + 1) % self.every:
            return {}
        found = {
            name: localise(self.mean[name] * self.variation[name], *self.sizes[name])
            for name in self.profiled(step)
            if name in self.mean
        }
        self.mean.clear()
        self.variation.clear()
        return found

    def rate(self, name: str, step: int) -> float:
        window, count = step // self.every, len(self.layers)
        layer = 0 if self.together else self.layer_of[name]
        # windows since that of this layer ended, which may be none yet
        since = (window - layer - 1) % count
        last = window - 1 - since
        return 1.0 if last < 0 else min(1.0, (step - (last + 1) * self.every) / self.every)

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"mean/{name}": each for name, each in self.mean.items()}
        return found | {f"variation/{name}": each for name, each in self.variation.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        for kind, held in (("mean", self.mean), ("variation", self.variation)):
            held.clear()
            held |= {name.removeprefix(f"{kind}/"): each for name, each in state.items() if name.startswith(f"{kind}/")}
