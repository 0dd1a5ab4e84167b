"""Feed-forwards that are split into experts of equal size, of which each token runs some.

    hidden neurons    0 .. w-1 | w .. 2w-1 | ...          E experts of w neurons, one after another in the matrices
    y = b + sum of V_e act(W_e x) over the k experts e with the highest scores of x          no weights

The tensors of the feed-forward keep their names and shapes, so that with k = E it is the whole feed-forward. A router
gives the scores:

    oracle        sum of |h_i| |v_i| over the neurons of an expert; it computes all of them to know
    similarity    cosine of x and the mean key of the expert
    linear        W x + b
    mlp           W2 tanh(W1 x + b1) + b2

Tokens are grouped by expert, and each expert multiplies the tokens that chose it by its own rows and columns of the
matrices, as they lie. The choice has no gradient.

Zhang et al., MoEfication, arXiv:2110.01786; Zhao et al., FactorLLM, arXiv:2408.11855.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import skip_init
from transformers.pytorch_utils import Conv1D

from deepen.errors import FamilyError, UsageError, nearest

if TYPE_CHECKING:
    from deepen.checkpoint.widths import FeedForward

ROUTERS = ("oracle", "similarity", "linear", "mlp")
# The child of a feed-forward that holds its router.
ROUTER = "router"


@dataclass(frozen=True)
class Split:
    """How a feed-forward is split.

    Attributes:
        experts: E, how many there are.
        active: k, how many of them a token runs.
        router: what chooses them.
    """

    experts: int
    active: int
    router: str

    def require(self, width: int, where: str) -> None:
        """Refuses what does not fit a feed-forward of `width` neurons.

        Raises:
            UsageError: names the numbers and the rule.
        """
        if self.router not in ROUTERS:
            known = ", ".join(ROUTERS)
            raise UsageError(f"{where}: no router {self.router!r}{nearest(self.router, ROUTERS)}; there are {known}")
        if self.experts < 1 or width % self.experts:
            near = [count for count in range(1, width + 1) if width % count == 0]
            near = sorted(sorted(near, key=lambda count: abs(count - self.experts))[:3])
            raise UsageError(
                f"{where}: {width} neurons cannot be split into {self.experts} experts of equal size; the number of "
                f"experts divides the width, as {', '.join(map(str, near))} do"
            )
        if not 1 <= self.active <= self.experts:
            raise UsageError(
                f"{where}: {self.active} active of {self.experts} experts; a token runs from 1 to all of them"
            )


class Experts(nn.Module):
    """A feed-forward of experts; its children are those of the whole one, and the router.

    Args:
        whole: the feed-forward that is split; its linear maps become those of this module.
        shape: its matrices.
        split: how it is split.

    Attributes:
        split: how it is split; another number of active experts may be set.
        inputs: the paths of the maps that read the stream.
    """

    def __init__(self, whole: nn.Module, shape: FeedForward, split: Split) -> None:
        super().__init__()
        stem = f"{shape.module}."
        self.inputs = tuple(name.removeprefix(stem) for name in shape.inputs)
        self._output = shape.output.removeprefix(stem)
        # Held in a tuple, so that what lies between the maps is no child with parameters of its own.
        self._between = (between(whole, self.inputs, self._output),)
        for name, child in whole.named_children():
            self.add_module(name, child)
        self.split, self.width, self.stream = split, shape.width, shape.stream
        if split.router != "oracle":
            weight: Any = self.get_submodule(self._output).weight
            place = {"device": weight.device, "dtype": weight.dtype}
            self.add_module(ROUTER, router(split.router, shape.stream, split.experts, **place))
        self.train(whole.training)

    def maps(self) -> list[nn.Linear | Conv1D]:
        """The maps that read the stream, and behind them the one that writes to it.

        Raises:
            FamilyError: something else, such as an adapter, stands in the place of one.
        """
        found: list[Any] = [self.get_submodule(name) for name in (*self.inputs, self._output)]
        for module in found:
            if type(module) not in (nn.Linear, Conv1D):
                raise FamilyError(
                    f"a {type(module).__name__} stands in a feed-forward of experts, which read their matrices "
                    "themselves; adapt the other matrices, or train these in full"
                )
        return found

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]."""
        *inputs, output = self.maps()
        flat = read.reshape(-1, read.shape[-1])
        if not len(flat):
            return torch.zeros_like(read)
        groups = self._groups(self.chosen(flat))
        given = [(flat if tokens is None else flat[tokens], at) for at, tokens in groups]
        # What lies between the maps is done neuron by neuron, so once for all experts.
        hidden = self.between(*(torch.cat([_read(matrix, rows, at) for rows, at in given]) for matrix in inputs))
        written: torch.Tensor | None = None
        for (at, tokens), own in zip(groups, hidden.split([len(rows) for rows, _ in given]), strict=True):
            made = _write(output, own, at)
            if written is None:
                written = made.new_zeros(len(flat), self.stream)
            written = written.add_(made) if tokens is None else written.index_add_(0, tokens, made)
        assert written is not None
        return (written if output.bias is None else written + output.bias).reshape(read.shape)

    def _groups(self, chosen: torch.Tensor) -> list[tuple[slice, torch.Tensor | None]]:
        """The neurons of each expert that is chosen, and the tokens that chose it; None for all of them."""
        size = self.width // self.split.experts
        places = [slice(at, at + size) for at in range(0, self.width, size)]
        if len(chosen) == 1:
            return [(places[expert], None) for expert in chosen[0].tolist()]
        pairs = chosen.flatten()
        tokens = pairs.argsort(stable=True) // self.split.active
        counts = torch.bincount(pairs, minlength=self.split.experts).tolist()
        return [
            (place, own if count < len(chosen) else None)
            for place, own, count in zip(places, tokens.split(counts), counts, strict=True)
            if count
        ]

    def chosen(self, flat: torch.Tensor) -> torch.Tensor:
        """The experts of each token, [n, k], for what it reads, [n, d]."""
        found = self.get_submodule(ROUTER)(flat) if self.split.router != "oracle" else self.masses(flat)
        return found.topk(self.split.active, sorted=False).indices

    def lay_out(self) -> None:
        """Puts what an expert writes with side by side in memory; shapes and values stay."""
        output = self.maps()[-1]
        if isinstance(output, nn.Linear):
            output.weight.data = output.weight.data.T.contiguous().T

    def hidden(self, flat: torch.Tensor) -> torch.Tensor:
        """The values of all neurons, [n, m]."""
        *inputs, _ = self.maps()
        return self._hidden(inputs, flat, slice(None))

    def between(self, *given: torch.Tensor) -> torch.Tensor:
        """Hidden values from what each map that reads the stream gives."""
        return self._between[0](given)

    def masses(self, flat: torch.Tensor) -> torch.Tensor:
        """The oracle's score of each expert, [n, E]: how much its neurons can write."""
        output = self.maps()[-1]
        sizes = output.weight.norm(dim=0 if isinstance(output, nn.Linear) else 1)
        return (self.hidden(flat).abs() * sizes).unflatten(-1, (self.split.experts, -1)).sum(-1)

    def _hidden(self, inputs: Sequence[nn.Linear | Conv1D], flat: torch.Tensor, at: slice) -> torch.Tensor:
        return self.between(*(_read(matrix, flat, at) for matrix in inputs))


