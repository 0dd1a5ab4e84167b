"""SLAM-like selection: in layers whose neurons answer differently to different languages, the feed-forward is trained.

    f_l[language, neuron] = share of tokens at which the neuron is active: a value above 0 of the first matrix
    MSD_l = mean over neurons of the variance over languages of f_l

The layers with the highest MSD are chosen; of their feed-forwards the matrix that gives the neurons (of a gated one
`up`) and the one that reads them (`down`) are trained, the gate is not unless asked for.

Fan et al., SLAM: Towards Efficient Multilingual Reasoning via Selective Language Alignment, arXiv:2501.03681. What
counts as active, the variance, and which two matrices are trained are reconstructions; the last from the share of
parameters that is published. The pairs of questions and answers it was published with are not part of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.registry import method
from deepen.train.selective.block import Block
from deepen.train.selective.matrices import bank, feed_forwards, highest, require_count
from deepen.train.selective.selection import Selection

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel


@method(
    "slam",
    family="tune",
    source="arXiv:2501.03681",
    title="SLAM: Towards Efficient Multilingual Reasoning via Selective Language Alignment",
    mechanism="train two matrices of the feed-forwards whose neurons differ most between languages",
    cost="1 forward call a batch of windows and language, before the training",
)
def feed_forward_selection(
    model: PreTrainedModel, tower: str, layers: Sequence[int | str], *, gate: bool = False
) -> Selection:
    """Selects the feed-forward matrices of these layers, without biases.

    Args:
        model: a model that `Checkpoint.load` gave.
        tower: the tower of the layers.
        layers: layers of the bank, such as `differing_layers` chooses.
        gate: train the gate too, where there is one.

    Raises:
        UsageError: a layer that the program does not visit.
        FamilyError: a layer without a dense feed-forward made of linear layers.
    """
    names = [
        name
        for first, last in feed_forwards(model, tower, layers)
        for name in (*(first if gate or len(first) == 1 else first[1:]), last)
    ]
    return Selection(model, {name: Block() for name in names})


def differing_layers(
    model: PreTrainedModel, languages: Sequence[torch.Tensor], tower: str, count: int, *, batch: int = 8
) -> tuple[tuple[int, ...], dict[int, float]]:
    """The layers whose neurons differ most between languages, and the MSD of all.

    Args:
        model: a model that `Checkpoint.load` gave.
        languages: windows of each, [n, t] token ids; a mean over the tokens of each.
        tower: the tower of the layers.
        count: layers to choose.
        batch: windows that are read at once; nothing depends on it.

    Raises:
        UsageError: fewer than two languages, or more layers than the program visits.
        FamilyError: a layer without a dense feed-forward made of linear layers.
    """
    if len(languages) < 2:
        raise UsageError("layers are chosen by how languages differ: give the texts of two or more, or name the layers")
    layers = list(bank(model, tower))
    require_count(count, len(layers))
    scores = {}
    # of a layer with copies the neurons of all of them count
    watched = [[first[0].removesuffix(".weight") for first, _ in feed_forwards(model, tower, [n])] for n in layers]
    shares = [_active(model, [name for names in watched for name in names], each, batch) for each in languages]
    for layer, names in zip(layers, watched, strict=True):
        spread = [torch.stack([each[name] for each in shares]).var(0, unbiased=False) for name in names]
        scores[layer] = torch.cat(spread).mean().item()
    return highest(scores, count), scores


@torch.no_grad()
def _active(model: PreTrainedModel, names: Sequence[str], windows: torch.Tensor, batch: int) -> dict[str, torch.Tensor]:
    """The share of tokens and visits at which each output of these linear layers is above 0, fp64."""
    counts: dict[str, torch.Tensor] = {}
    tokens = dict.fromkeys(names, 0)

    def watch(name: str) -> Any:
        def count(module: nn.Module, given: Any, out: torch.Tensor) -> None:
            rows = (out > 0).flatten(0, -2)
            counts[name] = counts.get(name, 0) + rows.sum(0).cpu()
            tokens[name] += len(rows)

        return model.get_submodule(name).register_forward_hook(count)

    handles = [watch(name) for name in names]
    try:
        for group in windows.split(batch):
            model(input_ids=group.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: counts[name].double() / tokens[name] for name in names}
