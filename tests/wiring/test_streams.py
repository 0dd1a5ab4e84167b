"""Wirings of several streams and of directions: each method's own identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.errors import UsageError
from deepen.program.site import Site
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier
from deepen.wiring.deep_delta_matrix import Values
from deepen.wiring.manifold_hyper_connections import sinkhorn
from deepen.wiring.orthogonal_hyper_connections import left, right, rotation, unit
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, WIDTH, Case


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def one_site(case: Case, state: Any, y: torch.Tensor, index: int = 2) -> tuple[torch.Tensor, Any, Any, Site]:
    """What a site reads and leaves, with the wiring and the site."""
    wiring: Any = laws.changed(case, PLAIN).wiring
    site = wiring.shape.sites[index]
    with torch.no_grad():
        read = wiring.read(state, site)
        return read.u, wiring.write(state, site, read, y, unchanged), wiring, site


@pytest.mark.method("hyper-connections")
def test_a_site_of_hyper_connections_written_out() -> None:
    state, y = noise(1, 1, 4, WIDTH), noise(1, 1, WIDTH, seed=1)
    u, new, wiring, site = one_site(Case("hyper-connections"), state, y)
    streams, at = state[0, 0], site.index
    normed = streams / streams.square().mean(-1, keepdim=True).sqrt()
    moved, scales = torch.tanh(normed @ wiring.maps[at]), wiring.scales[at]
    reads = wiring.read_weights[at] + scales[0] * moved[:, 0]
    mixes = wiring.mix_weights[at] + scales[0] * moved[:, 1:5]
    writes = wiring.write_weights[at] + scales[1] * moved[:, 5]
    torch.testing.assert_close(u[0, 0], sum(reads[i] * streams[i] for i in range(4)))
    for j in range(4):
        expected = sum(mixes[i, j] * streams[i] for i in range(4)) + writes[j] * y[0, 0]
        torch.testing.assert_close(new[0, 0, j], expected)


@pytest.mark.method("hyper-connections")
def test_initial_values_of_hyper_connections_and_which_of_them_learn_first() -> None:
    stack = laws.at_first(Case("hyper-connections"), LOOPED)
    wiring: Any = stack.wiring
    for index in range(10):
        assert wiring.read_weights[index].tolist() == [float(i == index % 4) for i in range(4)]
        assert torch.equal(wiring.mix_weights[index], torch.eye(4, dtype=torch.float64))
        assert wiring.write_weights[index].tolist() == [1.0] * 4
    stack(laws.tokens()).logits.square().mean().backward()
    assert bool((wiring.maps.grad.flatten(1).abs().amax(-1) > 1e-9).all())
    assert not wiring.scales.grad.any()
    # (D + 2) n + n^2 + 2 parameters of the static part and of the maps: n = 4 at 10 sites
    assert sum(each.numel() for each in wiring.parameters()) == 10 * (WIDTH * 6 + 4 * 6 + 2)


@pytest.mark.method("hyper-connections")
def test_one_static_stream_with_weights_of_one_is_pre_ln() -> None:
    laws.equals_pre_ln(Case("hyper-connections", {"streams": 1, "dynamic": False}), LOOPED)


@pytest.mark.method("manifold-hyper-connections")
def test_rows_of_sinkhorn_are_exact_and_columns_converge() -> None:
    matrices = sinkhorn(noise(50, 4, 4), 20)
    assert bool((matrices >= 0).all())
    torch.testing.assert_close(matrices.sum(-1), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(matrices.sum(-2), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=1e-6)
    assert float(torch.linalg.matrix_norm(matrices, 2).max()) <= 1 + 1e-6
    whole = torch.linalg.multi_dot(list(matrices))
    torch.testing.assert_close(whole.sum(-2), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)
    one_round = sinkhorn(noise(50, 4, 4), 1)
    torch.testing.assert_close(one_round.sum(-1), torch.ones(50, 4, dtype=torch.float64))
    assert float((one_round.sum(-2) - 1).abs().max()) > 1e-3
    assert torch.equal(sinkhorn(noise(3, 1, 1), 2), torch.ones(3, 1, 1, dtype=torch.float64))


@pytest.mark.method("manifold-hyper-connections")
def test_gradients_of_sinkhorn_are_right() -> None:
    logits = noise(3, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 20), logits)


@pytest.mark.parametrize(
    ("name", "logits"),
    [
        pytest.param("manifold-hyper-connections", 16, marks=pytest.mark.method("manifold-hyper-connections")),
        pytest.param("orthogonal-hyper-connections", 8, marks=pytest.mark.method("orthogonal-hyper-connections")),
    ],
)
def test_a_gated_site_written_out(name: str, logits: int) -> None:
    state, y = noise(1, 1, 4, WIDTH), noise(1, 1, WIDTH, seed=1)
    u, new, wiring, site = one_site(Case(name), state, y)
    flat, at = state[0, 0].flatten(), site.index
    moved = flat / flat.square().mean().sqrt() @ wiring.maps[at]
    scales = wiring.scales[at]
    pre = torch.sigmoid(scales[0] * moved[:4] + wiring.read_bias[at])
    post = 2 * torch.sigmoid(scales[1] * moved[4:8] + wiring.write_bias[at])
    scale = scales[2] if name.startswith("manifold") else 0.01
    raw = scale * moved[8:] + wiring.mix_bias[at]
    assert raw.shape == (logits,)
    mix = sinkhorn(raw.view(4, 4), 20) if name.startswith("manifold") else rotation(raw)
    torch.testing.assert_close(u[0, 0], pre @ state[0, 0])
    for i in range(4):
        expected = sum(mix[i, j] * state[0, 0, j] for j in range(4)) + post[i] * y[0, 0]
        torch.testing.assert_close(new[0, 0, i], expected)


@pytest.mark.method("manifold-hyper-connections")
def test_parameters_of_a_site_and_equality_with_any_mixing_logits() -> None:
    wiring = laws.at_first(Case("manifold-hyper-connections"), PLAIN).wiring
    assert sum(each.numel() for each in wiring.parameters()) == 6 * (4 * WIDTH * 24 + 16 + 8 + 3)
    stack, plain = (laws.at_first(Case(name), LOOPED) for name in ("manifold-hyper-connections", "pre-ln"))
    stack.wiring.get_parameter("mix_bias").data.copy_(noise(10, 16))
    with torch.no_grad():
        laws.close(stack(laws.tokens()).logits, plain(laws.tokens()).logits)


@pytest.mark.method("orthogonal-hyper-connections")
def test_quaternion_matrices_are_rotations() -> None:
    logits = noise(50, 8)
    matrices, identity = rotation(logits), torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(matrices @ matrices.mT, identity.expand(50, 4, 4), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.linalg.det(matrices), torch.ones(50, dtype=torch.float64))
    assert torch.equal(rotation(torch.zeros(8)), torch.eye(4))
    q, r, v = unit(noise(5, 4)), unit(noise(5, 4, seed=1)), noise(5, 4, seed=2)
    torch.testing.assert_close(left(q) @ right(r), right(r) @ left(q))
    moved = (left(q) @ right(r) @ v.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(moved, product(product(q, v), r))
    # the same quaternion on both sides keeps the real part, and so the first stream
    same = torch.cat([logits[:, :4], logits[:, :4]], dim=1)
    torch.testing.assert_close(rotation(same)[:, 0, 0], torch.ones(50, dtype=torch.float64))


def product(p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Hamilton's product, from real and imaginary parts."""
    real = p[..., :1] * s[..., :1] - (p[..., 1:] * s[..., 1:]).sum(-1, keepdim=True)
    cross = torch.linalg.cross(p[..., 1:], s[..., 1:])
    return torch.cat([real, p[..., :1] * s[..., 1:] + s[..., :1] * p[..., 1:] + cross], dim=-1)


