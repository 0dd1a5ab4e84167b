"""A stack as the loop trains it: its loss on the batches of a task, and what it reaches on the held-out parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepen.stack.stack import Result, Stack
from deepen.tasks.batch import IGNORED, Batch
from deepen.tasks.task import Data


class Learner(nn.Module):
    """Holds the stack that is trained, which growth may replace.

    Args:
        stack: to be trained.
        compiled: run it through `torch.compile`.
    """

    def __init__(self, stack: Stack, *, compiled: bool = False) -> None:
        super().__init__()
        self.compiled = compiled
        # how often run-time loops run in training, by number; None as the program says
        self.counts: Mapping[int, int] | None = None
        self.take(stack)

    def take(self, stack: Stack) -> None:
        """Goes on with another stack."""
        self.stack = stack
        # in a tuple, so that its parameters are not there twice
        self._run: tuple[Any] = (torch.compile(stack) if self.compiled else stack,)

    def forward(self, inputs: torch.Tensor) -> Result:
        return self._run[0](inputs, counts=self.counts if self.training else None)


class TaskLoss:
    """Cross-entropy of what a batch asks for, in nats, and the losses that the sublayers add."""

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        """The mean over the targets; of a piece of a batch, its share of the mean over the whole."""
        result: Result = model(batch.inputs)
        share = batch.asked if batch.share is None else batch.share
        total = F.cross_entropy(*_flat(result, batch), ignore_index=IGNORED, reduction="sum") / share
        return total + sum(result.losses.values())


@torch.no_grad()
def measured(
    model: nn.Module, batches: Iterable[Batch], *, device: torch.device, autocast: bool = False
) -> dict[str, float]:
    """What a model in eval mode reaches.

    Returns:
        `loss` in nats a target; `accuracy` of targets; `exact_match`, the share of rows whose targets are all right,
        where rows have several; `bits_per_byte` where targets are text.
    """
    nats, asked, right, exact, rows, size, several = 0.0, 0, 0, 0, 0, 0, False
    for whole in batches:
        batch = whole.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            result = model(batch.inputs)
        logits, targets = _flat(result, batch)
        nats += float(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"))
        correct = (logits.argmax(-1) == targets).view_as(batch.targets)
        counts = batch.targets != IGNORED
        asked += int(counts.sum())
        right += int((correct & counts).sum())
        if batch.targets.ndim > 1:
            exact += int((correct | ~counts).all(1).sum())
            several = True
        rows += len(batch)
        size += batch.bytes
    found = {"loss": nats / asked, "accuracy": right / asked}
    if size:
        return {**found, "bits_per_byte": nats / math.log(2) / size}
    return {**found, "exact_match": exact / rows} if several else found


def evaluated(
    model: nn.Module, data: Data, splits: Iterable[str], size: int, *, device: torch.device, autocast: bool = False
) -> dict[str, dict[str, float]]:
    """What a model in eval mode reaches on held-out parts, by name; at most `size` rows at once."""
    return {split: measured(model, data.held_out(split, size), device=device, autocast=autocast) for split in splits}


def _flat(result: Result, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, v] in fp32 and targets [n]."""
    return result.logits.flatten(0, -2).float(), batch.targets.flatten()
