"""MUDDFormer: queries, keys, values and stream of a visit are separate, token-dependent mixes of all earlier outputs.

    A   = GELU(RMSNorm(X_i) W_1) W_2 + a            (4, i + 1) a token: ways q, k, v, r over the sources
    U^c = sum over j <= i of A^c_j X_j              X_0: embedding, X_j: what visit j - 1 left; no softmax
    X'  = U^r + Attention(norm(U^q), norm(U^k), norm(U^v))
    X_i+1 = X' + F(norm(X'))

    X_0 ─┐        ┌─ U^q, U^k, U^v ── norm ── attention ──┐
    ...  ├── A ───┤                                       │
    X_i ─┘        └─ U^r ──────────────────────────────── + ── X' ──┬── norm ── F ── + ── X_i+1
                                                                    └────────────────┘

After the last visit there is one way, which the final norm reads; before the first visit there is only X_0. W_1 has
C (i + 1) columns for C ways, four times as many after the last visit, rounded up to 64. W_2 is 0 at first and `a` is 1
for the newest source, so that the model is Pre-LN. With one way (`ways: 1`) all four are the same mix. The three reads
share the norm of the layer. A visit that has no mixer needs one way. W_1, W_2 and `a` belong to visits. Norms of the
sources and a feed-forward that widens with depth are options of the paper that are not built.

Source: Xiao et al., MUDDFormer, arXiv:2502.12170.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring, wide
from deepen.wiring.entries import FIXED, SOURCE, VISIT, Entries, Label, numbered
from deepen.wiring.history import History


class Ways(NamedTuple):
    """What a visit reads, each (B, T, D): one for all, or q, k, v and r; and what the visits so far left."""

    ways: tuple[torch.Tensor, ...]
    history: History


class Mix(nn.Module):
    """The mixes of the sources after a visit.

    Args:
        shape: what it is built for.
        sources: i + 1.
        ways: C.
        last: whether it stands after the last visit.
    """

    def __init__(self, shape: Shape, sources: int, ways: int, last: bool) -> None:
        super().__init__()
        hidden = ways * sources * (4 if last else 1)
        self.ways, self.eps = ways, shape.eps
        self.read = nn.Parameter(torch.empty(shape.width, (hidden // 64 + 1) * 64))
        self.give = nn.Parameter(torch.empty((hidden // 64 + 1) * 64, ways * sources))
        self.fixed = nn.Parameter(torch.empty(ways, sources))
        self.reset()

    def reset(self) -> None:
        nn.init.normal_(self.read, std=self.read.shape[0] ** -0.5)
        nn.init.zeros_(self.give)
        nn.init.zeros_(self.fixed)
        self.fixed.data[:, -1] = 1

    def forward(self, history: History) -> tuple[torch.Tensor, ...]:
        newest = history.sources[-1]
        moved = F.gelu(F.rms_norm(newest, newest.shape[-1:], eps=self.eps) @ self.read) @ self.give
        # (C, i + 1, B, T)
        shares = wide(moved).unflatten(-1, self.fixed.shape).permute(2, 3, 0, 1) + wide(self.fixed)[..., None, None]
        return tuple(history.mix(share) for share in shares)


@method(
    "muddformer",
    family="wiring",
    source="arXiv:2502.12170",
    title="MUDDFormer: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense Connections",
    mechanism="queries, keys, values and stream read separate token-dependent mixes of all earlier outputs",
    cost="about 8 i multiply-adds a channel and token after visit i, for the weights and for the mixes; "
    "the outputs of all visits are kept",
)
class MUDDFormer(Wiring):
    """Mixes of earlier outputs in several ways.

    Args:
        shape: what it is built for.
        ways: 4, or 1 for queries, keys, values and stream alike.
    """

    equals = "Pre-LN: each way takes the newest output alone"
    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its weights belong to one sequence of visits, and branches have none",
        "scale": "the outputs that it keeps are those of visits, and a damped stretch is none",
        "gate": "the outputs that it keeps are those of visits, and a gated stretch is none",
        "n..m": "a skipped turn leaves no output, but the newest output has weights of its own",
        "kv": "a visit that shares a slot would never use its mixes for keys and values",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, sizes, W_2 = 0 and `a` one-hot at first",
        "N": "the equality with Pre-LN, and DenseFormer where one way has fixed weights",
        "R": "W_1 at first, one norm for the three reads, visits as blocks, entries and injections act on every way",
    }

    def __init__(self, shape: Shape, *, ways: Literal[1, 4] = 4) -> None:
        super().__init__(shape)
        parts: dict[int, str] = {}
        for site in shape.sites:
            parts[site.visit] = parts.get(site.visit, "") + site.part
        self.last = {site.index for site, after in zip(shape.sites, [*shape.sites[1:], None], strict=True)
                     if after is None or after.visit != site.visit}  # fmt: skip
        self.mixes = nn.ModuleList(
            Mix(shape, visit + 2, ways if "a" in parts.get(visit + 1, "") else 1, visit + 1 == shape.visits)
            for visit in range(shape.visits)
        )

    def entries(self) -> Mapping[str, Entries]:
        found: dict[str, Entries] = {}
        for visit, mix in enumerate(self.mixes.children()):
            ways, sources = mix.get_parameter("fixed").shape
            # the one way stands for the last of four
            kinds: list[Label] = [(FIXED, way) for way in range(4 - ways, 4)]
            hidden = numbered(FIXED, mix.get_parameter("read").shape[1])
            each = [(SOURCE, source, *kind) for kind in kinds for source in range(sources)]
            owner = (VISIT, visit)
            found[f"mixes.{visit}.read"] = Entries("read", owner, (None, hidden))
            found[f"mixes.{visit}.give"] = Entries("give", owner, (hidden, each), fresh=0)
            found[f"mixes.{visit}.fixed"] = Entries("fixed", owner, (kinds, numbered(SOURCE, sources)), fresh=0)
        return found

    def reset(self) -> None:
        for mix in self.mixes.children():
            mix.reset()  # pyright: ignore[reportCallIssue]

    def init(self, x: torch.Tensor, earlier: Earlier) -> Ways:
        return Ways((x,), History.start(x, self.shape.visits + 1))

    def read(self, state: Ways, site: Site) -> Read:
        if len(state.ways) == 1:
            return Read(state.ways[0], carry=state.ways[0])
        q, k, v, r = state.ways
        return Read(q, k, v, carry=r)

    def write(self, state: Ways, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Ways:
        x = read.carry + y
        if site.index not in self.last:
            return Ways((x,), state.history)
        history = state.history.push(x)
        return Ways(self.mixes[site.visit](history), history)

    def readout(self, state: Ways) -> torch.Tensor:
        return state.ways[-1]

    def change(self, state: Ways, function: Callable[[torch.Tensor], torch.Tensor]) -> Ways:
        return Ways(tuple(function(way) for way in state.ways), state.history)
