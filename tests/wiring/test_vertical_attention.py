"""Vertical attention, a reconstruction: means over depth of outputs that are divided by their size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.wiring.base import Earlier
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case
from tests.wiring.test_history import sites

pytestmark = pytest.mark.method("vertical-attention")


def test_written_out() -> None:
    stack = laws.changed(Case("vertical-attention"), LOOPED)
    seen = sites(stack)
    left = [seen[-1, "stream"]]
    for visit in range(5):
        shares = stack.wiring.get_parameter(f"weights.{visit - 1}").softmax(0) if visit else torch.ones(1)
        u = sum(share * h / h.square().mean(-1, keepdim=True).sqrt() for share, h in zip(shares, left, strict=True))
        torch.testing.assert_close(seen[2 * visit, "read"], u)
        torch.testing.assert_close(seen[2 * visit + 1, "read"], u + seen[2 * visit, "update"])
        left.append(u + seen[2 * visit, "update"] + seen[2 * visit + 1, "update"])
    torch.testing.assert_close(seen[-1, "end"], left[-1])


def test_the_size_of_a_source_does_not_change_what_is_read() -> None:
    wiring: Any = laws.changed(Case("vertical-attention"), PLAIN).wiring
    x, y = torch.randn(2, 1, 1, laws.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second, third, *_ = wiring.shape.sites
    reads = []
    for factor in (1.0, 100.0):
        state = wiring.init(factor * x, Earlier())
        read = wiring.read(state, first)
        # what the visit leaves is `factor` times as large
        state = wiring.write(state, first, read, factor * y - read.u, None)
        state = wiring.write(state, second, wiring.read(state, second), 0 * y, None)
        reads.append(wiring.read(state, third).u)
    torch.testing.assert_close(reads[0], reads[1])
