"""Scores of a real model of 30 layers against transformers' own hidden states and against whole evaluations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import deepen
from deepen.cli.packaged import packaged_text
from deepen.probe.once import read_once
from deepen.probe.windows import cut
from tests.assets import smollm2_gguf

pytestmark = pytest.mark.slow
CONTEXT, TOKENS = 64, 128


@pytest.fixture(scope="module")
def ck() -> deepen.Checkpoint:
    return read_once(deepen.open(smollm2_gguf()))


def test_scores_that_watch(ck: deepen.Checkpoint) -> None:
    text = packaged_text()
    got = deepen.score(ck, text=text, context=CONTEXT, tokens=TOKENS, dtype=torch.float32)
    model = ck.load(dtype=torch.float32)
    ids = torch.tensor([window.ids for window in cut(ck.tokenizer(), text, context=CONTEXT, tokens=TOKENS)])
    with torch.no_grad():
        states = [state.double() for state in model(ids, output_hidden_states=True).hidden_states]
    # the last state has gone through the final norm
    for at in range(29):
        one, two = states[at : at + 2]
        influence = 1 - torch.cosine_similarity(one, two, dim=-1).mean().item()
        assert got.columns["block_influence"].values[at] == pytest.approx(influence, abs=1e-5)
        norm = ((two - one).norm(dim=-1) / one.norm(dim=-1)).mean().item()
        assert got.columns["contribution"].values[at] == pytest.approx(norm, rel=1e-4)
    assert not got.notes
    assert "contribution.f" in got.columns
    similar = got.matrices["cka"].values
    assert np.allclose(np.diag(similar), 1)
    assert got.rank("block_influence")[0] == got.rank("contribution")[0] == 1


def test_scores_that_run_the_model(ck: deepen.Checkpoint) -> None:
    text = packaged_text()
    got = deepen.score(
        ck, "removal", "lens", "effects", "attention", text=text, context=CONTEXT, tokens=CONTEXT, dtype=torch.float32
    )
    read = [
        deepen.perplexity(
            ck.apply(program).load(dtype=torch.float32, attn_implementation="eager"), ck.tokenizer(), text,
            context=CONTEXT, tokens=CONTEXT,
        ).perplexity
        for program in ("0-14 16-29", "0-9 10.f 11-29")
    ]  # fmt: skip
    assert got.columns["removal.perplexity"].values[15] == pytest.approx(read[0], rel=1e-4)
    assert got.columns["removal.a.perplexity"].values[10] == pytest.approx(read[1], rel=1e-4)
    assert got.rank("removal")[0] == 1
    assert (got.columns["lens"].values[29], got.columns["lens.agreement"].values[29]) == (0, 1)
    effects = got.matrices["effects"].values
    assert np.allclose(np.diag(effects), 1, atol=1e-5)
    assert (effects[np.tril_indices(30, -1)] == 0).all()
    # most heads of the middle layers look at the first token
    assert np.mean(got.columns["attention.sink"].values[10:20]) > 0.3
