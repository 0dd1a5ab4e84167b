"""The contract of a feed-forward.

    y, losses, stats = feed_forward(read, context)

It is built from `Sizes` and its options, computes each token from that token alone unless it says otherwise, and tells
what it consists of: which parameters write to the stream, which neurons are independent, what a pass costs.

A configuration names it: `feed_forward: moe`, or `feed_forward: {name: moe, experts: 8, top: 2}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from deepen.sublayers.contract import Context, Out, Read

# A parameter, and the index of a row, a column or a number in it.
Place = tuple[str, tuple[int | slice, ...]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a feed-forward is built from.

    Attributes:
        width: D.
        hidden: H, the width between its maps; of an expert where there are several.
        bias: whether its maps have one.
        gelu: the form of the GELU.
        vocabulary: number of token ids.
    """

    width: int
    hidden: int
    bias: bool = False
    gelu: Literal["tanh", "none"] = "tanh"
    vocabulary: int = 256


class Neuron(NamedTuple):
    """What adds its own term to the output, whatever the other neurons are: it can be cut out, moved or joined.

    Attributes:
        reads: where its parameters lie that see the input.
        writes: where those lie that give the output; with zeros there it is silent.
        group: neurons of one group can change places.
    """

    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    group: int = 0


class FeedForward(nn.Module):
    """The base of every feed-forward.

    Class attributes:
        outputs: the parameters that its output is linear in, by name, each with the axis that has width D. Those of
            matrices begin with the deviation of output matrices, and a silent copy of a layer has zeros in all of them.
        pointwise: whether a token is computed from itself alone.
        equals: what it equals, and with which options; empty when that is nothing simpler.
        dead: parameters that can have no gradient, as a pattern of names with the reason.
        marks: how far each piece is backed: C in a public source, K general knowledge of the method, N an identity that
            the tests check with numbers, R reconstructed or chosen here.
    """

    outputs: ClassVar[Mapping[str, int]] = {"down.weight": 0, "down.bias": 0}
    pointwise: ClassVar[bool] = True
    equals: ClassVar[str] = ""
    dead: ClassVar[Mapping[str, str]] = {}
    marks: ClassVar[Mapping[str, str]] = {}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    @classmethod
    def usual_hidden(cls, width: int, **options: Any) -> float:
        """H where the configuration gives none, before it is rounded."""
        return 4.0 * width

    def forward(self, read: Read, context: Context) -> Out:
        raise NotImplementedError

    def unmapped(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The matrices that no linear map holds, by name: those of experts, keys, memories."""
        held = {id(each.weight) for each in self.modules() if isinstance(each, nn.Linear)}
        for name, parameter in self.named_parameters():
            if id(parameter) not in held and parameter.ndim > 1 and not name.endswith("bias"):
                yield name, parameter

    def reset(self) -> None:
        """Initial values of what is no matrix: biases, and tables where there are some. Called after the matrices."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def set_step(self, step: int) -> None:
        """Tells it how many steps of training are done; only schedules and memories listen."""

    def matrices(self) -> Iterator[torch.Tensor]:
        """The matrices on the way of a neuron, without those that choose and weigh neurons."""
        for map_ in self.children():
            if isinstance(map_, nn.Linear):
                yield map_.weight

    def neurons(self) -> Sequence[Neuron]:
        """Its independent neurons; none where no part of it is independent of the others."""
        return ()

    def flops(self, tokens: int) -> float:
        """FLOPs of the products of one forward pass over so many tokens."""
        return 2.0 * tokens * sum(map_.weight.numel() for map_ in self.modules() if isinstance(map_, nn.Linear))

    def active(self) -> int:
        """Parameters that act on one token."""
        return sum(parameter.numel() for parameter in self.parameters())
