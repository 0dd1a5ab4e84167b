"""Tiny checkpoints for transforms, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import output_of, tiny_inputs, tiny_model


def checkpoint(
    folder: Path, family: str, plant: Callable[[PreTrainedModel], None] = lambda model: None, dtype: str = "float32"
) -> Checkpoint:
    """A tiny checkpoint on disk, its weights changed by `plant` before they are written."""
    model = tiny_model(family)
    with torch.no_grad():
        plant(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return deepen.open(folder)


def outputs(ck: Checkpoint, *, dtype: str | None = None) -> torch.Tensor:
    """What the checkpoint computes for one fixed input."""
    model = ck.load(dtype=dtype)
    return output_of(model, tiny_inputs(model, tokens=16))


def off(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return (one - two).abs().max().item() / max(1.0, two.abs().max().item())


def layer(model: PreTrainedModel, index: int) -> torch.nn.Module:
    """A layer of a decoder."""
    base = model.base_model
    return (base.layers if hasattr(base, "layers") else base.h)[index]  # pyright: ignore[reportIndexIssue, reportReturnType]


def silence(part: torch.nn.Module, *outputs: str) -> None:
    """Lets a part add nothing: its output matrices and biases become zero."""
    for name, parameter in part.named_parameters():
        if any(name.startswith(output) for output in outputs):
            parameter.zero_()
