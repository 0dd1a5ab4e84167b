"""How often the run-time loops of a model run in each training step: a number drawn anew, whose mean rises.

    mean        m = max(1, ceil(M f(step / (w steps))))        f(x) = x, or 1 - sqrt(1 - x); 1 from x = 1 on
    draw        n ~ Poisson(t) + 1,  t ~ LogNormal(ln m - s^2/2, s)        so that t is m and n is m + 1 in the mean
    clipped     to the range n..m that the program's loop states

M is the mean that is aimed at, w the share of the steps over which it is reached: a model that was made recurrent
first learns to run once, then more and more often. `linear` rises evenly, `1-sqrt` late.

The draw of a step depends on the seed and the step alone, so every piece of a batch runs as often, and a run that is
resumed draws what an undisturbed one does.

The draw: Geiping et al., Scaling up Test-Time Compute with Latent Reasoning, arXiv:2502.05171, s = 0.5; the rising
mean: McLeish et al., Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence,
arXiv:2511.07384. Both let gradients flow through the last 8 turns only; here they flow through all.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from deepen.errors import UsageError, nearest

if TYPE_CHECKING:
    from deepen.program import Plan

Shape = Literal["linear", "1-sqrt"]
SHAPES = ("linear", "1-sqrt")


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """How often the loops `n..m` of a program run in training.

    Attributes:
        mean: M, the turns that the mean rises to.
        share: w, of the steps over which it rises; 0 begins at M.
        shape: `linear` or `1-sqrt`.
        spread: s, of the logarithm of the mean of a draw; 0 draws from a Poisson distribution.

    Raises:
        UsageError: a value outside its range.

    Example:
        >>> Curriculum(mean=8, share=0.5).mean_at(10, 100)
        2
    """

    mean: int
    share: float = 0.25
    shape: Shape = "linear"
    spread: float = 0.5

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise UsageError(f"--turns {self.mean}: expected a mean of 1 turn or more")
        if not 0 <= self.share <= 1:
            raise UsageError(f"--turns-share {self.share}: expected a share of the steps from 0 to 1")
        if self.shape not in SHAPES:
            raise UsageError(
                f"--turns-shape {self.shape!r} is unknown{nearest(self.shape, SHAPES)}; "
                f"expected one of {', '.join(SHAPES)}"
            )
        if not 0 <= self.spread <= 2:
            raise UsageError(f"the spread of the turns is {self.spread}: expected 0 to 2")

    def mean_at(self, step: int, steps: int) -> int:
        """The mean m of a step, counted from 0, of a run of `steps`."""
        rising = self.share * steps
        done = min(1.0, step / rising) if rising else 1.0
        risen = done if self.shape == "linear" else 1 - math.sqrt(1 - done)
        return max(1, math.ceil(self.mean * risen))

    def turns_at(self, step: int, steps: int, seed: int) -> int:
        """The turns of a step, counted from 0, before they are clipped to the loop: 1 or more."""
        dice = np.random.default_rng((seed, step))
        mean = math.log(self.mean_at(step, steps)) - self.spread**2 / 2
        return int(dice.poisson(dice.lognormal(mean, self.spread))) + 1

    def settings(self) -> dict[str, Any]:
        """The fields that a resumed run must share."""
        return {f"turns_{name}": value for name, value in asdict(self).items()}


def ranges(plan: Plan) -> dict[int, tuple[int, int]]:
    """The least and largest count of each run-time loop of a plan, by its number.

    Raises:
        UsageError: it has none.
    """
    found = {loop.number: (loop.minimum, loop.maximum) for loop in plan.loops if loop.minimum != loop.maximum}
    if not found:
        raise UsageError(
            f"--turns is about loops whose count is chosen at run time, such as (4-7)*1..8; `{plan.text}` has none"
        )
    return found


class Turns:
    """Sets the run-time loops of a model to the draw of a step.

    Args:
        model: a model that `Checkpoint.load` gave.
        curriculum: what is drawn.
        steps: of the run.
        seed: of the draws.
        tower: the tower of the loops.

    Raises:
        UsageError: the program has no run-time loop.
    """

    def __init__(self, model: Any, curriculum: Curriculum, *, steps: int, seed: int, tower: str) -> None:
        self.depth, self.tower = model.deepen, tower
        self.curriculum, self.steps, self.seed = curriculum, steps, seed
        self.ranges = ranges(self.depth.plans[tower])

    def set(self, step: int) -> int:
        """Sets the loops for a step, counted from 0.

        Returns:
            The turns drawn, of which each loop runs as many as its range allows.
        """
        turns = self.curriculum.turns_at(step, self.steps, self.seed)
        self.depth.set_counts(
            {number: min(max(turns, least), most) for number, (least, most) in self.ranges.items()}, self.tower
        )
        return turns

    def rest(self) -> None:
        """Sets the loops to their maximum, which is how often they run where nothing else is said."""
        self.depth.set_counts({number: most for number, (_, most) in self.ranges.items()}, self.tower)
