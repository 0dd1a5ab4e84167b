"""Schedules of depth: what a stack is told in every step.

steps       `stack.set_step`, which wirings warm their updates up by, and feed-forwards their decisions
dropping    the chance to drop a visit, of stochastic depth and LayerDrop, rises from 0 to its own over a share of
the steps, on a line
turns       how often run-time loops run: a draw whose mean rises, see `deepen.train.curriculum`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepen.errors import UsageError
from deepen.train.callbacks import Callback
from deepen.train.curriculum import Curriculum, ranges
from deepen.train.learner import Learner
from deepen.wiring.stochastic_depth import RandomDepth


class Depth(Callback):
    """Tells the stack of a learner what step it is in.

    Args:
        learner: whose stack is trained.
        steps: of the run.
        seed: of the draws of turns.
        dropping: the share of the steps over which the chance to drop rises; None: it is its own from the start.
        turns: how the counts of run-time loops are drawn; None: as the program says.

    Raises:
        UsageError: a wiring that drops nothing, or a program without run-time loops.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        steps: int,
        seed: int,
        dropping: float | None = None,
        turns: Curriculum | None = None,
    ) -> None:
        self.learner, self.steps, self.seed = learner, steps, seed
        self.dropping, self.turns = dropping, turns
        wiring = learner.stack.wiring
        if dropping is not None and not isinstance(wiring, RandomDepth):
            name = learner.stack.config.wiring_options[0]
            raise UsageError(f"depth.dropping: the wiring {name} drops nothing; use stochastic-depth or layer-drop")
        if turns is not None:
            ranges(learner.stack.plan)
        # the wiring that was told last, and its own chances to keep: growth brings another
        self._own: tuple[Any, tuple[float, ...]] = (None, ())

    def before(self, step: int) -> Mapping[nn.Parameter, nn.Parameter] | None:
        self.learner.stack.set_step(step)
        wiring: Any = self.learner.stack.wiring
        if self.dropping is not None:
            if wiring is not self._own[0]:
                self._own = wiring, wiring.keep
            risen = min(1.0, (step + 1) / max(1.0, self.dropping * self.steps))
            wiring.keep = tuple(1 - risen * (1 - keep) for keep in self._own[1])
        if self.turns is not None:
            drawn = self.turns.turns_at(step, self.steps, self.seed)
            counts = ranges(self.learner.stack.plan)
            self.learner.counts = {number: min(max(drawn, low), high) for number, (low, high) in counts.items()}
        return None