@pytest.mark.method("orthogonal-hyper-connections")
def test_rotations_conserve_energy_but_not_the_mean() -> None:
    state = noise(2, 3, 4, WIDTH)
    _, new, *_ = one_site(Case("orthogonal-hyper-connections"), state, torch.zeros(2, 3, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(new.square().sum(-2), state.square().sum(-2))
    assert float((new.mean(-2) - state.mean(-2)).abs().max()) > 1e-2
    _, kept, *_ = one_site(
        Case("manifold-hyper-connections", {"iters": 2000}), state, torch.zeros(2, 3, WIDTH, dtype=torch.float64)
    )
    torch.testing.assert_close(kept.mean(-2), state.mean(-2), rtol=0, atol=1e-4)


@pytest.mark.method("deep-delta")
@pytest.mark.parametrize("value", ["constant", "linear", "sigmoid"])
def test_a_site_replaces_what_the_stream_holds_along_its_output(value: str) -> None:
    x, y = noise(2, 3, WIDTH), noise(2, 3, WIDTH, seed=1)
    _, new, wiring, site = one_site(Case("deep-delta", {"value": value}), x, y)
    k = y / y.norm(dim=-1, keepdim=True)
    normed = x / x.square().mean(-1, keepdim=True).sqrt()
    strength = 2 * torch.sigmoid(normed @ wiring.strength.weight[site.index] + wiring.strength.bias[site.index])
    v = torch.full_like(strength, 2.0)
    if value != "constant":
        v = x @ wiring.value_weight[site.index] + wiring.value_bias[site.index]
        v = torch.sigmoid(v) if value == "sigmoid" else v
    along = (k * x).sum(-1)
    torch.testing.assert_close((k * new).sum(-1), (1 - strength) * along + strength * v)
    rest, before = (z - (k * z).sum(-1, keepdim=True) * k for z in (new, x))
    torch.testing.assert_close(rest, before)


@pytest.mark.method("deep-delta")
def test_only_the_direction_and_sign_of_an_output_matter() -> None:
    x, y = noise(2, 3, WIDTH), noise(2, 3, WIDTH, seed=1)
    _, new, wiring, site = one_site(Case("deep-delta"), x, y)
    torch.testing.assert_close(one_site(Case("deep-delta"), x, 7 * y)[1], new)
    turned = one_site(Case("deep-delta"), x, -y)[1]
    k = y / y.norm(dim=-1, keepdim=True)
    # the write through v turns its sign, the removal does not
    torch.testing.assert_close(new - turned, 2 * 2.0 * wiring.strength(x, site) * k)


@pytest.mark.method("deep-delta")
@pytest.mark.parametrize("start", [0.5, 1.0, 1.5])
def test_strength_begins_as_stated_and_two_is_a_reflection(start: float) -> None:
    wiring: Any = laws.at_first(Case("deep-delta", {"start": start}), PLAIN).wiring
    site, x = wiring.shape.sites[0], noise(2, 3, WIDTH)
    torch.testing.assert_close(wiring.strength(x, site), torch.full((2, 3, 1), start, dtype=torch.float64))
    y = noise(2, 3, WIDTH, seed=1)
    wiring.strength.bias.data.fill_(50.0)
    reflected = wiring.write(x, site, Read(x), y, unchanged)
    k = y / y.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(reflected - 2 * 2.0 * k, x - 2 * (k * x).sum(-1, keepdim=True) * k)


@pytest.mark.method("deep-delta-matrix")
def test_every_stream_changes_along_the_same_direction() -> None:
    x, y = noise(2, 3, 4, WIDTH), noise(2, 3, WIDTH, seed=1)
    u, new, wiring, site = one_site(Case("deep-delta-matrix"), Values(x, Earlier()), y)
    at, k = site.index, y / y.norm(dim=-1, keepdim=True)
    kernel = wiring.kernels[at]
    convolved = torch.zeros_like(x)
    for token in range(3):
        for back in range(token + 1):
            convolved[:, token] += kernel[3 - back] * x[:, token - back]
    torch.testing.assert_close(u, (wiring.shares[at][:, None] * convolved).sum(-2))
    normed = u / u.square().mean(-1, keepdim=True).sqrt()
    strength = wiring.strength(u, site)
    v = 4 * torch.sigmoid(normed @ wiring.value_weight[at] + wiring.value_bias[at])
    for j in range(4):
        stream = x[:, :, j]
        expected = stream + strength * (v[..., j : j + 1] - (k * stream).sum(-1, keepdim=True)) * k
        torch.testing.assert_close(new.x[:, :, j], expected)


@pytest.mark.method("deep-delta-matrix")
def test_a_cache_keeps_three_tokens_of_each_site_and_is_not_cropped() -> None:
    stack = laws.changed(Case("deep-delta-matrix"), PLAIN)
    cache = stack.new_cache()
    stack(laws.tokens(2, 5), cache=cache)
    shapes = {index: tuple(kept.shape) for index, kept in cache.memory.items()}
    assert shapes == dict.fromkeys(range(7), (2, 3, 4, WIDTH))
    with pytest.raises(UsageError, match="keeps a window of earlier tokens"):
        cache.crop(2)
