"""What a training run does, as data: steps, optimiser, schedule, precision and how often it looks and saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepen.errors import UsageError

# What a resumed run may change, since neither moves a weight.
FREE = ("eval_every", "save_every")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run; checked when it is made.

    Attributes:
        steps: updates of the weights.
        batch: windows of an update.
        accumulate: equal pieces that a batch is read in; only memory and rounding depend on it.
        lr: the highest learning rate.
        warmup: steps over which the rate rises to it, linearly.
        floor: the share of the rate that the cosine ends at.
        weight_decay: of AdamW; norms and biases have none.
        beta1: of AdamW.
        beta2: of AdamW.
        eps: of AdamW.
        clip: the largest norm of the gradient; larger ones are scaled down to it.
        autocast: compute matrix products in bfloat16; weights and moments keep their type.
        gradient_checkpointing: compute each layer again in the backward pass in place of keeping what it computed.
        seed: of the order of the data and of every draw.
        eval_every: steps between two looks at the held-out text; 0 never looks.
        save_every: steps between two states on disk; 0 saves only when stopped.

    Raises:
        UsageError: a value outside its range.
    """

    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    lr: float = 1e-4
    warmup: int = 10
    floor: float = 0.1
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    autocast: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    eval_every: int = 50
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate"):
            _require(name, getattr(self, name), "1 or more", getattr(self, name) >= 1)
        for name in ("warmup", "eval_every", "save_every", "weight_decay", "seed"):
            _require(name, getattr(self, name), "0 or more", 0 <= getattr(self, name) < math.inf)
        for name in ("lr", "eps"):
            _require(name, getattr(self, name), "a number above 0", 0 < getattr(self, name) < math.inf)
        for name in ("beta1", "beta2"):
            _require(name, getattr(self, name), "0 or more and below 1", 0 <= getattr(self, name) < 1)
        _require("floor", self.floor, "a share from 0 to 1", 0 <= self.floor <= 1)
        _require("clip", self.clip, "a number above 0", self.clip > 0)
        if self.batch % self.accumulate:
            raise UsageError(
                f"a batch of {self.batch} windows cannot be read in {self.accumulate} equal pieces; "
                "choose a --batch that --accumulate divides"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a linear rise, then a cosine down to `floor`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2)

    @property
    def advice(self) -> str:
        """What to try where numbers are not finite."""
        return "Lower --lr or --clip, or compute without --autocast and in --dtype float32"

    def fixed(self) -> dict[str, Any]:
        """The fields that a resumed run must share."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def require_same(made: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuses to go on with a state under other settings.

    Args:
        made: what the state was made with.
        now: what the run asks for.
        where: the folder of the state.

    Raises:
        UsageError: they differ; says in what.
    """
    names = [*now, *(name for name in made if name not in now)]
    different = [
        f"{name} was {made.get(name)}, now {now.get(name)}" for name in names if made.get(name) != now.get(name)
    ]
    if different:
        raise UsageError(
            f"{where} cannot be resumed by another run: {'; '.join(different)}. Give the settings it was started "
            "with, or remove it and start again"
        )


def _require(name: str, value: float, wanted: str, right: bool) -> None:
    if not right:
        raise UsageError(f"--{name.replace('_', '-')} {value}: expected {wanted}")
