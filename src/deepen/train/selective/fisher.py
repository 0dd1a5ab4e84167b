"""FIM scores: the layers whose weights the text informs most are trained, the rest is frozen.

    F_j = mean over examples of (d log p(example) / d theta_j)^2        s_l = |F of the parameters of layer l|_2

The example of a language model is a window, and log p(window) the sum over its scored tokens. Gradients are squared
example by example: two examples that pull in opposite directions have a mean gradient of 0 and a high score. Visits of
a layer add their gradients before that. Embeddings, last norm and head are in no score; a language model's head is
not new, so it stays frozen too.

Lodha et al., On Surgical Fine-Tuning for Language Encoders, arXiv:2310.17041. How a layer's entries become one score
is a reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from deepen.errors import DataError
from deepen.registry import method
from deepen.train.selective.matrices import bank, highest, require_count

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel

Reduce = Literal["norm", "sum", "mean"]
REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"norm": torch.norm, "sum": torch.sum, "mean": torch.mean}


@method(
    "fim",
    family="tune",
    source="arXiv:2310.17041",
    title="On Surgical Fine-Tuning for Language Encoders",
    mechanism="train the layers with the largest Fisher information, frozen the rest",
    cost="1 forward and 1 backward call an example, before the training",
)
def fisher_layers(
    model: PreTrainedModel,
    windows: torch.Tensor,
    tower: str,
    count: int,
    *,
    scored_from: int = 1,
    labels: Literal["true", "model"] = "true",
    reduce: Reduce = "norm",
    weigh: bool = False,
    seed: int = 0,
) -> tuple[tuple[int, ...], dict[int, float]]:
    """The layers to train, and the scores of all.

    Args:
        model: a model that `Checkpoint.load` gave.
        windows: the examples, [n, t] token ids.
        tower: the tower of the layers.
        count: layers to choose.
        scored_from: the first token of a window that is scored.
        labels: the tokens of the text, or tokens drawn from the model's predictions.
        reduce: how the entries of a layer become one score.
        weigh: multiply each entry by its weight squared, so that scaling one layer against the next changes nothing.
        seed: of the labels drawn.

    Returns:
        The numbers of the layers in the bank, ascending; the score by layer, copies of a layer together.

    Raises:
        UsageError: more layers than the program visits, or none.
        DataError: a gradient that is not finite.
    """
    inside = {
        layer: [each for name, each in model.named_parameters() if name.startswith(tuple(prefixes))]
        for layer, prefixes in bank(model, tower).items()
    }
    require_count(count, len(inside))
    generator = torch.Generator().manual_seed(seed)

    def information(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[0, scored_from - 1 : -1].float()
        wanted = ids[0, scored_from:]
        if labels == "model":
            wanted = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(ids.device)
        return cross_entropy(logits, wanted, reduction="sum")

    found = fisher([each for layer in inside.values() for each in layer], model, windows, information)
    scores = {}
    for layer, parameters in inside.items():
        values = [found[each] * (each.detach().float().square() if weigh else 1.0) for each in parameters]
        scores[layer] = REDUCE[reduce](torch.cat([each.flatten() for each in values])).item()
    if not all(torch.isfinite(torch.tensor(list(scores.values())))):
        raise DataError("the gradients are not finite on this text; compute in --dtype float32")
    return highest(scores, count), scores


def fisher(
    parameters: list[nn.Parameter], model: nn.Module, examples: Any, loss: Callable[[torch.Tensor], torch.Tensor]
) -> dict[nn.Parameter, torch.Tensor]:
    """The mean over examples of the squared gradient of each example's loss, in fp32.

    Args:
        parameters: those to look at; gradients and which parameters require one are left as they were.
        model: the module that holds them and those that need no gradient now.
        examples: [n, ...].
        loss: minus the log probability of one example, [1, ...].
    """
    flags = [(each, each.requires_grad) for each in model.parameters()]
    device = parameters[0].device
    found = {each: torch.zeros_like(each, dtype=torch.float32) for each in parameters}
    try:
        for each, _ in flags:
            each.requires_grad_(each in found)
        for example in examples:
            value = loss(example[None].to(device))
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            for each, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    found[each] += gradient.float().square()
    finally:
        for each, flag in flags:
            each.requires_grad_(flag)
    return {each: total / len(examples) for each, total in found.items()}
