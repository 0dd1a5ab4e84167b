"""A short text from a trained stack."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from deepen.stack.generate import Sampling, generate
from deepen.stack.stack import Stack


def sample(stack: Stack, tokenizer: str, prompt: str = "\n", *, tokens: int = 200, temperature: float = 0.8) -> str:
    """What a stack writes after a prompt, which is left out.

    Args:
        stack: of a language, in eval mode.
        tokenizer: the JSON of its `tokenizers.Tokenizer`.
        prompt: at least one token.
        tokens: to write; fewer where the stack has learned fewer positions.
        temperature: of the draws, whose seed is 0.
    """
    made = Tokenizer.from_str(tokenizer)
    ids = made.encode(prompt).ids
    room = tokens if stack.positions is None else max(0, min(tokens, stack.config.context - len(ids)))
    given = torch.tensor([ids], device=next(stack.parameters()).device)
    found = generate(stack, given, steps=room, sampling=Sampling(temperature=temperature))
    return made.decode(found[0, len(ids) :].tolist())
