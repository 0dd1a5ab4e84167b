"""The distance to the identity program against computations by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import deepen
from deepen.checkpoint.tiny import tiny_model
from deepen.errors import FamilyError
from deepen.probe import distance as module
from deepen.probe.distance import distance
from tests.cli.models import TEXT, tokenizer

CONTEXT = 16


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_a_model_lies_at_no_distance_from_itself(family: str) -> None:
    model = tiny_model(family)
    got = distance(model, model, tokenizer(), TEXT[:64], context=CONTEXT)
    assert got.value == pytest.approx(0, abs=1e-7)
    assert got.agreement == 1.0


def test_kl_equals_the_computation_by_hand_and_has_its_direction() -> None:
    model, reference = tiny_model("bert", seed=1), tiny_model("bert", seed=2)
    made = tokenizer(encoder=True)
    text = TEXT[:42]
    total, rows = 0.0, 0
    for at in range(0, 42, CONTEXT - 2):
        ids = torch.tensor([made(text[at : at + CONTEXT - 2]).input_ids])
        with torch.no_grad():
            p, q = (softmax(each(ids).logits[0].numpy().astype(np.float64)) for each in (reference, model))
        total += (p * np.log(p / q)).sum()
        rows += len(p)
    got = distance(model, reference, made, text, context=CONTEXT)
    assert (got.kind, got.predictions) == ("kl", rows)
    assert got.value == pytest.approx(total / rows, rel=1e-5)
    swapped = distance(reference, model, made, text, context=CONTEXT)
    assert swapped.value != pytest.approx(got.value, rel=1e-2)


def test_hidden_states_of_a_model_without_a_head() -> None:
    model, reference = (tiny_model("llama", seed=seed).model for seed in (1, 2))
    text = TEXT[:32]
    ids = torch.tensor([tokenizer()(text).input_ids]).reshape(2, 16)
    with torch.no_grad():
        one, two = (each(ids).last_hidden_state.double() for each in (model, reference))
    got = distance(model, reference, tokenizer(), text, context=CONTEXT)
    assert got.kind == "relative"
    assert got.agreement is None
    assert got.value == pytest.approx(((one - two).norm() / two.norm()).item(), rel=1e-5)


def test_batch_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = tiny_model("bert", seed=1), tiny_model("bert", seed=2)
    one = distance(model, reference, tokenizer(), TEXT[:90], context=CONTEXT)
    monkeypatch.setattr(module, "CHUNK", 200)
    many = distance(model, reference, tokenizer(), TEXT[:90], context=CONTEXT, batch=4)
    assert many.value == pytest.approx(one.value, rel=1e-5)
    assert many.agreement == one.agreement


def test_a_model_that_reads_no_text_is_refused() -> None:
    seeing = tiny_model("vit")
    with pytest.raises(FamilyError, match="pixel_values"):
        distance(seeing, seeing, tokenizer(), TEXT, context=CONTEXT)


def test_distance_is_exported() -> None:
    assert deepen.distance is distance
