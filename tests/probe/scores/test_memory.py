"""Feed-forwards as memories, on neurons that were planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepen
from deepen.checkpoint.tiny import tiny_model
from deepen.probe.scores.memory import strongest
from tests.cli.models import LETTERS, TEXT, tokenizer
from tests.probe.scores.planted import CONTEXT, planted

pytestmark = pytest.mark.method("memory")


def speaking(folder: Path) -> deepen.Checkpoint:
    """A GPT-2 whose neuron 7 of layer 3 fires on everything and speaks for the letter k, which all then predict."""
    model: Any = tiny_model("gpt2")
    block, token = model.transformer.h[3].mlp, 6 + LETTERS.index("k")
    with torch.no_grad():
        block.c_fc.bias[7] = 50.0
        row = model.lm_head.weight[token].clone()
        block.c_proj.weight[7] = 10 * row / row.norm()
        # the largest product with that value is the letter's own
        model.lm_head.weight[token] = 20 * row
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return deepen.open(folder)


def test_the_share_of_predictions_that_the_strongest_memory_speaks_for(tmp_path: Path) -> None:
    ck = speaking(tmp_path / "model")
    got = deepen.score(ck, "memory", text=TEXT[:96], context=CONTEXT)
    ids = torch.tensor(tokenizer()(TEXT[:96]).input_ids).reshape(6, CONTEXT)
    with torch.no_grad():
        predicted = ck.load()(ids).logits[:, 0:15:8].argmax(-1)
    k = 6 + LETTERS.index("k")
    assert got.columns["memory"].values[3] == pytest.approx((predicted == k).double().mean().item())
    assert got.columns["memory"].values[3] > 0.5
    assert got.columns["memory"].count == predicted.numel()


def test_the_strongest_memory_counts_with_its_sign_and_size() -> None:
    head = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    values = torch.tensor([[1.0, 0], [0, 3]])
    activation = torch.tensor([[[2.0, 0.5], [-2, 0.5], [1, 0.5], [1, -0.5]]])
    assert strongest(activation, values, head).tolist() == [[0, 1, 2, 3]]


def test_models_without_such_memories(tmp_path: Path) -> None:
    mixture = planted(tmp_path / "mixture", "mixtral")
    assert "no layer" in deepen.score(mixture, "memory", text=TEXT[:96], context=CONTEXT).notes["memory"]


def test_a_visit_without_its_feed_forward_has_no_value(tmp_path: Path) -> None:
    got = deepen.score(planted(tmp_path / "model").apply("0-2 3.a 4-5"), "memory", text=TEXT[:96], context=CONTEXT)
    assert np.isnan(got.columns["memory"].values).tolist() == [False, False, False, True, False, False]
