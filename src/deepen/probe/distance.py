"""How far a program moves a model without a causal head, against the program that visits every layer once.

| the model has | measured |
|---|---|
| a head (masked language model, classifier, encoder-decoder) | mean KL(identity, program) of its predictions, in nats |
| no head | |h - h_identity| / |h_identity| over the last hidden states |

Texts are read in the same windows as for perplexity, here with all that the tokenizer puts around a text. An
encoder-decoder reads the window in its encoder and again in its decoder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deepen.errors import DataError, FamilyError
from deepen.probe.perplexity import CHUNK
from deepen.probe.windows import batches, cut, require_context

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a model's outputs lie from those of a reference.

    Attributes:
        kind: `kl` (nats a prediction) or `relative` (a share of the norm).
        value: the distance; 0 for equal models.
        agreement: share of predictions whose first choice is the same; None for hidden states.
        predictions: distributions or hidden states compared.
        windows: windows read.
        context: tokens of a window.
        read: tokens that went through the model.
        seconds: spent in the model, not in the reference.
    """

    kind: Literal["kl", "relative"]
    value: float
    agreement: float | None
    predictions: int
    windows: int
    context: int
    read: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.read / self.seconds if self.seconds else math.inf

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        names = ("kind", "value", "agreement", "predictions", "windows", "context", "seconds", "tokens_per_second")
        return {name: getattr(self, name) for name in names}


def distance(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Distance:
    """How far the outputs of `model` lie from those of `reference`; see the head of the file.

    Args:
        model: the model with a program, in eval mode.
        reference: the same model with the identity program, in eval mode.
        tokenizer: their tokenizer.
        text: what to read.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        progress: called with the windows done since its last call, and all there are.

    Raises:
        FamilyError: the model does not read text.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window, or the outputs are not finite.
    """
    import torch

    if model.main_input_name != "input_ids":
        raise FamilyError(
            f"{type(model).__name__} takes {model.main_input_name}, and deepen evaluates models that read text; "
            "compare its outputs in Python"
        )
    require_context(model.config, context)
    windows = cut(tokenizer, text, context=context, tokens=tokens, suffix=True)
    kind: Literal["kl", "relative"] = "relative"
    moved, whole, same, count, read, seconds = 0.0, 0.0, 0, 0, 0, 0.0
    with torch.inference_mode():
        for group in batches(windows, batch):
            ids = torch.tensor([window.ids for window in group], device=model.device)
            started = time.perf_counter()
            has_head, got = _output(model, ids)
            seconds += time.perf_counter() - started
            _, expected = _output(reference, ids)
            if has_head:
                kind = "kl"
                divergence, equal = _kl(expected, got)
                moved, same = moved + divergence, same + equal
            else:
                moved += _squares(got - expected)
                whole += _squares(expected)
            if not math.isfinite(moved):
                raise DataError("the model's outputs are not finite on this text; compute in --dtype float32")
            count += len(got)
            read += ids.numel()
            if progress is not None:
                progress(len(group), len(windows))
    return Distance(
        kind=kind,
        value=moved / count if kind == "kl" else math.sqrt(moved / whole) if whole else 0.0,
        agreement=same / count if kind == "kl" else None,
        predictions=count,
        windows=len(windows),
        context=context,
        read=read,
        seconds=seconds,
    )


def _output(model: PreTrainedModel, ids: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """Whether the model has a head, and its logits or last hidden states, one row a prediction."""
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    result = model(**inputs)
    logits = getattr(result, "logits", None)
    found = result.last_hidden_state if logits is None else logits
    return logits is not None, found.flatten(0, -2)


def _kl(expected: torch.Tensor, got: torch.Tensor) -> tuple[float, int]:
    """Sum over rows of KL(expected, got) in nats, and the rows with the same first choice."""
    import torch

    rows = max(1, CHUNK // expected.shape[-1])
    total, same = 0.0, 0
    for at in range(0, len(expected), rows):
        p = expected[at : at + rows].float().log_softmax(-1)
        q = got[at : at + rows].float().log_softmax(-1)
        # a probability of 0 adds nothing, and 0 times minus infinity is not a number
        terms = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0)
        total += terms.sum(-1).cpu().sum(dtype=torch.float64).item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return total, same


def _squares(values: torch.Tensor) -> float:
    import torch

    return values.float().square().sum(-1).cpu().sum(dtype=torch.float64).item()
