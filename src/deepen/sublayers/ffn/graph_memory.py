"""The graph memory cell: a token moves from a place in a graph of F learned centroids to another.

    u ──── w_s: centroids near u ──┬── P, edges ── + ── softmax ── w_t ──╮
      ╰─── W_q u . W_k C ──────────│────────────── ╯                    (w_t - w_s) C ── norm ── * g ── y
                                   ╰────────────────────────────────────╯

    w_s = softmax(1 / max(1 - cos(u, C), 0.01) / tau)          the source
    w_t = softmax(w_s P + (W_q u)(W_k C)^T / sqrt(n))          the target; P: softmax of edges over others, by rows
    y   = sigmoid(gate) norm(w_t C - w_s C)                    C normalised by its own norm

tau falls from 1 to 0.1 over `steps`, and is 0.1 in evaluation. The centroids also learn without gradients: each moves
towards the mean of the tokens nearest to it, centroids that became equal or that no token uses begin anew at a token.
That upkeep happens when the next step of training begins, from what the passes since the last one collected, so that a
pass leaves all parameters as they are (R: the paper does it in the pass).

Source: Zanarini, Ferrari and Lamma, Graph Memory Transformer, arXiv:2604.23862.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import e
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Sizes
from deepen.sublayers.linear import linear

WARM, COLD, NEAREST = 1.0, 0.1, 0.01
# Of the upkeep: the decay of usage, and when centroids are equal, old enough to be merged, or unused.
DECAY, EQUAL, AGE, UNUSED = 0.99, 0.95, 100, 1e-3
# Coefficients of the losses; the entropy, in nats, that rows of edges should have.
WEIGHTS = {"track": 1.0, "ortho": 0.05, "cluster": 0.3, "edge_entropy": 0.1, "edge_contrast": 0.5}
ENTROPY = 4.0


@method(
    "graph-memory",
    family="ffn",
    source="arXiv:2604.23862",
    title="GMT: Graph Memory Transformer",
    mechanism="y = g norm(w_t C - w_s C): from the centroids near a token to those that edges and a query lead to",
    cost="3 F D + F^2 + n D of a token, instead of the two matrices of a feed-forward; the paper finds it worse",
)
class GraphMemory(FeedForward):
    """A cell of F centroids, the hidden width, with edges between them.

    Args:
        sizes: with the number of centroids as hidden width.
        key_width: n, of queries and keys.
        steps: of training, over which tau falls.
        upkeep: whether centroids also follow tokens.
    """

    outputs: ClassVar[Mapping[str, int]] = {"norm.weight": 0, "norm.bias": 0}
    dead: ClassVar[Mapping[str, str]] = {"momentum": "it is read by the loss of tracking alone, in training"}
    marks: ClassVar[Mapping[str, str]] = {
        "C": "source, edges, target, the schedule of tau, the upkeep and all losses with their coefficients",
        "N": "shares sum to 1; no centroid leads to itself; y has the statistics of its norm; 314,370 parameters",
        "R": "it reads the normalised input, and follows that plus y, not the block's output; upkeep between steps",
    }  # fmt: skip

    step: torch.Tensor
    usage: torch.Tensor
    age: torch.Tensor
    sums: torch.Tensor
    recent: torch.Tensor
    counts: torch.Tensor
    used: torch.Tensor
    seen: torch.Tensor

    def __init__(
        self,
        sizes: Sizes,
        *,
        key_width: Annotated[int, Field(ge=1)] = 128,
        steps: Annotated[int, Field(ge=1)] = 1000,
        upkeep: bool = True,
    ) -> None:
        super().__init__(sizes)
        count, width = sizes.hidden, sizes.width
        if count < 2:
            raise UsageError(f"a graph needs 2 centroids or more for an edge, got hidden: {count}")
        self.steps, self.upkeep = steps, upkeep
        self.centroids = nn.Parameter(torch.empty(count, width))
        self.edges = nn.Parameter(torch.empty(count, count))
        self.query = nn.Linear(width, key_width, bias=False)
        self.key = nn.Linear(width, key_width, bias=False)
        self.gate, self.momentum = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        self.centroid_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for name in ("step", "age", "seen"):
            self.register_buffer(name, torch.zeros(count if name == "age" else (), dtype=torch.long))
        for name in ("usage", "counts", "used"):
            self.register_buffer(name, torch.zeros(count))
        # sums of the tokens nearest to each centroid, and tokens of the last pass, where centroids begin anew
        for name in ("sums", "recent"):
            self.register_buffer(name, torch.zeros(count, width))

    @classmethod
    def usual_hidden(cls, width: int, **options: Any) -> float:
        return 128.0

    def reset(self) -> None:
        with torch.no_grad():
            self.centroids.copy_(F.normalize(torch.randn_like(self.centroids), dim=-1))
            nn.init.normal_(self.edges)
            nn.init.ones_(self.gate)
            nn.init.constant_(self.momentum, 4.6)
            for norm in (self.centroid_norm, self.norm):
                norm.reset_parameters()
            for buffer in (self.step, self.age, self.seen, self.counts, self.used, self.sums, self.recent):
                buffer.zero_()
            self.usage.fill_(1 / len(self.usage))

    def forward(self, read: Read, context: Context) -> Out:
        u = read.u
        centroids = self.centroid_norm(self.centroids)
        source, edges = self.source(u, centroids), self.transitions()
        query, key = linear(self, "query", u, context), linear(self, "key", centroids, context)
        target = torch.softmax(source @ edges + query @ key.T / self.query.out_features**0.5, dim=-1)
        place = source @ centroids
        y = torch.sigmoid(self.gate) * self.norm(target @ centroids - place)
        if not self.training:
            return Out(y)
        valid = torch.ones_like(u[..., 0], dtype=torch.bool) if context.valid is None else context.valid
        weights = (valid / valid.sum().clamp(min=1)).to(u.dtype)
        mean = torch.einsum("bt,btf->f", weights, source)
        output = (u + y).detach()
        self._collect(output, source.detach(), mean.detach(), valid)
        error = (output - place).square().mean(-1)
        track = (1 - torch.sigmoid(self.momentum)) * (weights * error).sum()
        losses = {"track": track, **self.shape_losses(mean, edges)}
        return Out(y, {name: WEIGHTS[name] * loss for name, loss in losses.items()}, {"usage": mean.detach()})

    def source(self, u: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
        """w_s: u (..., D) and normalised centroids (F, D) -> (..., F)."""
        wide = torch.promote_types(u.dtype, torch.float32)
        near = F.normalize(u.to(wide), dim=-1) @ F.normalize(centroids.to(wide), dim=-1).T
        return torch.softmax(1 / (1 - near).clamp(min=NEAREST) / self.temperature(), dim=-1).to(u.dtype)

    def transitions(self) -> torch.Tensor:
        """P: (F, F), rows that sum to 1 with a zero diagonal."""
        itself = torch.eye(len(self.edges), dtype=torch.bool, device=self.edges.device)
        return self.edges.masked_fill(itself, -torch.inf).softmax(-1)

    def temperature(self) -> torch.Tensor | float:
        """The temperature of this step; the last one in evaluation."""
        if not self.training:
            return COLD
        progress = (self.step / self.steps).clamp(max=1)
        return WARM * (COLD / WARM) ** torch.log1p(progress * (e - 1))

    def shape_losses(self, mean: torch.Tensor, edges: torch.Tensor) -> dict[str, torch.Tensor]:
        """What keeps centroids and rows of edges apart and in use: mean shares of the sources (F,), P (F, F)."""
        count = len(mean)
        perplexity = _entropy(mean).exp().clamp(min=1)
        return {
            "ortho": _apart(self.centroids, 2),
            "cluster": (count / 4 / perplexity - 1).clamp(min=0),
            "edge_entropy": (ENTROPY - _entropy(edges)).clamp(min=0).mean(),
            "edge_contrast": _apart(edges, 1),
        }

    @torch.no_grad()
    def _collect(self, output: torch.Tensor, source: torch.Tensor, mean: torch.Tensor, valid: torch.Tensor) -> None:
        """Adds the tokens of a pass to what the next upkeep reads."""
        nearest = source.argmax(-1).flatten()
        own = F.one_hot(nearest, len(self.counts)).to(output.dtype) * valid.flatten().unsqueeze(1)
        flat = output.flatten(0, -2)
        self.sums += own.T @ flat
        self.recent.copy_(flat[torch.arange(len(own[0]), device=flat.device) % len(flat)])
        self.counts += own.sum(0)
        self.used += mean
        self.seen += 1

    def set_step(self, step: int) -> None:
        self.step.fill_(step)
        if self.upkeep and bool(self.seen):
            # seeded by the step, so that a run which is resumed does the same
            self._keep_up(torch.Generator().manual_seed(step))

    @torch.no_grad()
    def _keep_up(self, generator: torch.Generator) -> None:
        """Moves, merges and renews centroids by what was collected."""
        self.usage.mul_(DECAY).add_((1 - DECAY) * self.used / self.seen)
        self.age += 1
        m, any_ = torch.sigmoid(self.momentum), self.counts.unsqueeze(1) > 0
        mean = self.sums / self.counts.clamp(min=1).unsqueeze(1)
        moved = torch.where(any_, m * self.centroids + (1 - m) * mean, self.centroids)
        self.centroids.copy_(F.normalize(moved, dim=-1))
        self._renew(self._merged(), generator)
        self._renew(self.usage < UNUSED, generator)
        for buffer in (self.seen, self.counts, self.used, self.sums):
            buffer.zero_()

    def _merged(self) -> torch.Tensor:
        """Which centroids are the less used one of two equal ones that are old enough: (F,)."""
        old = self.age >= AGE
        equal = (self.centroids @ self.centroids.T > EQUAL) & old & old.unsqueeze(1)
        less = self.usage.unsqueeze(1) < self.usage
        tied = (self.usage.unsqueeze(1) == self.usage) & torch.ones_like(equal).tril(-1)
        return (equal & (less | tied)).any(1)

    def _renew(self, which: torch.Tensor, generator: torch.Generator) -> None:
        """Begins centroids anew at tokens, or in any direction where most are to be renewed."""
        count = len(which)
        picked = torch.randint(count, (count,), generator=generator)
        drawn = torch.randn(self.centroids.shape, generator=generator)
        tokens = self.recent[picked.to(which.device)] if int(which.sum()) <= count / 2 else drawn.to(self.centroids)
        self.centroids.copy_(torch.where(which.unsqueeze(1), F.normalize(tokens, dim=-1), self.centroids))
        self.usage.masked_fill_(which, 1 / count)
        self.age.masked_fill_(which, 0)

    def flops(self, tokens: int) -> float:
        count, width, inner = self.sizes.hidden, self.sizes.width, self.query.out_features
        each = 3 * count * width + count**2 + inner * (width + count)
        return 2.0 * (tokens * each + count * width * inner)


def _apart(rows: torch.Tensor, power: int) -> torch.Tensor:
    """The mean over pairs of rows of their cosine to a power."""
    cosines = F.normalize(rows, dim=-1) @ F.normalize(rows, dim=-1).T
    others = 1 - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    return (cosines**power * others).sum() / others.sum()


def _entropy(shares: torch.Tensor) -> torch.Tensor:
    """In nats, over the last axis; shares of 0 have no gradient."""
    return torch.special.entr(shares.clamp(min=1e-30)).sum(-1)
