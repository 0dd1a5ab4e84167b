"""Angular distance: how far a block of n visits turns the stream, at the last token of a window.

    d(l, n) = arccos( cos(h_l, h_{l+n}) ) / pi        h_l: stream before visit l; 0 the same direction, 1 opposite

The block with the smallest distance is the one that the published rule drops. Only the last token counts, in fp64.
Where the program has groups, h_{l+n} is what visit l+n-1 returned.

Gromov et al., The Unreasonable Ineffectiveness of the Deeper Layers, arXiv:2403.17887.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepen.probe.scores.base import Matrix, Result, WatchScore, column
from deepen.probe.scores.reading import exact, open_reading, require_finite, watching
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.probe.scores.collect import Seen


class BlockDistances:
    """Streaming mean of the distances of every block.

    Args:
        depth: the number of visits.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.windows = depth, 0
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []
        self.total = np.zeros((depth, depth + 1))

    def watch(self, visit: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Takes the stream around one visit, [b, t, d]; after the last visit of a pass the batch is added."""
        self.before.append(exact(before[:, -1]).double())
        self.after.append(exact(after[:, -1]).double())
        if visit == self.depth - 1:
            self._add()

    def _add(self) -> None:
        import torch

        after = torch.stack(self.after)
        require_finite(after)
        for start, stream in enumerate(self.before):
            turned = angle(stream, after[start:]).sum(-1).cpu().numpy() / np.pi
            self.total[start, 1 : len(turned) + 1] += turned
        self.windows += after.shape[1]
        self.before.clear()
        self.after.clear()

    def mean(self) -> np.ndarray:
        """D[l, n], [L, L + 1]; NaN where the block would reach beyond the last visit."""
        start, size = np.indices(self.total.shape)
        return np.where(start + size > self.depth, np.nan, self.total / self.windows)


@method(
    "angular",
    family="score",
    source="arXiv:2403.17887",
    title="The Unreasonable Ineffectiveness of the Deeper Layers",
    mechanism="angle between the stream before and after a block of visits, at the last token",
    cost="shares one pass without the head",
)
class Angular(WatchScore):
    """The distance over each visit alone, and over every block."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.blocks = BlockDistances(depth)

    def watch(self, seen: Seen) -> None:
        self.blocks.watch(seen.visit, seen.before.values, seen.after.values)

    def result(self) -> Result:
        mean = self.blocks.mean()
        meaning = "angle the stream turns by at the last token, in half turns"
        return Result(
            (column("angular", mean[:, 1], "high", meaning, self.blocks.windows),),
            (Matrix(name="angular", values=mean, rows="first visit", columns="visits of the block", meaning=meaning),),
        )


def angle(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The angle between vectors, [..., d] and [..., d], in radians.

    Half angles keep it exact at both ends, where the arc cosine of a rounded cosine is not.
    """
    import torch
    from torch.nn.functional import normalize

    one, other = normalize(one, dim=-1), normalize(other, dim=-1)
    return 2 * torch.atan2((one - other).norm(dim=-1), (one + other).norm(dim=-1))


def block_distances(
    ck: Checkpoint,
    text: str,
    *,
    tower: str = "",
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    dtype: Any = None,
) -> np.ndarray:
    """The mean angular distance D[l, n] over every block of n visits from visit l, [L, L + 1].

    Args:
        ck: what to score.
        text: what to read.
        tower: the tower whose visits are scored; the empty name means the default one.
        context: tokens of a window; the last token of each is compared.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files.

    Returns:
        Shares of a half turn, from 0 to 1; NaN where l + n is more than L.

    Raises:
        FamilyError: no such tower, or the model does not read text.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window, or the stream is not finite.
    """
    import torch

    reading = open_reading(
        ck, text, tower=tower, context=context, tokens=tokens, batch=batch, device=device, dtype=dtype
    )
    found = BlockDistances(reading.depth)
    watcher = lambda visit, before, after, written: found.watch(visit, before, after)  # noqa: E731
    with torch.inference_mode(), watching(reading.visits, watcher):
        for ids, _ in reading.groups():
            reading.run(ids)
    return found.mean()
