"""Deep Delta Learning with several values a channel: n streams, each changed along the same direction.

    u   = sum_j r_j Conv(X)_j             X: n streams of (T, D), at first copies of the embedding
    k   = F(norm(u)) / |F(norm(u))|
    X_j' = X_j + b (v_j - k . X_j) k      b as in `deep_delta.py`; v = 4 sigmoid(RMSNorm(u) W + c): n values

    X_1 ─┬─ Conv ─┐
    ...  │        ├─ r ── u ── norm ── F ── unit ── k
    X_n ─┴─ Conv ─┘
    X_j ────────────────────────── + b (v_j - k . X_j) k ── X_j'

Conv looks at 4 tokens, itself included, with a weight for each channel of each stream, so a cache holds the streams of
the last 3 tokens at each site. Padding counts as the zeros before a sequence. r begins at 1 / n. The final norm sees a
sum of the same form with its own weights; marks, gates and hooks see that sum without its convolution (R). Conv begins
as the token itself, and W and c at 0 (R). Parameters belong to sites.

Source: Zhang et al., Deep Delta Learning, arXiv:2601.00417.
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
from deepen.wiring.deep_delta import Strength, direction
from deepen.wiring.entries import FIXED, SITE, Entries, listed, numbered, rows
from deepen.wiring.streams import along_streams, copies, each

# Tokens that the convolution sees.
KERNEL = 4


class Values(NamedTuple):
    """The streams (B, T, n, D), and what is known of earlier tokens."""

    x: torch.Tensor
    earlier: Earlier


@method(
    "deep-delta-matrix",
    family="wiring",
    source="arXiv:2601.00417",
    title="Deep Delta Learning",
    mechanism="n streams changed along one direction k; read through a convolution of 4 tokens",
    cost="about 8 n multiply-adds a channel and site; n streams, and a cache of 3 tokens of them a site",
)
class DeepDeltaMatrix(Wiring):
    """The stream of n values a channel.

    Args:
        shape: what it is built for.
        values: n.
        start: b at first.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, the kernel of 4, r = 1 / n, b = 1 at first",
        "N": "what stands along k afterwards, and that the rest stays",
        "R": "initial convolution, W and c; what marks, gates and hooks see",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        values: Annotated[int, Field(ge=1)] = 4,
        start: Annotated[float, Field(gt=0, lt=2)] = 1.0,
    ) -> None:
        super().__init__(shape)
        self.values = values
        sites, width = len(shape.sites), shape.width
        self.strength = Strength(shape, start)
        # Of every site, and of the end.
        self.kernels = nn.ParameterList(nn.Parameter(torch.empty(KERNEL, values, width)) for _ in range(sites + 1))
        self.shares = nn.Parameter(torch.empty(sites + 1, values))
        self.value_weight = nn.Parameter(torch.empty(sites, width, values))
        self.value_bias = nn.Parameter(torch.empty(sites, values))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        sites, end = numbered(SITE, len(self.shape.sites)), (FIXED, 0)
        names = ("strength.weight", "strength.bias", "value_weight", "value_bias")
        return rows(sites, *names) | rows([*sites, end], "shares") | listed([*sites, end], "kernels")

    def reset(self) -> None:
        self.strength.reset()
        for kernel in self.kernels:
            nn.init.zeros_(kernel)
            kernel.data[-1] = 1
        nn.init.constant_(self.shares, 1 / self.values)
        nn.init.zeros_(self.value_weight)
        nn.init.zeros_(self.value_bias)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Values:
        return Values(copies(x, self.values), earlier)

    def read(self, state: Values, site: Site) -> Read:
        return Read(self._compressed(state, site.index))

    def write(self, state: Values, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Values:
        x, k, u = state.x, direction(y), read.u
        normed = F.rms_norm(u, u.shape[-1:], eps=self.shape.eps)
        targets = 4 * torch.sigmoid(normed @ self.value_weight[site.index] + self.value_bias[site.index])
        changes = self.strength(u, site) * (targets - (x @ k.unsqueeze(-1)).squeeze(-1))
        return Values(x + changes.to(x.dtype).unsqueeze(-1) * k.unsqueeze(-2), state.earlier)

    def readout(self, state: Values) -> torch.Tensor:
        return self.shares[-1] @ state.x

    def finish(self, state: Values) -> torch.Tensor:
        return self._compressed(state, len(self.shape.sites))

    def change(self, state: Values, function: Callable[[torch.Tensor], torch.Tensor]) -> Values:
        return Values(each(state.x, function), state.earlier)

    def combine(self, states: Sequence[Values], weights: Sequence[float | torch.Tensor]) -> Values:
        mixed = super().combine([state.x for state in states], [along_streams(weight) for weight in weights])
        return Values(mixed, states[0].earlier)

    def _compressed(self, state: Values, index: int) -> torch.Tensor:
        """The convolved streams, summed over n: (B, T, D)."""
        x, earlier = state.x, state.earlier
        kernel, length = self.kernels[index], x.shape[1]
        before = earlier.held.get(index)
        if before is None:
            before = x.new_zeros(x.shape[0], KERNEL - 1, *x.shape[2:])
        real = x if earlier.valid is None else x.where(earlier.valid[..., None, None], 0)
        seen = torch.cat([before, real], dim=1)
        if earlier.kept is not None:
            earlier.kept[index] = seen[:, length:]
        convolved = x * kernel[-1]
        for tap in range(KERNEL - 1):
            convolved = convolved + seen[:, tap : tap + length] * kernel[tap]
        return self.shares[index] @ convolved
