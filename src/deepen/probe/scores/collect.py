"""One pass that feeds every score that only watches the stream.

    visit l:  h_l ---> layer ---> h_{l+1}        each score reduces what it sees at once; no stream is kept

Norms, products and Gram matrices that several scores want are computed once a visit. Token by token statistics take
every token; Gram matrices take `SAMPLE` tokens of each window, evenly spaced after the first one, whose stream in
many models is a hundred times longer than any other and would hide the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from deepen.probe.scores.reading import Reading, exact, require_finite, watching

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.base import WatchScore

# Tokens of a window in a Gram matrix.
SAMPLE = 64


@dataclass(eq=False)
class Stream:
    """The stream at one place, with what scores want of it; computed once, in fp32 from half precision.

    Attributes:
        values: [b, t, d].
        context: tokens of a whole window; shorter windows are left out of Gram matrices.
    """

    values: torch.Tensor
    context: int

    @cached_property
    def squares(self) -> torch.Tensor:
        """|h|^2 of each token, [b, t], fp64."""
        return dot(self.values, self.values)

    @cached_property
    def gram(self) -> torch.Tensor | None:
        """Products of the sampled tokens of each window, [b, n, n], fp64; None for a window shorter than the others."""
        import torch

        tokens = self.values.shape[1]
        if tokens < self.context:
            return None
        places = torch.linspace(1, tokens - 1, min(SAMPLE, tokens - 1), device=self.values.device).round().long()
        sample = exact(self.values[:, places]).double()
        return sample @ sample.mT


@dataclass(eq=False)
class Seen:
    """What a score sees of one visit of one batch.

    Attributes:
        visit: its number.
        last: whether it is the last of the pass.
        before: the stream that the layer was given.
        after: the stream that it returned.
        written: what each part wrote to the stream, [b, t, d]; empty where parts are not separable.
        serial: whether the feed-forward reads what the mixer wrote.
    """

    visit: int
    last: bool
    before: Stream
    after: Stream
    written: dict[str, torch.Tensor]
    serial: bool

    @cached_property
    def update(self) -> torch.Tensor:
        """What the visit added to the stream, [b, t, d]."""
        return self.after.values - self.before.values

    @cached_property
    def product(self) -> torch.Tensor:
        """<h_l, h_{l+1}> of each token, [b, t], fp64."""
        return dot(self.before.values, self.after.values)


def dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Inner products of [b, t, d] and [b, t, d], [b, t]: products in fp32, the result as fp64."""
    return exact((one * other).sum(-1)).double()


def collect(reading: Reading, scores: Sequence[WatchScore]) -> str:
    """Feeds all windows to all scores in one pass without the head.

    Returns:
        Why the parts could not be watched; empty when they were, or when no score wants them.

    Raises:
        DataError: the stream is not finite.
    """
    import torch

    parts = reading.visits.tower.parts
    context = len(reading.windows[0].ids)
    note = ""
    wanted = any(score.parts for score in scores)
    if wanted and (parts.kind == "whole" or parts.post_norm):
        wanted, note = False, f"not by part: {parts.reason or 'the parts of this family are not separable'}"
    given: torch.Tensor | None = None
    last: Stream | None = None

    def watch(visit: int, before: torch.Tensor, after: torch.Tensor, written: dict[str, torch.Tensor]) -> None:
        nonlocal given, last, wanted, note
        # what one visit returned is most often what the next is given
        entering = last if last is not None and given is before else Stream(before.float(), context)
        given, last = after, Stream(after.float(), context)
        final = visit == reading.depth - 1
        seen = Seen(visit, final, entering, last, written, parts.kind == "serial")
        if wanted and not _adds_up(seen):
            wanted, note = False, "not by part: what the parts return is not what the layer adds to the stream"
        if not wanted:
            seen.written = {}
        for score in scores:
            score.watch(seen)
        if final:
            require_finite(last.squares)
            given = last = None

    with torch.inference_mode(), watching(reading.visits, watch, parts=wanted):
        for ids, _ in reading.groups():
            reading.run(ids)
            reading.step(len(ids))
    return note


def _adds_up(seen: Seen) -> bool:
    """Whether the parts' outputs sum to the update, at the last token, within what the type can hold."""
    import torch

    pieces = [seen.before.values[:, -1], *(part[:, -1].float() for part in seen.written.values())]
    coarsest = max(torch.finfo(part.dtype).eps for part in (seen.before.values, *seen.written.values()))
    size = sum(piece.norm().item() for piece in pieces)
    return (sum(pieces) - seen.after.values[:, -1]).norm().item() <= 8 * coarsest * size
