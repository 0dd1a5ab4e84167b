"""What may happen in a training step beside the update: growth, schedules of depth, noise, measures."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class Callback:
    """Does nothing; others do some of it.

    What a callback does in a step depends on the step, the seed and the model alone, so that a run which is resumed
    does the same. It keeps nothing that a state on disk would have to hold.
    """

    def begin(self, done: int) -> None:
        """Brings the model to the form that it has after so many updates; the values of its parameters come later."""

    def before(self, step: int) -> Mapping[nn.Parameter, nn.Parameter] | None:
        """Called before the forward pass of a step, counted from 0.

        Returns:
            None; or, where the model has other parameters now, which of the old ones each of them began as.
        """

    def gradients(self, step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Called when the gradients are clipped and known to be finite."""

    def measures(self) -> Mapping[str, float]:
        """What to log beside the held-out loss."""
        return {}
