"""Random cross-layer attention: in training a visit may attend to the keys and values of an earlier one.

    training          K, V of visit l:  its own with probability 1 - p,
                                        else those of a visit drawn evenly from all mixers before it
    outside of it     its own, or with `keep` those of the last kept visit up to it:  mu(l) = max{j in keep: j <= l}

    x ──┬── norm ── W_q ────────────────── attention ── + x
        │        └─ W_k, W_v ── (draw) ── K, V ─┘
        │   K, V of mixers before ──┘

Trained so, a model can be used with the cache of a few visits alone: `keep` lists these, counted among the visits that
mix tokens, from 0, and the others have no slot. Weights are the same with and without `keep`, and with it nothing is
drawn. The first mixer always uses its own. One draw a visit and pass, for all heads and sequences (R). Draws come from
torch's generator before the first site. A pass over a cache draws nothing. Keys of another visit are taken as they
are there: normalised and rotated. The layers are Pre-LN.

Source: Filippova et al., Stochastic KV routing, arXiv:2604.22782.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field

from deepen.errors import UsageError
from deepen.program import Plan
from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read, Slot
from deepen.wiring.base import Earlier, Norm, Shape, Wiring

Pair = tuple[torch.Tensor, torch.Tensor]


class Routed(NamedTuple):
    """The stream, and in training what is drawn.

    Attributes:
        x: (B, T, D).
        draws: of each mixer, whether it crosses and to which of those before it, as numbers in [0, 1); None: no draws.
        pairs: keys and values of the mixers so far, each (B, KV heads, T, head width).
    """

    x: torch.Tensor
    draws: tuple[tuple[float, float], ...] | None
    pairs: tuple[Pair, ...] = ()


class Taken:
    """A slot of one site in one pass: it takes the site's own keys and values, and gives those of its source.

    Args:
        source: of another visit; None gives the site's own.
        own: where the site's own are put.
    """

    writes = True

    def __init__(self, source: Pair | None, own: list[Pair]) -> None:
        self.source, self.own = source, own

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        self.own.append((keys, values))
        return self.read()

    def read(self) -> Pair:
        return self.own[0] if self.source is None else self.source


@method(
    "random-cross-layer-attention",
    family="wiring",
    source="arXiv:2604.22782",
    title="Stochastic KV routing",
    mechanism="in training a visit may attend to the keys and values of an earlier one; later a few visits keep theirs",
    cost="none; the cache is that of the visits that keep theirs",
)
class RandomCrossLayerAttention(Wiring):
    """Pre-LN whose visits learn to do with keys and values of others.

    Args:
        shape: what it is built for.
        p_cross: the probability with which a visit attends to another's.
        keep: mixers that keep their own, from 0, the first among them; None: all, and training draws.

    Raises:
        UsageError: `keep` leaves the first mixer out, or names one that the program does not have.
    """

    equals = "Pre-LN outside of training, without `keep`"
    refuses: ClassVar[Mapping[str, str]] = {
        "n..m": "a skipped turn may hold the visit whose keys and values a later visit reads",
        "kv": "it decides itself which visits share keys and values",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the draws, that all keep their matrices, the rule for the visits that are not kept",
        "N": "Pre-LN without crossing or with all kept, the share of crossings, which visits a kept one serves",
        "R": "one draw for all sequences of a pass; visits count, so turns of a loop and branches do too",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        p_cross: Annotated[float, Field(ge=0, le=1)] = 0.5,
        keep: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape)
        mixers = [site.index for site in shape.sites if site.part == "a"]
        self.ranks = {index: rank for rank, index in enumerate(mixers)}
        self.p_cross, self.keep = p_cross, None if keep is None else frozenset(keep)
        if self.keep is not None and (0 not in self.keep or not self.keep <= set(range(len(mixers)))):
            raise UsageError(
                f"the option keep of the wiring random-cross-layer-attention: expected 0 and others of the "
                f"{len(mixers)} mixers of the program, from 0, got {sorted(self.keep)}"
            )

    def plan(self, plan: Plan) -> Plan:
        if self.keep is None:
            return plan
        rank, slots, visits = -1, -1, []
        for visit in plan.visits:
            if visit.slot is not None:
                rank += 1
                slots += rank in self.keep
                visit = replace(visit, slot=slots, writes=rank in self.keep)
            visits.append(visit)
        return replace(plan, visits=tuple(visits), slots=slots + 1)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Routed:
        draws = None
        if self.training and self.keep is None and earlier.kept is None:
            draws = tuple((crosses, place) for crosses, place in torch.rand(len(self.ranks), 2).tolist())
        return Routed(x, draws)

    def read(self, state: Routed, site: Site) -> Read:
        # the slot puts the keys and values of a mixer there
        return Read(state.x, carry=[])

    def slot(self, state: Routed, site: Site, read: Read) -> Slot | None:
        if state.draws is None:
            return None
        crosses, place = state.draws[self.ranks[site.index]]
        crossed = crosses < self.p_cross and state.pairs
        return Taken(state.pairs[int(place * len(state.pairs))] if crossed else None, read.carry)

    def write(self, state: Routed, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Routed:
        return state._replace(x=state.x + y, pairs=(*state.pairs, *read.carry))

    def readout(self, state: Routed) -> torch.Tensor:
        return state.x

    def change(self, state: Routed, function: Callable[[torch.Tensor], torch.Tensor]) -> Routed:
        return state._replace(x=function(state.x))

    def combine(self, states: Sequence[Routed], weights: Sequence[float | torch.Tensor]) -> Routed:
        entry, *others = states
        pairs = tuple(pair for other in others for pair in other.pairs[len(entry.pairs) :])
        x = super().combine([state.x for state in states], weights)
        return entry._replace(x=x, pairs=entry.pairs + pairs)
