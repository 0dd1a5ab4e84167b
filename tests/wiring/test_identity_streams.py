"""Identity Hyper-Connections: mHC whose streams are not mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case


@pytest.mark.method("identity-hyper-connections")
def test_streams_are_those_of_mhc_with_the_identity_for_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = laws.changed(Case("identity-hyper-connections"), LOOPED)
    mixed = laws.changed(Case("manifold-hyper-connections"), LOOPED)
    state = stack.state_dict()
    for name, value in mixed.state_dict().items():
        if name.startswith("wiring.maps."):
            value[:, :8] = state[name]
            state[name] = value
        elif name == "wiring.scales":
            state[name] = torch.cat([state[name], value[:, 2:]], dim=1)
        elif name == "wiring.mix_bias":
            state[name] = value
    mixed.load_state_dict(state)
    ids = laws.tokens()
    with torch.no_grad():
        assert not torch.equal(mixed(ids).logits, stack(ids).logits)
        monkeypatch.setattr(mixed.wiring, "matrix", lambda logits: torch.eye(4, dtype=logits.dtype))
        laws.close(mixed(ids).logits, stack(ids).logits, 1e-13)


@pytest.mark.method("identity-hyper-connections")
def test_two_streams_part_by_the_difference_of_their_write_weights() -> None:
    wiring: Any = laws.changed(Case("identity-hyper-connections"), PLAIN).wiring
    generator = torch.Generator().manual_seed(0)
    state, y = (torch.randn(shape, generator=generator).double() for shape in ((2, 7, 4, 16), (2, 7, 16)))
    site = wiring.shape.sites[3]
    _, posts, _ = wiring.weights(state, 3)
    after = wiring.write(state, site, wiring.read(state, site), y, torch.nn.Identity())
    moved = (after - state)[..., 0, :] - (after - state)[..., 2, :]
    torch.testing.assert_close(moved, (posts[..., 0] - posts[..., 2])[..., None] * y)
    assert bool((moved.abs() > 0.01).any())
