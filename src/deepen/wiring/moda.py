"""MoDA, mixture-of-depths attention: a query meets, beside its sequence, what earlier sites hold for its own token.

    s  = softmax([ q . k_j / sqrt(d) for the tokens j of the sequence ;  q . K_i / sqrt(d) for the earlier sites i ])
    y  = W_o (s of the sequence * v_j  +  s of the sites * V_i)            one softmax over both
    x' = norm(x + y)                     feed-forward: x' = norm(x + F(x))

    x ──┬── attention ─────── + ── norm ──┬── feed-forward ── + ── norm ── x''
        ├────│────────────────┘           ├───────────────────┘
        │    k, v ── slot K, V            └── W_kv ── slot K, V
        └── slots of earlier sites, of this token alone

Each mixer leaves its own keys and values as a slot, and each feed-forward those of a map W_kv of its input
(`feed_forward: false` leaves them out). A cache grows by nothing: of earlier tokens only the sequence keys are needed.
Slots hold keys before QK norm and before rotary positions; at use they are normalised, and never rotated. The authors'
code rotates the queries that meet them all the same; `rotated: false` does not (R). The norms are those of Post-LN,
which works best in the paper; its Pre-LN form is not built. W_kv belongs to sites and begins with a deviation of
1 / sqrt(D) (R). All scores of a pass are held at once: there is no fused kernel.

Source: Zhu et al., Mixture-of-Depths Attention, arXiv:2603.15619.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Beside, OnKeys, Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import SITE, Entries


class Slots(NamedTuple):
    """The stream x: (B, T, D), and the keys and values of the sites so far, each (B, T, KV heads, head width)."""

    x: torch.Tensor
    keys: tuple[torch.Tensor, ...] = ()
    values: tuple[torch.Tensor, ...] = ()


@method(
    "moda",
    family="wiring",
    source="arXiv:2603.15619",
    title="Mixture-of-Depths Attention",
    mechanism="one softmax over the keys of the sequence and those of earlier sites for the same token",
    cost="2 D R d parameters a feed-forward, 2 H d multiply-adds a slot and mixer; keys and values of a pass are kept",
)
class MoDA(Wiring):
    """Post-LN whose attention reads along depth too.

    Args:
        shape: what it is built for.
        feed_forward: whether feed-forwards leave slots.
        rotated: whether the queries that meet slots are rotated.
    """

    before = ""
    after = "af"
    final = False
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the joint softmax, which sites leave slots, keys of slots without rotation, the norms",
        "N": "plain attention without slots, the softmax written out, no slot of another token",
        "R": "queries without rotation, W_kv at first, slots of branches and damped stretches",
    }

    def __init__(self, shape: Shape, *, feed_forward: bool = True, rotated: bool = True) -> None:
        super().__init__(shape)
        self.rotated = rotated
        final = max((site.index for site in shape.sites if site.part == "a"), default=0)
        # nobody reads what comes after the last mixer
        self.maps = nn.ParameterDict({
            str(site.index): nn.Parameter(torch.empty(2 * shape.kv_heads * shape.head_width, shape.width))
            for site in shape.sites
            if feed_forward and site.part == "f" and site.index < final
        })  # fmt: skip
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        return {f"maps.{site}": Entries("maps", (SITE, int(site))) for site in self.maps}

    def reset(self) -> None:
        for map_ in self.maps.values():
            nn.init.normal_(map_, std=self.shape.width**-0.5)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Slots:
        return Slots(x)

    def read(self, state: Slots, site: Site) -> Read:
        # the hook puts the keys and values of a mixer there
        return Read(state.x, carry=[])

    def on_keys(self, state: Slots, site: Site, read: Read) -> OnKeys:
        def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            # a visit that reads the keys of another has none
            if k.shape[2]:
                read.carry.append((k, v))
            return q, k, v

        return kept

    def beside(self, state: Slots, site: Site) -> Beside | None:
        return Beside(state.keys, state.values, self.rotated) if state.keys else None

    def write(self, state: Slots, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Slots:
        new = list(read.carry)
        if str(site.index) in self.maps:
            heads = F.linear(read.u, self.maps[str(site.index)]).unflatten(-1, (2, self.shape.kv_heads, -1))
            new.append(heads.unbind(2))
        keys, values = (tuple(pair[which] for pair in new) for which in (0, 1))
        return Slots(norm(state.x + y), state.keys + keys, state.values + values)

    def readout(self, state: Slots) -> torch.Tensor:
        return state.x

    def change(self, state: Slots, function: Callable[[torch.Tensor], torch.Tensor]) -> Slots:
        return state._replace(x=function(state.x))

    def combine(self, states: Sequence[Slots], weights: Sequence[float | torch.Tensor]) -> Slots:
        # the slots of every branch, as they are
        entry, *others = states
        known = len(entry.keys)
        keys = tuple(key for other in others for key in other.keys[known:])
        values = tuple(value for other in others for value in other.values[known:])
        x = super().combine([state.x for state in states], weights)
        return Slots(x, entry.keys + keys, entry.values + values)
