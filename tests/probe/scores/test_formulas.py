"""The formula of each score that watches, on streams made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepen.errors import UsageError
from deepen.probe.scores.base import WatchScore
from deepen.probe.scores.block_influence import BlockInfluence
from deepen.probe.scores.cka import Cka, hsic
from deepen.probe.scores.collect import Seen, Stream
from deepen.probe.scores.contribution import Contribution
from deepen.probe.scores.effective_rank import EffectiveRank, spectrum
from deepen.probe.scores.geometry import Geometry


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fed(score: WatchScore, *pairs: tuple[torch.Tensor, torch.Tensor], **written: torch.Tensor) -> list[float]:
    """The first visit's values, main column first, after one visit a batch."""
    for before, after in pairs:
        context = before.shape[1]
        score.watch(Seen(0, True, Stream(before, context), Stream(after, context), written, True))
    return [column.values[0] for column in score.result().columns]


@pytest.mark.method("block_influence")
def test_block_influence() -> None:
    x = random(2, 9, 8)
    turned = torch.zeros_like(x)
    turned[..., ::2], turned[..., 1::2] = -x[..., 1::2], x[..., ::2]
    assert fed(BlockInfluence(1), (x, x * 3))[0] == pytest.approx(0, abs=1e-7)
    assert fed(BlockInfluence(1), (x, -x)) == pytest.approx([2, 2])
    assert fed(BlockInfluence(1), (x, turned)) == pytest.approx([1, 1], abs=1e-6)
    assert fed(BlockInfluence(1), (x, x + turned))[0] == pytest.approx(1 - 1 / math.sqrt(2), rel=1e-6)
    first = torch.cat((-x[:, :1], x[:, 1:]), 1)
    assert fed(BlockInfluence(1), (x, first)) == pytest.approx([2 / 9, 0], abs=1e-6)


@pytest.mark.method("contribution")
def test_contribution() -> None:
    x, a, f = random(2, 9, 8), random(2, 9, 8, seed=1), random(2, 9, 8, seed=2)
    got = fed(Contribution(1), (x, x + a + f), a=a, f=f)
    norm = lambda one, other: (one.norm(dim=-1) / other.norm(dim=-1)).mean().item()  # noqa: E731
    cosine = lambda one, other: torch.cosine_similarity(one, other, dim=-1).mean().item()  # noqa: E731
    expected = [each(*pair) for pair in ((a + f, x), (a, x), (f, x + a)) for each in (norm, cosine)]
    assert got == pytest.approx(expected, rel=1e-5)
    assert fed(Contribution(1), (x, 1.5 * x)) == pytest.approx([0.5, 1], rel=1e-5)
    assert fed(Contribution(1), (x, 0.5 * x)) == pytest.approx([0.5, -1], rel=1e-5)


@pytest.mark.method("effective_rank")
def test_effective_rank() -> None:
    for n, d in ((6, 8), (8, 6)):
        basis = torch.linalg.qr(random(max(n, d), max(n, d)).double())[0][:n, :d]
        if n <= d:
            entropy, rank = spectrum(basis @ basis.mT)
            assert (entropy.item(), rank.item()) == pytest.approx((math.log(n), n))
        x = random(n, d).double()
        rows = x / x.norm(dim=-1, keepdim=True)
        values = np.linalg.eigvalsh((rows.mT @ rows / n).numpy()).clip(1e-300)
        singular = np.linalg.svd(rows.numpy(), compute_uv=False)
        singular /= singular.sum()
        entropy, rank = spectrum(x @ x.mT)
        assert entropy.item() == pytest.approx(-(values * np.log(values)).sum(), rel=1e-9)
        assert rank.item() == pytest.approx(np.exp(-(singular * np.log(singular)).sum()), rel=1e-6)
    same = random(1, 5).expand(7, 5).double()
    assert [each.item() for each in spectrum(same @ same.mT)] == pytest.approx([0, 1], abs=1e-6)
    orthogonal = torch.eye(9).expand(2, 9, 9)
    # the first token is left out, so eight directions are there
    assert fed(EffectiveRank(1), (orthogonal, orthogonal)) == pytest.approx([8, 1])