def _read(matrix: nn.Linear | Conv1D, flat: torch.Tensor, at: slice) -> torch.Tensor:
    """What some neurons read through a map, [n, w]."""
    bias = None if matrix.bias is None else matrix.bias[at]
    return functional.linear(flat, matrix.weight[at] if isinstance(matrix, nn.Linear) else matrix.weight[:, at].T, bias)


def _write(matrix: nn.Linear | Conv1D, hidden: torch.Tensor, at: slice) -> torch.Tensor:
    """What some neurons write through a map, [n, d], without its bias."""
    return functional.linear(hidden, matrix.weight[:, at] if isinstance(matrix, nn.Linear) else matrix.weight[at].T)


class Given(nn.Module):
    """Stands for a map that reads the stream: gives its share of what is handed in."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        return given[self.index]


def between(whole: nn.Module, inputs: Sequence[str], output: str) -> nn.Module:
    """What a feed-forward does between its maps: (what each input map gives, ...) -> hidden values.

    It is the feed-forward itself without its maps, so the activation and the order of the factors are its own. Dropout
    is left out: it would fall on single neurons here.
    """
    replaced: dict[int, nn.Module] = {id(whole.get_submodule(name)): Given(at) for at, name in enumerate(inputs)}
    replaced[id(whole.get_submodule(output))] = nn.Identity()
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            replaced[id(module)] = nn.Identity()
    # What `deepcopy` finds here it takes for copied already, so no weight is.
    return copy.deepcopy(whole, dict(replaced))


def router(kind: str, width: int, experts: int, **place: Any) -> nn.Module:
    """A router from [n, d] to scores [n, E]; its values are left unset."""
    if kind == "mlp":
        first = skip_init(nn.Linear, width, experts, **place)
        return nn.Sequential(first, nn.Tanh(), skip_init(nn.Linear, experts, experts, **place))
    return skip_init(nn.Linear, width, experts, bias=kind == "linear", **place)


def in_experts(layer: nn.Module, shape: FeedForward, split: Split, where: str) -> nn.Module:
    """A copy of a layer whose feed-forward is split.

    Raises:
        UsageError: a split that does not fit the width.
        FamilyError: the feed-forward is the layer itself.
    """
    split.require(shape.width, where)
    if not shape.module:
        raise FamilyError(f"{where}: the feed-forward of a {type(layer).__name__} is no module of its own")
    made = copy.deepcopy(layer)
    above, _, name = shape.module.rpartition(".")
    setattr(made.get_submodule(above), name, Experts(made.get_submodule(shape.module), shape, split))
    return made


def used_shares(layer: nn.Module) -> Iterator[tuple[nn.Module, Fraction]]:
    """The maps of which a token uses a share, with the share: those of experts."""
    for module in layer.modules():
        if isinstance(module, Experts):
            *inputs, output = module.maps()
            share = Fraction(module.split.active, module.split.experts)
            # The oracle reads through every map before it chooses.
            yield from ((each, share + (module.split.router == "oracle")) for each in inputs)
            yield output, share
