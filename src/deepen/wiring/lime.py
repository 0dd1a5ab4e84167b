"""LIMe, layer-integrated memory: attention reads a learned mix of the keys and values of all visits so far.

    [k'; v']_r = sum over j <= l and heads h of W_l[r, (j, h)] [k_j,h; v_j,h]          head r of mixer l, R heads

    x ──┬── norm ── W_q ─────────────────────── attention ── + ── x'
        │        └─ W_k, W_v ──┬── W_l ── k', v' ──┘         │
        └──────────────────────┼─────────────────────────────┘
    k_j, v_j of mixers j < l ──┘

One weight mixes a key and its value. Rotary positions come after the mix, queries are the visit's own, and the first
mixer has no router. A cache holds the mixed keys and values, as many as without a mix. In a router the columns of the
visit itself are the identity at first; the older ones are uniform as the authors' code has them (`past: uniform`),
within sqrt(3 / ((l + 1) R)), or 0, which is Pre-LN. Routers belong to visits, so each turn of a loop has its own (R).

Source: Gerasimov et al., You Do Not Fully Utilize Transformer's Representation Capacity, arXiv:2502.09245.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import OnKeys, Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import VISIT, Entries, Label
from deepen.wiring.history import History


class Remembered(NamedTuple):
    """The stream x: (B, T, D), and the heads [k; v]: (B, T, 2 d) of all mixers so far; None before the first."""

    x: torch.Tensor
    heads: History | None


@method(
    "lime",
    family="wiring",
    source="arXiv:2502.09245",
    title="You Do Not Fully Utilize Transformer's Representation Capacity",
    mechanism="attention reads a learned mix of the keys and values of all visits so far",
    cost="R^2 (l + 1) parameters and 2 d R^2 (l + 1) multiply-adds at mixer l; all keys and values of a pass are kept",
)
class LIMe(Wiring):
    """Routers over the keys and values of earlier visits.

    Args:
        shape: what it is built for.
        past: the weights of earlier visits at first.
    """

    equals = "Pre-LN with past=zero"
    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its weights belong to one sequence of visits, and branches have none",
        "n..m": "a skipped turn leaves no keys, but the keys of each visit have weights of their own",
        "kv": "a visit that shares a slot has no keys of its own to remember",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equation, one weight for a key and its value, initial weights",
        "N": "Pre-LN with past=zero, the mix written out, rotation after the mix",
        "R": "routers count visits, turns of loops included",
    }

    def __init__(self, shape: Shape, *, past: Literal["uniform", "zero"] = "uniform") -> None:
        super().__init__(shape)
        self.past = past
        mixers = [site.index for site in shape.sites if site.part == "a"]
        self.ranks = {index: rank for rank, index in enumerate(mixers)}
        heads = shape.kv_heads
        # Of the mixers from the second on.
        self.routers = nn.ParameterList(
            nn.Parameter(torch.empty(heads, (rank + 1) * heads)) for rank in range(1, len(mixers))
        )
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        mixers = [site for site in self.shape.sites if site.part == "a"]
        heads = self.shape.kv_heads
        # the keys of a visit and head
        labels: list[Label] = [(VISIT, site.visit, head) for site in mixers for head in range(heads)]
        return {
            f"routers.{rank - 1}": Entries(
                "routers", (VISIT, site.visit), (None, labels[: (rank + 1) * heads]), fresh=0
            )
            for rank, site in enumerate(mixers)
            if rank
        }

    def reset(self) -> None:
        heads = self.shape.kv_heads
        for router in self.routers:
            bound = math.sqrt(3 / router.shape[1]) if self.past == "uniform" else 0.0
            nn.init.uniform_(router, -bound, bound)
            router.data[:, -heads:] = torch.eye(heads)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Remembered:
        return Remembered(x, None)

    def read(self, state: Remembered, site: Site) -> Read:
        # the hook puts the heads of this visit there
        return Read(state.x, carry=[])

    def on_keys(self, state: Remembered, site: Site, read: Read) -> OnKeys:
        rank, room = self.ranks[site.index], len(self.ranks) * self.shape.kv_heads

        def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            heads = state.heads
            for head in torch.cat([k, v], dim=-1).unbind(2):
                heads = History.start(head, room) if heads is None else heads.push(head)
            read.carry.append(heads)
            if rank == 0 or heads is None:
                return q, k, v
            keys, values = heads.mixes(self.routers[rank - 1]).movedim(0, 2).chunk(2, dim=-1)
            return q, keys, values

        return mixed

    def write(self, state: Remembered, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Remembered:
        return Remembered(state.x + y, read.carry[0] if site.part == "a" else state.heads)

    def readout(self, state: Remembered) -> torch.Tensor:
        return state.x

    def change(self, state: Remembered, function: Callable[[torch.Tensor], torch.Tensor]) -> Remembered:
        return state._replace(x=function(state.x))

    def combine(self, states: Sequence[Remembered], weights: Sequence[float | torch.Tensor]) -> Remembered:
        # a damped stretch: what its visits remember stays as it is
        return Remembered(super().combine([state.x for state in states], weights), states[-1].heads)
