"""Cross-Layer Attention: visits that mix tokens share keys and values in groups of `share`.

    visit 0: K, V = its own          visit 1 .. share - 1: K, V of visit 0          visit `share`: its own ...

    x ── norm ── W_q ── Attention ── W_o ── + x
                        K, V of the group's first visit ─┘

The layers are Pre-LN. The cache has a `share`-th of the slots. Rows of keys and values of a layer that only reads are
never used and get no gradient; they stay in its matrix, so that a program can give the layer another role.

Source: Brandon et al., Reducing Transformer Key-Value Cache Size with Cross-Layer Attention, arXiv:2405.12981.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from deepen.program import Plan
from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring


@method(
    "cross-layer-attention",
    family="wiring",
    source="arXiv:2405.12981",
    title="Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
    mechanism="groups of visits share the keys and values of their first",
    cost="a share-th of the cache; no keys and values in the other visits",
)
class CrossLayerAttention(Wiring):
    """Pre-LN with shared keys and values.

    Args:
        shape: what it is built for.
        share: visits of a group; 1 is Pre-LN, bit for bit.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "n..m": "a skipped turn may hold the visit whose keys and values a later visit reads",
        "kv": "it decides itself which visits share keys and values",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the grouping",
        "N": "Pre-LN with share=1; no gradient in unused rows",
        "R": "groups count visits, so turns of a loop and branches are members too",
    }

    def __init__(self, shape: Shape, *, share: Annotated[int, Field(ge=1)] = 2) -> None:
        super().__init__(shape)
        self.share = share

    def plan(self, plan: Plan) -> Plan:
        rank, visits = 0, []
        for visit in plan.visits:
            if visit.slot is not None:
                visit = replace(visit, slot=rank // self.share, writes=rank % self.share == 0)
                rank += 1
            visits.append(visit)
        return replace(plan, visits=tuple(visits), slots=-(-rank // self.share))

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + y
