"""The rate of a run over its steps.

    cosine      a linear rise over `warmup`, then half a cosine down to `floor`
    wsd         the rise, a level, and over the last share `decay` a line down to `floor`
    constant    the rise and a level
    growth      after each step in `grown`, a new rise over `rewarm` steps

Warm-up, stable, decay: Hu et al., MiniCPM, arXiv:2404.06395, whose decay is exponential; a line is used by
Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, arXiv:2405.18392.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepen.train.recipe import Recipe

Schedule = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True)
class Scheduled(Recipe):
    """A training run of a recipe file.

    Attributes:
        schedule: of the rate.
        decay: the share of the steps at the end over which `wsd` falls.
        optimiser: `adamw`, or `muon` for the matrices of the layers.
        grown: steps before which the model grows.
        rewarm: steps of the new rise after each.
    """

    schedule: Schedule = "cosine"
    decay: float = 0.2
    optimiser: Literal["adamw", "muon"] = "adamw"
    grown: tuple[int, ...] = ()
    rewarm: int = 0

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rate = super().lr_at(step) if self.schedule == "cosine" else self.lr * self._level(step)
        last = max((grown for grown in self.grown if grown <= step), default=None)
        if last is not None and step - last < self.rewarm:
            rate *= (step - last + 1) / self.rewarm
        return rate

    def _level(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        falling = self.decay * self.steps if self.schedule == "wsd" else 0.0
        left = self.steps - step
        if left >= falling:
            return 1.0
        return self.floor + (1 - self.floor) * left / falling

    @property
    def advice(self) -> str:
        """What to try where numbers are not finite."""
        return "Lower train.rate or train.clip, or set train.dtype to float32"
