"""Attention entropy and sink: how widely a visit's heads look, and how much goes to the first token.

    entropy = mean over heads and rows of - sum_j A_ij log A_ij / log(keys that row i may see)        1: evenly spread
    sink = mean over heads and rows of A_i,first        sink.heads: share of heads where that mean is above 0.3

Rows that see one key only have no entropy. Means are over all windows.

Clark et al., What Does BERT Look At?, arXiv:1906.04341; Gu et al., When Attention Sink Emerges in Language Models,
arXiv:2410.10781.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepen.probe.scores.base import PassScore, Result, column
from deepen.probe.scores.reading import exact
from deepen.registry import method

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deepen.probe.scores.reading import Reading

# A head whose rows give the first token more than this on average has a sink there.
SINK = 0.3


@method(
    "attention",
    family="score",
    source="arXiv:2410.10781",
    title="When Attention Sink Emerges in Language Models: An Empirical View",
    mechanism="entropy of attention rows relative to the most even, and the mass on the first token",
    cost="1 pass without the head, with attention that shows its weights (eager)",
)
class Attention(PassScore):
    """Needs the weights, so the model is loaded with eager attention."""

    needs_attention = True

    def run(self, reading: Reading) -> Result:
        import torch

        from deepen.probe.scores.reading import watching

        sums, windows = np.zeros((reading.depth, 3)), np.zeros(reading.depth, dtype=np.int64)
        shown: list[torch.Tensor] = []

        def show(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if not shown and isinstance(out, (tuple, list)):
                shown.extend([each for each in out if is_attention(each)][:1])

        def reduce(visit: int, *streams: Any) -> None:
            if shown:
                weights = shown.pop()
                sums[visit] += [each.sum().item() for each in spread(weights)]
                windows[visit] += len(weights)

        handles = [
            module.register_forward_hook(show)
            for layer in reading.visits._modules.values()
            for module in (layer.modules() if layer is not None else ())
            if module is not layer
        ]
        try:
            with torch.inference_mode(), watching(reading.visits, reduce):
                for ids, _ in reading.groups():
                    reading.run(ids)
                    reading.step(len(ids))
        finally:
            for handle in handles:
                handle.remove()
        if not windows.any():
            return Result(note="skipped: no layer of this model shows attention weights")
        entropy, mass, heads = np.where(windows[:, None] > 0, sums / windows.clip(1)[:, None], np.nan).T
        count = int(windows.max())
        return Result(
            (
                column("attention", entropy, "neither", "entropy of attention, a share of the highest", count),
                column("attention.sink", mass, "neither", "share of attention on the first token", count),
                column("attention.sink.heads", heads, "neither", f"share of heads that give it over {SINK}", count),
            )
        )


def is_attention(value: Any) -> bool:
    """Whether a value is the weights of an attention over the window itself: [b, h, t, t] with rows that sum to 1."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[-1] != value.shape[-2]:
        return False
    return bool((value.float().sum(-1) - 1).abs().max() < 0.02) and bool((value >= 0).all())


def spread(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised entropy, mass on the first key and share of heads with a sink, each [b], fp64.

    Args:
        weights: [b, h, t, t].
    """
    import torch

    weights = exact(weights)
    # a key that no head of no window looks at is masked
    seen = (weights > 0).any(0).any(0).sum(-1)
    rows = seen > 1
    entropy = torch.special.entr(weights.float()).sum(-1)[..., rows] / seen[rows].log()
    first = weights[..., 0].mean(-1, dtype=torch.float64)
    return entropy.double().mean((1, 2)), first.mean(1), (first > SINK).double().mean(1)
