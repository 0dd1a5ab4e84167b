"""How training depends on depth: a coordinate check, and the best learning rate at each depth.

    change(L) = RMS of x_L after n steps - x_L before        x_L: the last stream, before the final norm

A parametrisation that scales with depth keeps the change: its slope in log-log scale is near 0. One whose best learning
rate stays can be tuned on a shallow model. Each run trains a stack from scratch on windows of bytes; the change and the
loss after the last step are of one batch that is not trained on. In CompleteP what initial values add to the stream
falls with depth, so after few steps its change falls a little too, unless the base depth is 1.

Source of the check: Yang et al., Tensor Programs VI, arXiv:2310.02244.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from deepen.errors import DataError, UsageError, nearest
from deepen.program.site import Site
from deepen.registry import lookup, methods
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.train.groups import parameter_groups

# A slope within these bounds counts as flat.
FLAT = 0.1
DRAWS, SHARE = 2000, 0.95
BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is trained on.

    Attributes:
        tokens: (N), the bytes of a text.
        batch: windows of a step.
        context: tokens of a window.
    """

    tokens: torch.Tensor
    batch: int = 8
    context: int = 32

    def windows(self, generator: torch.Generator) -> torch.Tensor:
        """(batch, context + 1) from random places."""
        starts = torch.randint(len(self.tokens) - self.context, (self.batch, 1), generator=generator)
        return self.tokens[starts + torch.arange(self.context + 1)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: how far the last stream moved, and the loss afterwards in nats."""

    change: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The exponent of depth, and its interval over seeds; NaN where a value is missing or there is one seed."""

    value: float
    low: float
    high: float

    @property
    def flat(self) -> bool:
        return abs(self.value) < FLAT


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one parametrisation does over depth.

    Attributes:
        rule: its name.
        options: of the rule at every depth.
        changes: [depth][seed], at the lowest rate.
        slope: of the changes.
        losses: [depth][rate], the mean over seeds; infinite where a run was lost.
        best: the rate of the lowest loss at each depth; NaN where all were lost.
    """

    rule: str
    options: dict[str, Any]
    changes: list[list[float]]
    slope: Slope
    losses: list[list[float]]
    best: list[float]


def reading(text: str, config: StackConfig, batch: int, context: int) -> Reading:
    """A text as bytes.

    Raises:
        UsageError: a vocabulary without all bytes, or a size below 1.
        DataError: the text is shorter than a window.
    """
    if config.vocabulary < 256:
        raise UsageError(f"a vocabulary of {config.vocabulary} has no place for bytes; the check needs 256 or more")
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise UsageError(f"--{name} {value}: expected 1 or more")
    raw = text.encode()
    if len(raw) <= context + 1:
        raise DataError(f"the text has {len(raw)} bytes; windows of --context {context} need more")
    return Reading(tokens=torch.frombuffer(bytearray(raw), dtype=torch.uint8).long(), batch=batch, context=context)


def scaled(config: StackConfig, rule: str, depth: int, base: int) -> StackConfig:
    """The configuration at another depth and with a rule; options of the rule that the configuration has are kept.

    Args:
        config: what does not change.
        rule: a parametrisation.
        depth: layers.
        base: the base depth, where the rule has one and the configuration does not say.

    Raises:
        UsageError: no such rule, or one that does not fit the configuration.
    """
    if rule not in (known := [each.name for each in methods("parametrisation")]):
        raise UsageError(f"no parametrisation {rule!r}{nearest(rule, known)}; known are {', '.join(known)}")
    if config.program is not None:
        raise UsageError("the check builds stacks of other depths, which a program does not fit; leave it out")
    own, options = config.parametrisation_options
    options = options if own == rule else {}
    if "base_depth" in inspect.signature(lookup(rule).implementation).parameters:
        options = {"base_depth": base, **options}
    given = config.model_dump(exclude_unset=True)
    return StackConfig.read({**given, "layers": depth, "parametrisation": {"name": rule, **options}})


def run(config: StackConfig, reading: Reading, *, rate: float, steps: int, seed: int, device: str = "cpu") -> Outcome:
    """Trains a stack from its initial values, without a schedule or weight decay."""
    model = Stack(config, seed=seed).to(device)
    made = parameter_groups(model, lr=rate, weight_decay=0.0)
    optimiser = torch.optim.SGD(made) if model.rule.optimiser == "sgd" else torch.optim.AdamW(made, betas=BETAS)
    looked = reading.windows(torch.Generator().manual_seed(2**31)).to(device)
    before, _ = _look(model, looked)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        windows = reading.windows(generator).to(device)
        optimiser.zero_grad()
        _loss(model, windows).backward()
        optimiser.step()
    after, loss = _look(model, looked)
    return Outcome(change=(after - before).square().mean().sqrt().item(), loss=loss)


def slope_of(depths: Sequence[int], values: Sequence[Sequence[float]], seed: int = 0) -> Slope:
    """The slope of log value over log depth, and the middle 95 % of those of seeds drawn with replacement.

    Args:
        depths: two or more.
        values: [depth][seed].
        seed: of the draws.
    """
    found = np.array(values, dtype=np.float64)
    if not (np.isfinite(found).all() and (found > 0).all()):
        return Slope(value=math.nan, low=math.nan, high=math.nan)
    across = np.log(np.array(depths, dtype=np.float64))
    across = (across - across.mean()) / np.square(across - across.mean()).sum()
    slopes = across @ np.log(found)
    if len(slopes) == 1:
        return Slope(value=float(slopes[0]), low=math.nan, high=math.nan)
    # the slope of a mean of logs is the mean of slopes
    picks = np.random.default_rng(seed).integers(len(slopes), size=(DRAWS, len(slopes)))
    low, high = np.quantile(slopes[picks].mean(1), [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Slope(value=float(slopes.mean()), low=float(low), high=float(high))


def check_scaling(
    config: StackConfig,
    reading: Reading,
    *,
    rules: Sequence[str],
    depths: Sequence[int],
    rates: Sequence[float],
    steps: int,
    seeds: int,
    device: str = "cpu",
    done: Callable[[int], object] = lambda count: None,
) -> list[Curve]:
    """A curve for each rule.

    Args:
        config: of the stacks, but for depth and parametrisation.
        reading: what they are trained on.
        rules: parametrisations.
        depths: layers, two or more, ascending.
        rates: learning rates, ascending; the change is that of the first.
        steps: of a run.
        seeds: runs of each kind.
        device: where they run.
        done: called with the number of runs done since the last call.

    Raises:
        UsageError: a rule that does not exist or fit, before anything is trained.
    """
    built = {rule: [scaled(config, rule, depth, depths[0]) for depth in depths] for rule in rules}
    for configs in built.values():
        with torch.device("meta"):
            Stack(configs[0])
    curves: list[Curve] = []
    for rule, configs in built.items():
        found: list[list[list[Outcome]]] = []
        for at in configs:
            found.append([])
            for rate in rates:
                found[-1].append([])
                for seed in range(seeds):
                    found[-1][-1].append(run(at, reading, rate=rate, steps=steps, seed=seed, device=device))
                    done(1)
        curves.append(_curve(rule, configs[0], depths, rates, found))
    return curves


def _curve(
    rule: str, config: StackConfig, depths: Sequence[int], rates: Sequence[float], found: list[list[list[Outcome]]]
) -> Curve:
    losses = [[_mean([each.loss for each in at_rate]) for at_rate in at_depth] for at_depth in found]
    lowest = [min(range(len(rates)), key=row.__getitem__) for row in losses]
    changes = [[each.change for each in at_depth[0]] for at_depth in found]
    best = [rates[at] if math.isfinite(row[at]) else math.nan for at, row in zip(lowest, losses, strict=True)]
    return Curve(
        rule=rule,
        options=config.parametrisation_options[1],
        changes=changes,
        slope=slope_of(depths, changes),
        losses=losses,
        best=best,
    )


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf


@torch.no_grad()
def _look(model: Stack, windows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The last stream (B, T, D) and the loss."""
    streams: list[torch.Tensor] = []

    def keep(site: Site, what: str, tensor: torch.Tensor) -> None:
        if what == "stream" and site.index == site.total - 1:
            streams.append(tensor)

    remove = model.on_site(keep)
    loss = _loss(model, windows).item()
    remove()
    return streams[-1], loss


def _loss(model: Stack, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
