"""Growth in depth while a stack trains: it is stacked to a multiple of its layers, and the same run goes on.

    whole         0-5 becomes 0-5 and copies of 0-5 after them        layer i of the result is layer i mod L
    interleaved   each layer, then its copies                         layer i of the result is layer i div factor

Copies begin with the weights of their layers and, unless asked otherwise, with the state that the optimiser has of
them; embedding, final norm and head stay. The function changes: see `deepen.surgery.stack`.

Source and the guideline for when: Du et al., Stacking Your Transformers, arXiv:2405.15319, which starts the optimiser
anew with a new warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.program import Program, transforms
from deepen.stack.stack import Stack
from deepen.surgery.stack import growth_tokens
from deepen.train.callbacks import Callback
from deepen.train.learner import Learner
from deepen.train.rotation import Rotation

Order = Literal["whole", "interleaved"]


def grown(stack: Stack, factor: int, order: Order = "whole") -> tuple[Stack, dict[str, str]]:
    """A stack of `factor` times the layers, on the same device.

    Returns:
        It, and for each of its parameters and buffers the name of the one that it began as.

    Raises:
        UsageError: parameters of single visits, which a deeper stack has others of.
        ProgramError: a program that cannot be stacked.
    """
    grow = transforms.stack if order == "whole" else transforms.interleave
    config = stack.config
    program, _ = grow(Program.parse(config.program or ""), factor, config.layers)
    made = Stack(config.model_copy(update={"program": str(program)}), seed=0)
    old, origins = stack.state_dict(), dict[str, str]()
    for name, tensor in made.state_dict().items():
        origin = name
        if name.startswith("layers."):
            _, child, rest = name.split(".", 2)
            origin = f"layers.{made.written.keys[int(child)].layer}.{rest}"
        if origin not in old or old[origin].shape != tensor.shape:
            raise UsageError(
                f"grow: {name} has no like in the smaller stack, which growth could begin it as; choose a wiring and a "
                "program without parameters of single visits"
            )
        origins[name] = origin
    made.load_state_dict({name: old[origin] for name, origin in origins.items()})
    made.checkpointing = stack.checkpointing
    return made.to(next(stack.parameters()).device).train(stack.training), origins


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One growth.

    Attributes:
        step: updates before it.
        factor: how many times the layers.
        order: how they are stacked.
        carry: whether copies begin with the optimiser's state of their layers; otherwise all of it starts anew.
    """

    step: int
    factor: int
    order: Order = "whole"
    carry: bool = True


class Grow(Callback):
    """Grows the stack of a learner at given steps.

    Args:
        learner: whose stack grows.
        stages: when and how, in the order of their steps.
        rotation: what has to know which parameters others began as.
    """

    def __init__(self, learner: Learner, stages: tuple[Stage, ...], rotation: Rotation | None = None) -> None:
        self.learner, self.stages, self.rotation = learner, stages, rotation

    def begin(self, done: int) -> None:
        for stage in self.stages:
            # the state after `done` updates was saved before a growth at that step
            if stage.step < done:
                self._grow(stage)

    def before(self, step: int) -> Mapping[nn.Parameter, nn.Parameter] | None:
        due = [stage for stage in self.stages if stage.step == step]
        return self._grow(due[0]) if due else None

    def _grow(self, stage: Stage) -> dict[nn.Parameter, nn.Parameter]:
        small = self.learner.stack
        with torch.no_grad():
            large, origins = grown(small, stage.factor, stage.order)
        self.learner.take(large)
        if self.rotation is not None:
            self.rotation.follow(origins)
        if not stage.carry:
            return {}
        before = dict(small.named_parameters())
        return {parameter: before[origins[name]] for name, parameter in large.named_parameters()}


def guideline_steps(stack: Stack, factor: int, step_tokens: int, steps: int) -> int:
    """When the published rule would grow a stack to `factor` times its layers, in steps.

    Args:
        stack: the small one.
        factor: 4 in the paper.
        step_tokens: tokens of a step.
        steps: of the whole run.

    Raises:
        UsageError: the rule asks for more than the run has; it was fitted to models of 100 million parameters and more.
    """
    layers = sum(parameter.numel() for parameter in stack.layers.parameters())
    parameters = layers * factor
    tokens = growth_tokens(parameters, 6.0 * parameters * step_tokens * steps)
    when = round(tokens / step_tokens)
    if not 1 <= when < steps:
        raise UsageError(
            f"grow.at: the guideline grows after {tokens:.3g} tokens, the run has {step_tokens * steps:.3g}; it was "
            "fitted to larger models: give a number of steps or a share"
        )
    return when
