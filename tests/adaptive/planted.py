"""A tiny model in which two layers do nothing, and a text that it wrote itself.

Text that a model has drawn from its own predictions is predicted best by the model as it is, so leaving out the two
layers is the best of all programs that leave out two.
"""

from __future__ import annotations

from pathlib import Path

import torch

import deepen
from deepen.checkpoint.tiny import tiny_model
from tests.cli.models import LETTERS, tokenizer

IDLE = (2, 3)
BEST = "0-1 4-5"


def planted(folder: Path, letters: int = 600) -> tuple[Path, str]:
    """The folder of the model, and the text."""
    model = tiny_model("llama")
    with torch.no_grad():
        for idle in IDLE:
            model.model.layers[idle].self_attn.o_proj.weight.zero_()
            model.model.layers[idle].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder, written(model, letters)


def written(model, letters: int) -> str:
    """A text that the model draws, in windows of 16 letters as it will be read."""
    generator = torch.Generator().manual_seed(0)
    first = 6
    windows = -(-letters // 16)
    ids = torch.randint(first, first + len(LETTERS), (windows, 1), generator=generator)
    while ids.shape[1] < 16:
        with torch.no_grad():
            logits = model(ids).logits[:, -1, first : first + len(LETTERS)]
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, drawn + first], 1)
    return "".join(LETTERS[index - first] for index in ids.flatten().tolist())[:letters]


def opened(folder: Path):
    return deepen.open(folder)
