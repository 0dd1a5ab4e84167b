"""Logit lens: what the model would predict if it stopped after a visit.

    logits_l = head(norm(h_{l+1}))        its own final norm and head, and whatever else it does with logits

KL = mean KL(final, logits_l) in nats, agreement = share of tokens with the same first choice, loss = nats of the token
that follows. Read at every eighth token of a window only, since a head at every depth costs more than the layers.

nostalgebraist, interpreting GPT: the logit lens, 2020; after Belrose et al., arXiv:2303.08112.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepen.probe.scores.base import PassScore, Result, column
from deepen.probe.scores.reading import exact, require_finite
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.reading import Reading
    from deepen.probe.scores.replay import Kept

# One token in so many is read.
EVERY = 8


@method(
    "lens",
    family="score",
    source="arXiv:2303.08112",
    title="Eliciting Latent Predictions from Transformers with the Tuned Lens (the logit lens it starts from)",
    mechanism="the model's own norm and head on the stream after each visit",
    cost="1 pass and L heads on an eighth of the tokens, in 1 + L forward calls",
)
class Lens(PassScore):
    """Needs a causal head."""

    needs_head = True

    def run(self, reading: Reading) -> Result:
        import torch

        from deepen.probe.scores.replay import keeping

        sums, count = np.zeros((reading.depth, 3)), 0
        with torch.inference_mode():
            for ids, first in reading.groups():
                places = torch.arange(first - 1, ids.shape[1] - 1, EVERY, device=ids.device)
                with keeping(reading.visits) as kept:
                    final = reading.run(ids, head=True, logits_to_keep=places).logits.float().log_softmax(-1)
                # a token that is never predicted may have minus infinity
                require_finite(final.nan_to_num(torch.nan, torch.nan, 0.0))
                targets = ids[:, places + 1]
                for visit in range(reading.depth):
                    found = depth_logits(reading, ids, kept, visit, places).float().log_softmax(-1)
                    # a probability of 0 adds nothing, and 0 times minus infinity is not a number
                    kl = torch.where(final.exp() > 0, final.exp() * (final - found), 0.0).sum(-1)
                    same = found.argmax(-1) == final.argmax(-1)
                    loss = -found.gather(-1, targets[..., None])
                    sums[visit] += [exact(each).double().sum().item() for each in (kl, same, loss)]
                count += targets.numel()
                reading.step(len(ids))
        kl, same, loss = (sums / count).T
        return Result(
            (
                column("lens", kl, "neither", "KL of the final prediction to that after the visit, nats", count),
                column("lens.agreement", same, "neither", "share of tokens with the final first choice", count),
                column("lens.loss", loss, "neither", "nats of the token that follows", count),
            )
        )


def depth_logits(reading: Reading, ids: torch.Tensor, kept: Kept, visit: int, places: torch.Tensor) -> torch.Tensor:
    """Logits of the stream after a visit, [b, k, vocabulary], by the model's own way from its last visit to them.

    Args:
        reading: what is read.
        ids: the batch, [b, t].
        kept: what its visits returned.
        visit: the visit to stop after.
        places: the tokens to read, [k].
    """
    from deepen.probe.scores.reading import stream_of
    from deepen.probe.scores.replay import Given, standing_in, with_stream

    answers = {at: Given(out) for at, out in enumerate(kept.returned)}
    stream = stream_of(kept.returned[visit])
    answers[reading.depth - 1] = Given(with_stream(kept.returned[-1], stream))
    with standing_in(reading.visits, answers):
        # what the program does after its last visit belongs to that visit, not to the one read
        final = reading.visits.entries[-1]
        final.after = final.after if visit == reading.depth - 1 else ()
        return reading.run(ids, head=True, logits_to_keep=places).logits
