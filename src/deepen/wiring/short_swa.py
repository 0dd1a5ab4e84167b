"""ShortSWA: before the mixer of a visit, attention over the last w tokens, as a residual of its own.

    S  = H + W_o SWA(norm(H); w)          a token sees itself and the w - 1 tokens before it
    A  = S + Attention(norm(S))
    H' = A + F(norm(A))

    H ──┬── norm ── SWA, w tokens ── + ── S ──┬── norm ── attention ── + ── A ──┬── norm ── F ── + ── H'
        └────────────────────────────┘        └────────────────────────┘        └────────────────┘

What the paper calls the duality of the residual stream is a statement, not a layer: attention over the last K layers
for one token is attention with a window of K along the axis of layers. `windowed` below is that one routine, on
whichever axis stands second. The paper recommends the axis of tokens, and gives neither w nor heads nor positions:
here w is 128, there are as many heads as the mixer has, each with keys of its own, without rotary positions, and W_o
is 0 at first (R). The parameters belong to the sites of mixers. A cache holds keys and values of w - 1 tokens at each.
A mask stands in the place of a kernel for windows, so that a pass costs as much as full attention (R).

Source: Zhang, Residual Stream Duality, arXiv:2603.16039.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import SITE, Entries, Label, listed, rows

# Where the padding among earlier tokens is kept, which is the same at every site.
PADDING = -1


class Window(NamedTuple):
    """The stream x: (B, T, D), and what is known of earlier tokens."""

    x: torch.Tensor
    earlier: Earlier


def windowed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention over the last `window` places of the second axis: (B, T, H, d).

    Args:
        q: (B, T, H, d), the last T of S places.
        k: (B, S, H, d).
        v: (B, S, H, d).
        window: how many places a query sees, its own included.
        valid: (B, S), which places are no padding; None when all are.
    """
    places = torch.arange(k.shape[1], device=q.device)
    behind = places[k.shape[1] - q.shape[1] :, None] - places
    mask = ((behind >= 0) & (behind < window))[None, None]
    if valid is not None:
        mask = mask & valid[:, None, None] | (behind == 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@method(
    "short-swa",
    family="wiring",
    source="arXiv:2603.16039",
    title="Residual Stream Duality",
    mechanism="attention over the last few tokens before the mixer of each visit, as a residual of its own",
    cost="4 H d D parameters and multiply-adds a visit and 2 H d a token in the window; a cache of w - 1 tokens",
)
class ShortSWA(Wiring):
    """Pre-LN with a short window before each mixer.

    Args:
        shape: what it is built for.
        window: w, in tokens.
    """

    equals = "Pre-LN: the outputs of the short windows are 0"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the three equations, and that a read along depth is a window along the axis of layers",
        "N": "that statement, the equality with Pre-LN, the window written out",
        "R": "w, heads, no rotary positions, initial values, the mask",
    }

    def __init__(self, shape: Shape, *, window: Annotated[int, Field(ge=1)] = 128) -> None:
        super().__init__(shape)
        self.window = window
        inner = shape.heads * shape.head_width
        mixers = [site.index for site in shape.sites if site.part == "a"]
        self.ranks = {index: rank for rank, index in enumerate(mixers)}
        self.gains = nn.Parameter(torch.empty(len(mixers), shape.width))
        self.reads = nn.ParameterList(nn.Parameter(torch.empty(3 * inner, shape.width)) for _ in mixers)
        self.gives = nn.ParameterList(nn.Parameter(torch.empty(shape.width, inner)) for _ in mixers)
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        mixers: list[Label] = [(SITE, site) for site in self.ranks]
        return rows(mixers, "gains") | listed(mixers, "reads", "gives")

    def reset(self) -> None:
        nn.init.ones_(self.gains)
        for map_ in self.reads:
            nn.init.normal_(map_, std=self.shape.width**-0.5)
        for map_ in self.gives:
            nn.init.zeros_(map_)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Window:
        if earlier.kept is not None and (valid := self._valid(earlier)) is not None:
            earlier.kept[PADDING] = self._recent(valid)
        return Window(x, earlier)

    def read(self, state: Window, site: Site) -> Read:
        x = state.x
        if site.part == "a":
            x = x + self._short(x, state.earlier, site.index)
        return Read(x, carry=x)

    def write(self, state: Window, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Window:
        return Window(read.carry + y, state.earlier)

    def readout(self, state: Window) -> torch.Tensor:
        return state.x

    def change(self, state: Window, function: Callable[[torch.Tensor], torch.Tensor]) -> Window:
        return Window(function(state.x), state.earlier)

    def combine(self, states: Sequence[Window], weights: Sequence[float | torch.Tensor]) -> Window:
        return Window(super().combine([state.x for state in states], weights), states[0].earlier)

    def _short(self, x: torch.Tensor, earlier: Earlier, index: int) -> torch.Tensor:
        """The update of the short window of a site: (B, T, D)."""
        rank = self.ranks[index]
        normed = F.rms_norm(x, x.shape[-1:], self.gains[rank], self.shape.eps)
        q, k, v = F.linear(normed, self.reads[rank]).unflatten(-1, (3, self.shape.heads, -1)).unbind(2)
        pairs = torch.stack([k, v], dim=2)
        if (held := earlier.held.get(index)) is not None:
            pairs = torch.cat([held, pairs], dim=1)
        if earlier.kept is not None:
            earlier.kept[index] = self._recent(pairs)
        keys, values = pairs.unbind(2)
        y = windowed(q, keys, values, self.window, self._valid(earlier))
        return F.linear(y.flatten(2), self.gives[rank])

    def _valid(self, earlier: Earlier) -> torch.Tensor | None:
        """Which of the tokens held and of the new ones are no padding; None when all are."""
        new = earlier.valid
        if new is None:
            return None
        held = earlier.held.get(PADDING)
        if held is None and earlier.held:
            # those before were given without padding
            held = new.new_ones(len(new), next(iter(earlier.held.values())).shape[1])
        return new if held is None else torch.cat([held, new], dim=1)

    def _recent(self, seen: torch.Tensor) -> torch.Tensor:
        """What the next pass can see of tokens on the second axis."""
        return seen[:, max(0, seen.shape[1] - self.window + 1) :]
