"""FractalNet: its recursion, columns that run alone, joins that are never empty."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.shapes.fractalnet import Fractal, FractalNet, FractalNetConfig, kept
from deepen.stack.shapes.gradient_paths import gradient_paths

pytestmark = pytest.mark.method("fractalnet")


def images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def model(columns: int = 3, **fields: float) -> FractalNet:
    return FractalNet(FractalNetConfig(widths=(4, 6), columns=columns, **fields))


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_depth_and_number_of_paths_follow_the_recursion(columns: int) -> None:
    block = Fractal(2, 2, columns).eval()
    z = torch.randn(1, 2, 4, 4, requires_grad=True)
    paths = gradient_paths(block, block(z), z=z)
    expected = 1
    for _ in range(columns - 1):
        expected = expected**2 + 1
    assert paths["z"].count == expected
    assert (paths["z"].shortest, paths["z"].longest) == (1, 2 ** (columns - 1))
    assert len(paths) == 2**columns - 1 + 1


def test_a_block_is_its_formula() -> None:
    """Three columns written out: two fractals of two columns one after the other, beside one convolution."""
    block = Fractal(2, 2, 3).eval()
    (a, b, c, d), (e, f), (g,) = ([*column] for column in block.columns)
    z = torch.randn(1, 2, 4, 4)
    middle = (b(a(z)) + e(z)) / 2
    expected = (d(c(middle)) + f(middle) + g(z)) / 3
    assert torch.allclose(block(z), expected, atol=1e-6)


@pytest.mark.parametrize("column", [1, 2, 3])
def test_a_column_alone_is_the_extracted_net_and_the_fractal_under_global_drop_path(column: int) -> None:
    net = model().eval()
    alone = net(images(), column=column)
    plain = net.extract(column)
    assert torch.equal(plain(images()), alone)
    assert sum(isinstance(part, nn.Conv2d) for part in plain.modules()) == 2 * 2 ** (3 - column)
    drawn = model(single=1.0).train()
    for batch_norm in (part for part in drawn.modules() if isinstance(part, nn.BatchNorm2d)):
        batch_norm.eval()
    outputs = [drawn(images()) for _ in range(40)]
    assert sum(torch.equal(output, alone) for output in outputs) > 0
    each = [net(images(), column=one) for one in (1, 2, 3)]
    assert all(any(torch.equal(output, one) for one in each) for output in outputs)


def test_one_column_is_a_plain_net() -> None:
    net = model(columns=1).eval()
    x = images()
    for block in net.blocks:
        unit = block.get_submodule("columns.0.0")
        x = F.max_pool2d(F.relu(unit.norm(unit.conv(x))), 2)
    assert torch.equal(net(images()), net.head(x.mean(dim=(-2, -1))))
    torch.manual_seed(0)
    for part in (part for part in net.train().modules() if isinstance(part, nn.BatchNorm2d)):
        part.eval()
    assert torch.equal(net(images()), net.eval()(images()))


def test_no_join_is_ever_empty() -> None:
    torch.manual_seed(0)
    draws = [kept((0, 1, 2), 0.9) for _ in range(10_000)]
    assert {tuple(draw) for draw in draws} == {(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)}
    alone = [sum(draw == [each] for draw in draws) for each in range(3)]
    # 3 x 0.1 x 0.81 drawn alone, and 0.729 where all are dropped: the same share for each of the three
    assert all(abs(count - 3240) < 5 * 47 for count in alone)
    assert kept((4, 7), 0.0) == [4, 7]
    assert kept((4,), 0.99) == [4]


def test_local_drop_path_averages_what_is_left() -> None:
    block = Fractal(2, 2, 2).eval()
    (a, b), (c,) = ([*column] for column in block.columns)
    z = torch.randn(1, 2, 4, 4)
    deep, short = b(a(z)), c(z)
    torch.manual_seed(0)
    found = [block(z, drop=0.5) for _ in range(50)]
    outcomes = [deep, short, (deep + short) / 2]
    counts = [sum(torch.equal(each, outcome) for each in found) for outcome in outcomes]
    assert sum(counts) == 50
    assert min(counts) > 0
    net = model(single=0.0, drop=0.15)
    torch.manual_seed(1)
    assert len({float(net(images()).detach().sum()) for _ in range(12)}) > 1


def test_equal_inputs_join_to_themselves() -> None:
    block = Fractal(2, 2, 3).eval()
    state = block.columns[2][0].state_dict()
    with torch.no_grad():
        for unit in (unit for column in block.columns for unit in column):
            unit.load_state_dict(state)
            nn.init.dirac_(unit.conv.weight)
            unit.norm.eps = 0.0
    z = torch.randn(1, 2, 4, 4).relu()
    assert torch.allclose(block(z), z, atol=1e-6)


def test_an_unknown_column_is_refused() -> None:
    for column in (0, 4):
        with pytest.raises(UsageError, match=f"no column {column}; there are 1, the deepest, to 3"):
            model()(images(), column=column)
        with pytest.raises(UsageError, match=f"no column {column}"):
            model().extract(column)
