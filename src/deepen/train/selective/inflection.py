"""Inflection layers: LoRA only in the band where attention is narrow and the gradient falls off steeply.

    entropy_v   of the attention of a visit, a share of the highest
    G_v         mean over tokens of |dL / d stream before visit v|_2        G after the last visit: of its output
    index_v     z(-entropy_v) + z(log G_{v+1} - log G_v)                    z: less the mean, over the deviation

A loss that is c times as large scales every G and moves no index. The band is the run of visits with an index above 1
that contains the highest index, at least that visit and at most a third of all; its layers get LoRA. Meant for a
source that was trained for long: `decay`, the largest of the G over the smallest, is above 10 there.

Wang, arXiv:2511.00797. The index, the band and the rule about the decay are reconstructions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from deepen.errors import DataError, FamilyError
from deepen.probe.scores.attention import Attention
from deepen.probe.scores.reading import Reading, open_reading, stream_of
from deepen.registry import method
from deepen.train.losses import CrossEntropy

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

# The index above which a visit belongs to the band.
ABOVE = 1.0


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a text says about the visits of a program, in execution order.

    Attributes:
        entropy: of the attention, a share of the highest; NaN where a visit shows none.
        gradients: G before each visit and after the last, [visits + 1], in nats.
        index: of each visit; NaN where it has no entropy.
        band: first and last visit of the band.
        layers: of the band, numbers in the bank, ascending.
    """

    entropy: tuple[float, ...]
    gradients: tuple[float, ...]
    index: tuple[float, ...]
    band: tuple[int, int]
    layers: tuple[int, ...]

    @property
    def decay(self) -> float:
        """The largest gradient over the smallest."""
        return max(self.gradients) / min(self.gradients)


@method(
    "inflection",
    family="tune",
    source="arXiv:2511.00797",
    title="Inflection-layer LoRA injection",
    mechanism="LoRA only in the layers of low attention entropy and steep gradient decay",
    cost="2 forward and 1 backward call a batch of the text, before the training",
)
def inflection_layers(
    ck: Checkpoint, text: str, *, context: int, tokens: int = 8192, device: str = "cpu", dtype: str | None = None
) -> Diagnosis:
    """Finds the band of a checkpoint's program on a text; `add_lora` takes its layers.

    Args:
        ck: the checkpoint.
        text: what to read.
        context: tokens of a window.
        tokens: tokens of the text to read, at most.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files.

    Raises:
        FamilyError: no layer shows attention weights, or the model has no causal head.
        DataError: the text is shorter than one window, or a gradient is 0 or not finite.
    """
    reading = open_reading(
        ck, text, tower="", context=context, tokens=tokens, batch=1, device=device, dtype=dtype, eager=True
    )
    if not reading.causal:
        raise FamilyError(f"{ck.where}: {type(reading.model).__name__} has no causal head, whose loss is looked at")
    shown = Attention().run(reading)
    if not shown.columns:
        raise FamilyError(
            f"no layer of {type(reading.model).__name__} shows attention weights; use --mode lora with --layers"
        )
    entropy, gradients = shown.columns[0].values, gradient_norms(reading)
    index = indices(entropy, gradients)
    band = band_of(index)
    visits = [entry.visit.key.layer for entry in reading.visits.entries]
    layers = tuple(sorted(set(visits[band[0] : band[1] + 1])))
    return Diagnosis(entropy=tuple(entropy), gradients=gradients, index=index, band=band, layers=layers)


def gradient_norms(reading: Reading) -> tuple[float, ...]:
    """G before each visit and after the last, means over the tokens of the text.

    Raises:
        DataError: one is 0 or not finite.
    """
    sums, tokens = [0.0] * (reading.depth + 1), 0
    streams: list[torch.Tensor] = []

    def before(_module: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])

    def after(_module: object, _args: object, out: object) -> None:
        ends[:] = [stream_of(out)]

    ends: list[torch.Tensor] = []
    layers = [each for each in reading.visits._modules.values() if each is not None]
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        for ids, first in reading.groups():
            streams.clear()
            with torch.enable_grad():
                logits = reading.run(ids, head=True).logits
                loss = CrossEntropy(scored_from=first).of(logits, ids) * ids[:, first:].numel()
                found = torch.autograd.grad(loss, [*streams, *ends])
            for at, each in enumerate(found):
                sums[at] += each.float().norm(dim=-1).sum(dtype=torch.float64).item()
            tokens += ids.numel()
    finally:
        for handle in handles:
            handle.remove()
    norms = tuple(each / tokens for each in sums)
    if not all(0 < each < math.inf for each in norms):
        raise DataError("the gradient of a visit is 0 or not finite on this text; compute in --dtype float32")
    return norms


def indices(entropy: tuple[float, ...], gradients: tuple[float, ...]) -> tuple[float, ...]:
    """The index of each visit; NaN where it has no entropy.

    Args:
        entropy: of each visit.
        gradients: G before each visit and after the last.
    """
    narrow = _standard([-each for each in entropy])
    rises = [math.log(after) - math.log(before) for before, after in pairwise(gradients)]
    return tuple(one + other for one, other in zip(narrow, _standard(rises), strict=True))


def band_of(index: tuple[float, ...]) -> tuple[int, int]:
    """First and last visit of the band around the highest index."""
    known = [-math.inf if math.isnan(each) else each for each in index]
    low = high = known.index(max(known))
    most = max(1, len(known) // 3)
    while high - low + 1 < most:
        left = known[low - 1] if low else -math.inf
        right = known[high + 1] if high + 1 < len(known) else -math.inf
        if max(left, right) <= ABOVE:
            break
        low, high = (low - 1, high) if left >= right else (low, high + 1)
    return low, high


def _standard(values: list[float]) -> list[float]:
    """Less the mean, over the deviation; 0 where all are equal."""
    known = [each for each in values if not math.isnan(each)]
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in known) / len(known))
    return [each if math.isnan(each) else (each - mean) / (deviation or 1.0) for each in values]
