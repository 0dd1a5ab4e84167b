"""Effects: how much skipping one visit changes what each later visit writes.

    E[s, l] = max over tokens |u_l - u_l'| / |u_l|        u_l: update of visit l, u_l': the same with visit s skipped

0 for l < s, 1 for l = s where it writes anything. The first token of a window is never skipped: in many models the
others lean on it. A visit's own value is the largest effect on any later visit; the last visit has none.

Csordas, Manning, Potts, Do Language Models Use Their Depth Efficiently?, arXiv:2505.13898.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepen.probe.scores.base import Matrix, PassScore, Result, column
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.reading import Reading


@method(
    "effects",
    family="score",
    source="arXiv:2505.13898",
    title="Do Language Models Use Their Depth Efficiently?",
    mechanism="largest relative change of each visit's update when an earlier one is skipped",
    cost="1 + L forward calls without the head; each starts at the visit skipped, half a pass on average",
)
class Effects(PassScore):
    """Works without a head."""

    def run(self, reading: Reading) -> Result:
        import torch

        from deepen.probe.scores.replay import Heard, before, keeping, runs, skipped, standing_in

        depth, entries = reading.depth, reading.visits.entries
        effects = np.zeros((depth, depth))
        with torch.inference_mode():
            for ids, _ in reading.groups():
                with keeping(reading.visits) as kept:
                    reading.run(ids)
                for skip in range(depth):

                    def compare(later: int, given: torch.Tensor, out: Any, skip: int = skip) -> None:
                        found = largest_change(kept.update(later), _update(given, out))
                        effects[skip, later] = max(effects[skip, later], found)

                    after = {
                        at: Heard(runs(entries[at]), lambda given, out, at=at: compare(at, given, out))
                        for at in range(skip + 1, depth)
                    }
                    stand_in = skipped(kept, skip, first=1)
                    compare(skip, kept.given[skip], stand_in.out)
                    with standing_in(reading.visits, {**before(reading.visits, kept, skip), skip: stand_in, **after}):
                        reading.run(ids)
                reading.step(len(ids))
        strongest = [effects[at, at + 1 :].max() if at + 1 < depth else np.nan for at in range(depth)]
        meaning = "largest relative change of the update when a visit is skipped"
        return Result(
            (column("effects", strongest, "high", f"{meaning}, over later visits", reading.tokens),),
            (Matrix(name="effects", values=effects, rows="visit skipped", columns="visit", meaning=meaning),),
        )


def largest_change(clean: torch.Tensor, changed: torch.Tensor) -> float:
    """Max |u - u'| / |u| over all tokens but the first; a token whose update stays zero counts as unchanged.

    Args:
        clean: [b, t, d].
        changed: [b, t, d].
    """
    difference = (clean - changed)[:, 1:].norm(dim=-1)
    return (difference / clean[:, 1:].norm(dim=-1).clamp_min(1e-30)).max().item()


def _update(given: torch.Tensor, out: Any) -> torch.Tensor:
    from deepen.probe.scores.reading import stream_of

    return stream_of(out).float() - given.float()
