"""What training lowers: cross-entropy, distillation from a teacher, or both.

    CE      mean over tokens of -log p_s(token)
    KL      mean over tokens of sum_v p_t^T(v) (log p_t^T(v) - log p_s^T(v))      p^T = softmax(logits / T)
    loss    (1 - w) CE + w T^2 KL + h sum over marks of mean (stream_s - stream_t)^2

T^2 keeps the gradient of the KL of one size whatever the temperature. For equal models the KL and its gradient are 0.

Source: Hinton, Vinyals, Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss

from deepen.errors import UsageError
from deepen.registry import method
from deepen.train.distributed import single


class Loss(Protocol):
    """The mean loss of a batch, in nats; differentiable."""

    def __call__(self, model: Any, ids: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy of the next token.

    Attributes:
        scored_from: the first token of a window that is scored.
    """

    scored_from: int = 1

    def __call__(self, model: Any, ids: torch.Tensor, /) -> torch.Tensor:
        """The loss of a batch [b, t]."""
        return self.of(model(input_ids=ids, use_cache=False).logits, ids)

    def of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The loss of logits [b, t, vocabulary], in fp32."""
        predicted = logits[:, self.scored_from - 1 : -1].flatten(0, 1).float()
        return cross_entropy(predicted, ids[:, self.scored_from :].flatten())


@method(
    "distillation",
    family="train",
    source="arXiv:1503.02531",
    title="Distilling the Knowledge in a Neural Network",
    mechanism="learn the predictions of a teacher, and its streams at marks, beside the text",
    cost="a forward pass of the teacher",
)
@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Cross-entropy and the teacher's predictions, weighted.

    Attributes:
        teacher: a model of the same vocabulary in eval mode; it is never moved.
        weight: of the teacher's predictions, 0 to 1; the tokens of the text have the rest.
        temperature: both predictions are softened by it.
        hidden: weight of the streams at marks that both programs have.
        scored_from: the first token of a window that is scored.

    Raises:
        UsageError: a value outside its range.
    """

    teacher: Any
    weight: float = 0.9
    temperature: float = 1.0
    hidden: float = 0.0
    scored_from: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise UsageError(f"--distil {self.weight}: expected a weight from 0 to 1")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: expected a number above 0")
        if not 0 <= self.hidden < float("inf"):
            raise UsageError(f"--distil-hidden {self.hidden}: expected a weight of 0 or more")

    def __call__(self, model: Any, ids: torch.Tensor, /) -> torch.Tensor:
        """The loss of a batch [b, t].

        Raises:
            UsageError: another vocabulary, or no mark that both have where streams are compared.
        """
        with torch.no_grad():
            wanted = self.teacher(input_ids=ids, use_cache=False).logits
        logits = model(input_ids=ids, use_cache=False).logits
        if logits.shape != wanted.shape:
            raise UsageError(
                f"the teacher predicts {wanted.shape[-1]} tokens, the model {logits.shape[-1]}; distillation needs "
                "one vocabulary"
            )
        total = torch.zeros((), device=logits.device)
        if self.weight:
            total = total + self.weight * self.temperature**2 * self.divergence(logits, wanted)
        if self.weight < 1:
            total = total + (1 - self.weight) * CrossEntropy(scored_from=self.scored_from).of(logits, ids)
        if self.hidden:
            total = total + self.hidden * self._streams(model)
        return total

    def divergence(self, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The KL divergence at the temperature, mean over the scored positions, of logits [b, t, vocabulary]."""
        scored = slice(self.scored_from - 1, -1)
        student, teacher = (
            log_softmax(each[:, scored].flatten(0, 1).float() / self.temperature, -1) for each in (logits, wanted)
        )
        return kl_div(student, teacher, reduction="batchmean", log_target=True)

    def _streams(self, model: Any) -> torch.Tensor:
        """The squared errors of the streams [b, t, d] at the marks of the last pass, summed over the marks."""
        mine, theirs = single(model).deepen.marks, self.teacher.deepen.marks
        shared = [name for name in mine if name in theirs]
        if not shared:
            raise UsageError(
                f"--distil-hidden compares streams at marks that both programs have; the model has "
                f"{sorted(mine) or 'none'}, the teacher {sorted(theirs) or 'none'}: write @name into both programs"
            )
        for name in shared:
            if mine[name].shape != theirs[name].shape:
                raise UsageError(
                    f"--distil-hidden: the stream at @{name} is {mine[name].shape[-1]} wide in the model and "
                    f"{theirs[name].shape[-1]} in the teacher; expected one width"
                )
        return torch.stack([mse_loss(mine[name].float(), theirs[name].float()) for name in shared]).sum()
