"""Trees of neurons: the walk, the dense feed-forward of depth 1, and wrong copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.sublayers.contract import Out, Read
from deepen.sublayers.ffn.ultra_fast import UltraFast
from tests.laws.ffn_laws import Case, alone, context
from tests.laws.wiring_laws import close

CASE = Case("ultra-fast-feed-forward", {"depth": 3, "trees": 2}, {"hidden": None, "bias": True, "gelu": "none"})


@torch.no_grad()
def walks_as_written(kind: Any = UltraFast) -> None:
    made, u, ids = alone(CASE)
    made.__class__ = kind
    found = made(Read(u), context(ids)).y
    up, bias, down = (made.get_parameter(name).view(2, 7, -1) for name in ("up", "up_bias", "down"))
    reached = set()
    for place, x in enumerate(u.flatten(0, 1)):
        y = torch.zeros_like(x)
        for tree in range(2):
            node = 0
            for _ in range(3):
                z = x @ up[tree, node] + bias[tree, node]
                y += F.gelu(z)[0] * down[tree, node]
                reached.add((tree, node))
                node = 2 * node + (2 if z > 0 else 1)
        close(found.flatten(0, 1)[place], y, 1e-10)
    # both sides of nodes are among the tokens
    assert len(reached) > 10


@pytest.mark.method("ultra-fast-feed-forward")
def test_the_walk_is_a_loop_over_levels() -> None:
    walks_as_written()


@pytest.mark.method("ultra-fast-feed-forward")
@torch.no_grad()
def test_depth_1_is_a_dense_feed_forward() -> None:
    made, u, ids = alone(Case(CASE.name, {"depth": 1, "trees": 5}, {"hidden": None, "gelu": "none"}))
    up, down = made.get_parameter("up"), made.get_parameter("down")
    assert up.shape == (5, u.shape[-1])
    close(made(Read(u), context(ids)).y, F.gelu(u @ up.T) @ down, 1e-12)


def test_only_neurons_on_the_way_learn() -> None:
    made, u, ids = alone(CASE)
    out: Out = made(Read(u[:1, :1]), context(ids[:1, :1]))
    out.y.square().sum().backward()
    learned = made.get_parameter("down").grad
    assert learned is not None
    assert sorted(learned.abs().sum(1).nonzero().flatten().tolist()) == sorted(out.stats["nodes"].flatten().tolist())


class Mirrored(UltraFast):
    """Goes left where z is above 0."""

    def walk(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.up_bias is not None
        first = torch.arange(self.trees) * self.nodes
        at = torch.zeros(len(x), self.trees, dtype=torch.long)
        nodes = []
        for _ in range(self.depth):
            nodes.append(at + first)
            at = 2 * at + 1 + (torch.einsum("nd,ntd->nt", x, self.up[nodes[-1]]) + self.up_bias[nodes[-1]] <= 0)
        places = torch.cat(nodes, 1)
        return places, torch.einsum("nd,ntd->nt", x, self.up[places]) + self.up_bias[places]


class OneTree(UltraFast):
    """All trees read the neurons of the first."""

    def walk(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nodes, z = super().walk(x)
        return nodes % self.nodes, z


@pytest.mark.parametrize("kind", [Mirrored, OneTree])
def test_wrong_copies_are_caught(kind: type[UltraFast]) -> None:
    with pytest.raises(AssertionError):
        walks_as_written(kind)


def test_another_hidden_width_is_refused() -> None:
    with pytest.raises(UsageError, match="a hidden width of 32, but 2 trees of depth 3 are 6 neurons"):
        StackConfig.read(
            {
                "layers": 1,
                "width": 8,
                "heads": 2,
                "hidden": 32,
                "feed_forward": {"name": CASE.name, "depth": 3, "trees": 2},
            }
        )
