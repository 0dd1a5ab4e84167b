"""Perplexity and bits per byte of a causal language model on a text.

The text is tokenised in one piece and cut into windows of `context` tokens that do not overlap. A tokenizer that
begins a text with special tokens, such as BOS, begins every window with them. The first token of a window is not
scored, nor is any special token: without BOS a window of n tokens scores n - 1, with it every token of the text. The
last, shorter window is scored too if it holds at least two tokens of text.

    perplexity = exp(nll / tokens)        bits per byte = nll / (bytes ln 2)

with the sum of the negative log likelihoods in nats over the scored tokens, and the UTF-8 bytes these stand for. The
log-softmax is in fp32, the sum in fp64. Memory holds the logits of one batch, [batch, context, vocabulary], in the
type of the model, and 64 MB of them in fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepen.errors import DataError, FamilyError
from deepen.probe.windows import Window, batches, cut, require_context

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase

# Values of the log-softmax that are computed at a time: 64 MB in fp32.
CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        nll: negative log likelihood of the scored tokens, summed, in nats.
        tokens: scored tokens.
        bytes: UTF-8 bytes that the scored tokens stand for.
        windows: windows read.
        context: tokens of a window.
        read: tokens that went through the model.
        seconds: spent in the model.
        window_nll: the nll of each window, in the order of the text.
        window_tokens: the scored tokens of each window.
    """

    nll: float
    tokens: int
    bytes: int
    windows: int
    context: int
    read: int
    seconds: float
    window_nll: tuple[float, ...] = ()
    window_tokens: tuple[int, ...] = ()

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log likelihood; infinity where a float cannot hold it."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nll / (self.bytes * math.log(2))

    @property
    def tokens_per_second(self) -> float:
        return self.read / self.seconds if self.seconds else math.inf

    def to_json(self) -> dict[str, float | int]:
        """A plain dictionary for `json.dumps`."""
        names = ("perplexity", "bits_per_byte", "nll", "tokens", "bytes", "windows", "context", "seconds")
        return {name: getattr(self, name) for name in names} | {"tokens_per_second": self.tokens_per_second}


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """How well a causal language model predicts a text; see the head of the file for what is scored.

    Args:
        model: a model with a causal head, in eval mode.
        tokenizer: its tokenizer.
        text: what to predict.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        progress: called with the windows done since its last call, and all there are.

    Raises:
        FamilyError: the model has no causal head.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window, or the logits are not finite.

    Example:
        >>> import deepen
        >>> ck = deepen.open("model")                                               # doctest: +SKIP
        >>> deepen.perplexity(ck.load(), ck.tokenizer(), text).bits_per_byte        # doctest: +SKIP
    """
    import torch

    if not is_causal(model):
        name = type(model).__name__
        raise FamilyError(f"{name} has no causal head, so perplexity says nothing; deepen.distance compares programs")
    require_context(model.config, context)
    windows = cut(tokenizer, text, context=context, tokens=tokens)
    nll: list[float] = []
    seconds = 0.0
    with torch.inference_mode():
        for group in batches(windows, batch):
            ids = torch.tensor([window.ids for window in group], device=model.device)
            started = time.perf_counter()
            found = window_losses(model(input_ids=ids, use_cache=False).logits, ids, group)
            seconds += time.perf_counter() - started
            if not all(map(math.isfinite, found)):
                raise DataError("the model's logits are not finite on this text; compute in --dtype float32")
            nll += found
            if progress is not None:
                progress(len(group), len(windows))
    return summed(windows, nll, context, seconds)


def window_losses(logits: torch.Tensor, ids: torch.Tensor, group: Sequence[Window]) -> list[float]:
    """The negative log likelihood of each window of a batch, in nats.

    Args:
        logits: [b, t, vocabulary].
        ids: [b, t].
        group: the windows of the batch.
    """
    import torch

    first = scored_from(group[0])
    losses = token_losses(logits[:, first - 1 : -1], ids[:, first:])
    return losses.view(len(group), -1).sum(1, dtype=torch.float64).tolist()


def scored_from(window: Window) -> int:
    """The first token of a window that is scored."""
    return max(1, window.start)


def summed(windows: Sequence[Window], nll: Sequence[float], context: int, seconds: float) -> Evaluation:
    """The evaluation of a text from the losses of its windows."""
    firsts = [scored_from(window) for window in windows]
    tokens = [len(window.ids) - first for window, first in zip(windows, firsts, strict=True)]
    return Evaluation(
        nll=sum(nll),
        tokens=sum(tokens),
        bytes=sum(w.edges[-1] - w.edges[first - w.start] for w, first in zip(windows, firsts, strict=True)),
        windows=len(windows),
        context=context,
        read=sum(len(window.ids) for window in windows),
        seconds=seconds,
        window_nll=tuple(nll),
        window_tokens=tuple(tokens),
    )


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of each target in fp32, on the CPU; a bounded piece of the logits at a time.

    Args:
        logits: [b, t, vocabulary].
        targets: [b, t].

    Returns:
        [b t], in nats.
    """
    import torch
    from torch.nn.functional import cross_entropy

    flat, wanted = logits.flatten(0, 1), targets.flatten()
    rows = max(1, CHUNK // flat.shape[-1])
    pieces = [
        cross_entropy(flat[at : at + rows].float(), wanted[at : at + rows], reduction="none").cpu()
        for at in range(0, len(wanted), rows)
    ]
    return torch.cat(pieces)


def is_causal(model: PreTrainedModel) -> bool:
    """Whether the model predicts tokens from those before them only.

    The class alone does not tell: BertLMHeadModel sees what follows unless its config says otherwise. So the model is
    asked: the last of a few tokens must not change the logits of those before it.
    """
    import torch

    if not model.can_generate() or model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        return False
    highest = model.config.get_text_config().vocab_size - 1
    ids = torch.arange(1, 9, device=model.device).clamp(max=highest).repeat(2, 1)
    ids[1, -1] = 0
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    # NaN is no answer; whoever scores these logits will say so
    return not bool((before[0] - before[1]).abs().max() > 1e-3 * before.abs().max())
