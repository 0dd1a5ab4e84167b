"""Contribution: how large what a visit writes is beside the stream, and in which direction it points.

    norm = mean |u| / |h|        cosine = mean cos(u, h)        u: the update, h: the stream it is added to

for the layer (u = h_{l+1} - h_l) and for each part. The feed-forward of a serial layer is held against the stream that
its mixer has already written to. Around 0 the cosine says that new features are written, below that the stream is
erased, above that it is strengthened.

Csordas, Manning, Potts, Do Language Models Use Their Depth Efficiently?, arXiv:2505.13898.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepen.probe.scores.base import Result, WatchScore, column
from deepen.probe.scores.block_influence import cosines
from deepen.probe.scores.collect import dot
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.collect import Seen

# A stream shorter than this counts as this long.
SHORTEST = 1e-6


@method(
    "contribution",
    family="score",
    source="arXiv:2505.13898",
    title="Do Language Models Use Their Depth Efficiently?",
    mechanism="norm of the update relative to the stream, and its cosine, for the layer and each part",
    cost="shares one pass without the head",
)
class Contribution(WatchScore):
    """Sums of the ratio and the cosine over all tokens; parts only where they are separable."""

    parts = True

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        # "" is the whole layer
        self.sums = {what: np.zeros((depth, 2)) for what in ("", "a", "f")}
        self.tokens = {what: np.zeros(depth, dtype=np.int64) for what in ("", "a", "f")}

    def watch(self, seen: Seen) -> None:
        before, mixer = seen.before.values, seen.written.get("a")
        self._add("", seen.visit, seen.update, before, seen.before.squares)
        if mixer is not None:
            self._add("a", seen.visit, mixer.float(), before, seen.before.squares)
        if (written := seen.written.get("f")) is not None:
            read = before + mixer.float() if mixer is not None and seen.serial else before
            squares = seen.before.squares if read is before else dot(read, read)
            self._add("f", seen.visit, written.float(), read, squares)

    def _add(self, what: str, visit: int, update: torch.Tensor, stream: torch.Tensor, squares: torch.Tensor) -> None:
        size = dot(update, update)
        ratio = size.sqrt() / squares.sqrt().clamp_min(SHORTEST)
        self.sums[what][visit] += ratio.sum().item(), cosines(dot(update, stream), size, squares).sum().item()
        self.tokens[what][visit] += ratio.numel()

    def result(self) -> Result:
        columns = []
        for what, sums in self.sums.items():
            tokens = self.tokens[what]
            if not tokens.any():
                continue
            means = np.divide(sums, tokens[:, None], out=np.full_like(sums, np.nan), where=tokens[:, None] > 0)
            name = f"contribution.{what}" if what else "contribution"
            whose = f"what part {what} writes" if what else "the update"
            count = int(tokens.max())
            norm = column(name, means[:, 0], "high", f"mean norm of {whose}, relative to the stream", count)
            cosine = column(f"{name}.cosine", means[:, 1], "neither", f"mean cosine of {whose} to the stream", count)
            columns += [norm, cosine]
        return Result(tuple(columns))
