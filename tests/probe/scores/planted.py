"""Tiny checkpoints with layers that are known to do nothing, or to turn the stream around."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import tiny_model
from tests.cli.models import tokenizer

CONTEXT = 16


def planted(folder: Path, family: str = "llama", *, idle: Sequence[int] = (), bos: bool = False) -> Checkpoint:
    """A llama or GPT-2 of six layers, of which those in `idle` write nothing to the stream."""
    model = tiny_model(family)
    with torch.no_grad():
        for layer in idle:
            for name, parameter in model.base_model.named_parameters():
                if f".{layer}." in f".{name}" and ("o_proj" in name or "down_proj" in name or "c_proj" in name):
                    parameter.zero_()
    model.save_pretrained(folder)
    tokenizer(bos=bos).save_pretrained(folder)
    return deepen.open(folder)
