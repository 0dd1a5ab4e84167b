"""SPU: of the first matrix of every feed-forward the entries that matter most for the text are trained.

    score = | mean over batches of the gradient of the loss, or of |logits|_2^2 |         signed until the end
    trained: the top share of the entries of each matrix, chosen once, and its bias

Reads about a quarter of the windows, and goes on for as long as an entry of some matrix has seen no gradient. Batches
count alike, whereas the published code adds up gradients that it never clears. Opposite gradients cancel; `apart`
takes absolute values first. The squared norm of the logits, over the scored positions, stands for the image-text
logits of the source.

Zhang et al., Overcoming Generic Knowledge Loss with Selective Parameter Update, arXiv:2308.12462. A gated feed-forward
gives its `up` matrix, and its gate only when asked; that is a reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from deepen.errors import DataError, UsageError
from deepen.registry import method
from deepen.train.losses import CrossEntropy
from deepen.train.selective.block import Block
from deepen.train.selective.matrices import feed_forwards
from deepen.train.selective.selection import Selection

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel

# The share of the windows that is read, and what counts as no gradient.
READ, NOTHING = 0.25, 1e-12


@method(
    "spu",
    family="tune",
    source="arXiv:2308.12462",
    title="Overcoming Generic Knowledge Loss with Selective Parameter Update",
    mechanism="train a share of the entries of each first feed-forward matrix, by their gradients",
    cost="1 forward and 1 backward call a batch over a quarter of the text, before the training",
)
def entries(
    model: PreTrainedModel,
    windows: torch.Tensor,
    tower: str,
    layers: Sequence[int | str] = (),
    *,
    share: float = 0.1,
    batch: int = 1,
    signal: Literal["output", "loss"] = "output",
    apart: bool = False,
    across: bool = False,
    gate: bool = False,
    scored_from: int = 1,
) -> Selection:
    """Selects the entries with the largest scores, and the biases of their matrices.

    Args:
        model: a model that `Checkpoint.load` gave; it is changed until the selection is released.
        windows: of the text, [n, t] token ids.
        tower: the tower of the layers.
        layers: layers of the bank; all when none is named.
        share: of the entries; one of a matrix at least.
        batch: windows whose gradients are summed with their signs before `apart` takes absolute values.
        signal: the gradient of the squared norm of the logits, or of the loss.
        apart: add absolute values of the batches in place of their signed gradients.
        across: take the share over all matrices together, in place of each.
        gate: choose in the gate too, where there is one.
        scored_from: the first token of a window that is scored.

    Raises:
        UsageError: a share outside of 0 to 1, or a layer that the program does not visit.
        FamilyError: a layer without a dense feed-forward made of linear layers.
        DataError: a gradient that is not finite.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--share {share}: expected a share of the entries above 0, at most 1")
    found = feed_forwards(model, tower, layers)
    names = [name for first, _ in found for name in (first if gate or len(first) == 1 else first[1:])]
    scores = _scores(model, names, windows, batch, signal, apart, scored_from)
    if across:
        count = max(1, int(share * sum(map(len, scores.values()))))
        kept = torch.cat(list(scores.values())).argsort(descending=True, stable=True)[:count].sort().values
        starts = torch.tensor([0, *(len(each) for each in scores.values())]).cumsum(0).tolist()
        chosen = {
            name: kept[(kept >= start) & (kept < end)] - start
            for name, start, end in zip(scores, starts, starts[1:], strict=False)
        }
    else:
        chosen = {
            name: each.argsort(descending=True, stable=True)[: max(1, int(share * len(each)))].sort().values
            for name, each in scores.items()
        }
    blocks = {name: Block(entries=each) for name, each in chosen.items() if len(each)}
    parameters = dict(model.named_parameters())
    biases = [name.removesuffix("weight") + "bias" for name in blocks]
    return Selection(model, blocks | {name: Block() for name in biases if name in parameters})


def _scores(
    model: PreTrainedModel,
    names: Sequence[str],
    windows: torch.Tensor,
    batch: int,
    signal: str,
    apart: bool,
    scored_from: int,
) -> dict[str, torch.Tensor]:
    """The score of every entry of these matrices, flat, fp32, on the CPU.

    Raises:
        DataError: a gradient that is not finite.
    """
    flags = [(each, each.requires_grad) for each in model.parameters()]
    matrices = [model.get_parameter(name) for name in names]
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in matrices]
    groups = windows.split(batch)
    loss = CrossEntropy(scored_from=scored_from)
    try:
        model.requires_grad_(False)
        for each in matrices:
            each.requires_grad_(True)
        for at, group in enumerate(groups):
            if at >= READ * len(groups) and all(bool((each.abs() >= NOTHING).all()) for each in sums):
                break
            logits = model(input_ids=group.to(model.device), use_cache=False).logits
            size = logits[:, scored_from - 1 : -1].float().square().sum() / len(group)
            value = size if signal == "output" else loss.of(logits, group.to(model.device))
            for total, gradient in zip(sums, torch.autograd.grad(value, matrices), strict=True):
                total += gradient.abs() if apart else gradient
    finally:
        for each, flag in flags:
            each.requires_grad_(flag)
    if not all(bool(each.isfinite().all()) for each in sums):
        raise DataError("the gradients are not finite on this text; compute in --dtype float32")
    return {name: each.abs().flatten().cpu() for name, each in zip(names, sums, strict=True)}
