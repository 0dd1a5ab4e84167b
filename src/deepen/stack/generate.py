"""Generation: greedy or sampled, one token at a time over a cache.

    for tokens in stream(stack, prompt, steps=100, temperature=0.8): ...     tokens: (B,), one a sequence

Top-k keeps the k most likely tokens; top-p the fewest whose probabilities reach p: Holtzman et al., arXiv:1904.09751.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.stack import Result, Stack


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: sample among so many; 0: all.
        top_p: sample among the fewest whose probabilities reach this; 1: all.
        seed: of the draws.

    Raises:
        UsageError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, right, wanted in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not right:
                raise UsageError(f"{name} is {getattr(self, name)}; expected {wanted}")

    def choose(self, logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """One token (B,) from logits (B, vocabulary)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            shares = ordered.softmax(-1)
            # a token stays while those before it do not yet reach p
            gone = shares.cumsum(-1) - shares >= self.top_p
            logits = logits.masked_fill(gone.scatter(-1, order, gone), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def stream(
    stack: Stack,
    prompt: torch.Tensor,
    *,
    steps: int,
    sampling: Sampling | None = None,
    valid: torch.Tensor | None = None,
    stop: int | None = None,
    compiled: bool = False,
) -> Iterator[torch.Tensor]:
    """The tokens after a prompt, as they come.

    Args:
        stack: the model, in evaluation mode.
        prompt: (B, T) ids.
        steps: tokens to make, at most.
        sampling: how to choose; greedy by default.
        valid: (B, T), False at padding, which stands before the tokens of a shorter prompt.
        stop: the token that ends a sequence; it is repeated until all have ended.
        compiled: run the steps after the first compiled, which pays from thousands of tokens on: compiling takes up to
            a minute, once a process.

    Yields:
        (B,) ids.

    Raises:
        UsageError: an empty prompt, a model that is not causal, or padding after tokens.
    """
    if prompt.shape[1] == 0:
        raise UsageError("the prompt is empty; give at least one token")
    if not stack.config.causal:
        raise UsageError("a model that is not causal cannot generate")
    if valid is not None and not bool(valid[:, -1].all()):
        raise UsageError("padding must stand before the tokens of a prompt, not after them")
    sampling = sampling or Sampling()
    generator = None
    if sampling.temperature:
        generator = torch.Generator(prompt.device).manual_seed(sampling.seed)
    cache = stack.new_cache(prompt.shape[1] + steps)
    tokens, ended = prompt, torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    forward: Callable[..., Result] = stack
    for _ in range(steps):
        logits = forward(tokens, cache=cache, valid=valid, last=1).logits[:, -1]
        chosen = sampling.choose(logits, generator)
        if stop is not None:
            chosen = torch.where(ended, stop, chosen)
            ended = ended | (chosen == stop)
        yield chosen
        if stop is not None and bool(ended.all()):
            return
        tokens, valid = chosen[:, None], None
        if compiled and forward is stack:
            forward = torch.compile(stack.forward, dynamic=True)


def by_columns(stack: Stack) -> Stack:
    """Lays the matrices of a stack out by columns, in place; values, shapes and what is saved stay as they are.

    A product with one token then reads memory in order and needs no sum across a row, which is faster on some
    processors (`benchmarks/stack_speed.py` measures it); training gains nothing.
    """
    with torch.no_grad():
        for module in stack.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.t().contiguous().t()
    return stack


def generate(stack: Stack, prompt: torch.Tensor, **settings: object) -> torch.Tensor:
    """The prompt and what follows, (B, T + steps); see `stream`."""
    return torch.cat([prompt, *(tokens[:, None] for tokens in stream(stack, prompt, **settings))], dim=1)  # pyright: ignore
