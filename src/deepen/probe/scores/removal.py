"""Removal: how much worse the model predicts the text without one visit, or without one of its parts.

    removal = nll without - nll, nats a token = log of the ratio of the perplexities        0 for one that does nothing

A layer is skipped: its output is its input. A part is left out: it adds nothing, and what comes after it in the layer
reads the stream without it. Visits before the one removed are answered from the whole model's pass.

Kim et al., Shortened LLaMA: Depth Pruning for Large Language Models, arXiv:2402.02834.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepen.probe.scores.base import Column, PassScore, Result, column
from deepen.probe.scores.reading import require_finite
from deepen.registry import method

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deepen.probe.scores.reading import Reading
    from deepen.probe.scores.replay import Kept


@method(
    "removal",
    family="score",
    source="arXiv:2402.02834",
    title="Shortened LLaMA: Depth Pruning for Large Language Models with Comparison of Retraining Methods",
    mechanism="rise of the log perplexity without a visit, and without each part of it",
    cost="1 + L + 2 L forward calls with the head; each starts at the visit removed, half a pass on average",
)
class Removal(PassScore):
    """Needs a causal head; parts only where the family's parts are separable."""

    needs_head = True

    def run(self, reading: Reading) -> Result:
        import torch

        from deepen.probe.scores.replay import before, keeping, standing_in

        tower = reading.visits.tower
        letters = "" if tower.parts.kind in ("whole", "single") else "af"
        base, tokens = 0.0, 0
        sums = {what: np.full(reading.depth, 0.0) for what in ("", *letters)}
        with torch.inference_mode():
            for ids, first in reading.groups():
                with keeping(reading.visits) as kept:
                    base += _nll(reading, ids, first)
                require_finite(torch.tensor(base))
                tokens += ids[:, first:].numel()
                for visit in range(reading.depth):
                    answered = before(reading.visits, kept, visit)
                    for what in sums:
                        if (module := _left(reading, kept, visit, what)) is None:
                            sums[what][visit] = np.nan
                            continue
                        with standing_in(reading.visits, {**answered, visit: module}):
                            sums[what][visit] += _nll(reading, ids, first)
                reading.step(len(ids))
        return Result(tuple(each for what, nll in sums.items() for each in _columns(what, nll, base, tokens)))


def _left(reading: Reading, kept: Kept, visit: int, what: str) -> nn.Module | None:
    """What runs in place of a visit without the part `what`, or without all; None if it has nothing else to run."""
    from deepen.checkpoint.views import without
    from deepen.probe.scores.replay import skipped

    entry = reading.visits.entries[visit]
    if not what:
        return skipped(kept, visit)
    if what not in entry.visit.parts or len(entry.visit.parts) == 1:
        return None
    return without(entry.layer, reading.visits.tower.parts, what)


def _nll(reading: Reading, ids: torch.Tensor, first: int) -> float:
    """Sum over the predicted tokens of one batch, nats."""
    import torch

    from deepen.probe.perplexity import token_losses

    logits = reading.run(ids, head=True).logits
    return token_losses(logits[:, first - 1 : -1], ids[:, first:]).sum(dtype=torch.float64).item()


def _columns(what: str, nll: np.ndarray, base: float, tokens: int) -> list[Column]:
    name = f"removal.{what}" if what else "removal"
    whose = f"part {what} of the visit" if what else "the visit"
    rise = column(name, (nll - base) / tokens, "high", f"rise of the log perplexity without {whose}", tokens)
    with np.errstate(over="ignore"):
        left = np.exp(nll / tokens)
    return [rise, column(f"{name}.perplexity", left, "neither", f"perplexity without {whose}", tokens)]
