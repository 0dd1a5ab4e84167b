"""Deep layer aggregation: the tree's counts and paths, the published size, and nodes that pass the last input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.shapes.dla import DLA, Block, DLAConfig, Iterative, Node, Tree
from deepen.stack.shapes.gradient_paths import gradient_paths

pytestmark = pytest.mark.method("deep-layer-aggregation")


def parts(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def pass_the_last(model: nn.Module) -> None:
    """Nodes whose output is their last input, if that is not negative."""
    with torch.no_grad():
        for node in parts(model, Node):
            weight = node.unit.conv.weight
            weight.zero_()
            weight[:, -len(weight) :, 0, 0] = torch.eye(len(weight))
            node.unit.norm.eps = 0.0


def test_dla_34_has_the_published_count() -> None:
    assert DLAConfig(stem="large", classes=1000).parameters == 15_742_104


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_tree_has_its_blocks_nodes_and_short_paths(depth: int) -> None:
    tree = Tree(depth, 2, 2, 1, 0, residual=False).eval()
    assert len(parts(tree, Block)) == 2**depth
    nodes = parts(tree, Node)
    assert len(nodes) == 2 ** (depth - 1)
    # the last node reads one map of each level and the last two blocks
    last: Any = tree
    while last.node is None:
        last = last.right
    assert last.node.unit.conv.in_channels == 2 * (depth + 1)
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    path = gradient_paths(tree, tree(x), x=x)["x"]
    # the shortcut of one block and n nodes; two convolutions of every block and every node
    assert path.shortest == depth
    assert path.longest == 2 * 2**depth + 2 ** (depth - 1)


def test_a_tree_of_three_levels_is_the_formula() -> None:
    tree = Tree(3, 2, 2, 1, 0, residual=True).eval()
    x = torch.randn(1, 2, 4, 4)

    def one(part: Any, z: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        first = part.left(z)
        return part.node([*beside, first, part.right(first)])

    left = tree.left
    first = one(left.left, x)
    second = one(left.right, first, first)
    third = one(tree.right.left, second)
    expected = one(tree.right.right, third, second, third)
    assert torch.equal(tree(x), expected)


def test_nodes_that_pass_the_last_input_make_the_plain_chain() -> None:
    tree = Tree(3, 4, 4, 1, 0, residual=False).eval()
    pass_the_last(tree)
    x = torch.randn(2, 4, 6, 6)
    expected = x
    for block in parts(tree, Block):
        expected = block(expected)
    assert torch.allclose(tree(x), expected, atol=1e-6)


def test_iterative_merging_begins_with_the_shallow_ones() -> None:
    merged = Iterative((2, 3, 4), residual=False).eval()
    a, b, c = (torch.randn(1, width, 4, 4).relu() for width in (2, 3, 4))
    one, two = merged.nodes
    assert torch.equal(merged([a, b, c]), two([one([a, b]), c]))
    assert not torch.equal(merged([a + 1, b, c]), merged([a, b, c]))
    pass_the_last(merged)
    assert torch.allclose(merged([a, b, c]), c, atol=1e-6)


def test_residual_nodes_add_their_last_input() -> None:
    node = Node(5, 3, residual=True).eval()
    nn.init.zeros_(node.unit.conv.weight)
    a, b = torch.randn(1, 2, 4, 4), torch.randn(1, 3, 4, 4)
    assert torch.equal(node([a, b]), b.relu())


def test_ways_across_stages() -> None:
    images = torch.randn(2, 3, 13, 11)
    for across, read in (("root", [0, 4]), ("iterative", [0, 0])):
        config = DLAConfig(depths=(1, 2), widths=(4, 6), width=4, across=across)  # pyright: ignore
        assert [beside for *_, beside in config.plan()] == read
        assert DLA(config)(images).shape == (2, 10)
    with pytest.raises(UsageError, match="2 widths for 1 stages; give one for each"):
        DLAConfig.read({"depths": (1,), "widths": (4, 6)})
