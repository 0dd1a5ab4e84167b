"""Angular distance of blocks against the streams that transformers itself returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deepen.probe.scores.angular import angle, block_distances
from tests.cli.models import TEXT, tokenizer
from tests.probe.scores.planted import CONTEXT, planted

pytestmark = pytest.mark.method("angular")


def test_equals_the_computation_by_hand(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model", "gpt2")
    model = ck.load()
    ids = torch.tensor(tokenizer()(TEXT[: 3 * CONTEXT]).input_ids).reshape(3, CONTEXT)
    found = []
    # the last of transformers' hidden states has gone through the final norm, so the hook sees what the layer gave
    model.transformer.h._modules["5"].register_forward_hook(lambda module, args, out: found.append(out))
    with torch.no_grad():
        states = [*model(ids, output_hidden_states=True).hidden_states[:-1]]
    last = found[0][0] if isinstance(found[0], tuple) else found[0]
    h = np.stack([state[:, -1].double().numpy() for state in (*states, last)])
    cosine = np.einsum("lbd,mbd->lmb", h, h) / np.einsum("lb,mb->lmb", *[np.linalg.norm(h, axis=-1)] * 2)
    expected = (np.arccos(np.clip(cosine, -1, 1)) / np.pi).mean(-1)
    got = block_distances(ck, TEXT[: 3 * CONTEXT], context=CONTEXT)
    assert got.shape == (6, 7)
    for start in range(6):
        for size in range(1, 7):
            if start + size > 6:
                assert np.isnan(got[start, size])
            else:
                assert got[start, size] == pytest.approx(expected[start, start + size], abs=1e-5)
    assert (got[:, 0] == 0).all()


def test_a_block_that_does_nothing_is_at_no_distance(tmp_path: Path) -> None:
    got = block_distances(planted(tmp_path / "model", idle=(2, 3)), TEXT[:64], context=CONTEXT)
    assert got[2, 1] == got[3, 1] == got[2, 2] == 0
    assert got[2, 3] == got[4, 1]
    assert np.nanmin(got[[0, 1, 4, 5], 1]) > 0.01


def test_a_looped_layer_has_a_row_for_each_turn(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model").apply("0 (1)*3 5")
    got = block_distances(ck, TEXT[:64], context=CONTEXT)
    assert got.shape == (5, 6)
    assert len(set(got[1:4, 1])) == 3


@pytest.mark.parametrize("batch", [2, 3])
def test_the_batch_changes_nothing(tmp_path: Path, batch: int) -> None:
    ck = planted(tmp_path / "model", bos=True)
    one, many = (block_distances(ck, TEXT[:80], context=CONTEXT, batch=size) for size in (1, batch))
    np.testing.assert_allclose(one, many, atol=1e-6)


def test_angles_at_the_ends() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (angle(x, x * 3) < 1e-15).all()
    assert torch.allclose(angle(x, -x), torch.full((7,), torch.pi, dtype=torch.float64))
    right = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert angle(*right).item() == pytest.approx(torch.pi / 4)