def written_out(k: np.ndarray, m: np.ndarray) -> float:
    """HSIC1 by its published formula, term by term."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    one = np.ones(n)
    middle = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (np.trace(k @ m) + middle - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


@pytest.mark.method("cka")
def test_hsic_equals_its_formula_and_ignores_shifts() -> None:
    x, y = random(3, 12, 5).double(), random(3, 12, 7, seed=1).double()
    got = hsic(torch.stack((x @ x.mT, y @ y.mT), 1))
    for window in range(3):
        k, m = (each[window].numpy() @ each[window].numpy().T for each in (x, y))
        expected = [[written_out(k, k), written_out(k, m)], [written_out(m, k), written_out(m, m)]]
        np.testing.assert_allclose(got[window].numpy(), expected, rtol=1e-10)
    shifted = x + 3
    np.testing.assert_allclose(hsic(torch.stack((shifted @ shifted.mT, y @ y.mT), 1)).numpy(), got.numpy(), rtol=1e-8)


@pytest.mark.method("cka")
def test_cka_of_a_stream_with_itself_and_with_an_independent_one() -> None:
    x, y = random(40, 65, 512), random(40, 65, 512, seed=1)
    assert fed(Cka(1), (x, x)) == [pytest.approx(1, abs=1e-12)]
    rotation = torch.linalg.qr(random(512, 512, seed=2).double())[0].float()
    assert fed(Cka(1), (x, 7 * x @ rotation + 1)) == [pytest.approx(1, abs=1e-4)]
    assert abs(fed(Cka(1), (x, y))[0]) < 0.02
    # what the biased form gives for the same independent streams
    k, m = (each[0].numpy() - each[0].numpy().mean(0) for each in (x, y))
    biased = np.linalg.norm(k.T @ m) ** 2 / (np.linalg.norm(k.T @ k) * np.linalg.norm(m.T @ m))
    assert biased > 0.8


@pytest.mark.method("cka")
def test_cka_of_batches_is_that_of_the_whole_and_few_tokens_are_refused() -> None:
    x, y = random(6, 20, 16), random(6, 20, 16, seed=1)
    y = y + x
    whole = fed(Cka(1), (x, y))
    assert fed(Cka(1), (x[:1], y[:1]), (x[1:], y[1:])) == pytest.approx(whole, abs=1e-12)
    assert 0.2 < whole[0] < 0.8
    with pytest.raises(UsageError, match="at least 5 tokens"):
        fed(Cka(1), (x[:, :4], y[:, :4]))


@pytest.mark.method("geometry")
def test_geometry_of_maps_that_are_in_its_family() -> None:
    x = random(6, 30, 8)
    scale, shift = random(8, seed=1), random(8, seed=2)
    assert fed(Geometry(1), (x, scale * x + shift)) == pytest.approx([1, 0], abs=1e-5)
    explained, residual = fed(Geometry(1), (x, x))
    assert explained == 1
    assert math.isnan(residual)


@pytest.mark.method("geometry")
def test_geometry_of_an_update_that_is_independent_of_the_token() -> None:
    x, noise = random(40, 100, 8), random(40, 100, 8, seed=1)
    explained, residual = fed(Geometry(1), (x, x + noise))
    assert explained == pytest.approx(0.5, abs=0.03)
    assert residual == pytest.approx(1, abs=0.03)
    # judged on windows that it was not fitted on: with as many numbers as tokens nothing is explained
    few, other = random(2, 3, 400), random(2, 3, 400, seed=1)
    assert fed(Geometry(1), (few, few + other))[1] > 1
    assert "two windows" in _note(Geometry(1), x[:1])


@pytest.mark.method("geometry")
def test_geometry_of_batches_is_that_of_the_whole() -> None:
    x = random(7, 30, 8)
    y = x + torch.tanh(x) + 0.1 * random(7, 30, 8, seed=1)
    whole = fed(Geometry(1), (x, y))
    assert fed(Geometry(1), (x[:3], y[:3]), (x[3:], y[3:])) == pytest.approx(whole, rel=1e-9)
    assert 0.9 < whole[0] < 1


def _note(score: WatchScore, x: torch.Tensor) -> str:
    score.watch(Seen(0, True, Stream(x, x.shape[1]), Stream(x, x.shape[1]), {}, True))
    return score.result().note
