"""Paths of gradients against brute force, and what the designs that were made by them promise."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.shapes.cspnet import CSPNet, CSPNetConfig
from deepen.stack.shapes.densenet import DenseBlock
from deepen.stack.shapes.elan import ELAN, ELANConfig
from deepen.stack.shapes.elan import Stage as ELANStage
from deepen.stack.shapes.gradient_paths import Paths, gradient_paths
from deepen.stack.shapes.prn import PRN, PRNConfig


class Net(nn.Module):
    """Linear layers, each of which reads the sum of some of those before it; the last is the output."""

    def __init__(self, reads: list[list[int]]) -> None:
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=bool(index % 2)) for index in range(len(reads)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for layer, reads in zip(self.layers, self.reads, strict=True):
            outputs.append(layer(sum((outputs[each] for each in reads), x).tanh()))
        return outputs[-1]


def brute(reads: list[list[int]], layer: int) -> list[list[int]]:
    """Every path from the last layer to this one, as the layers on it."""
    paths, open_ = [], [[len(reads) - 1]]
    while open_:
        path = open_.pop()
        if path[-1] == layer:
            paths.append(path)
        open_ += [[*path, each] for each in reads[path[-1]]]
    return paths


@pytest.mark.parametrize("seed", range(6))
def test_paths_equal_brute_force(seed: int) -> None:
    dice = Random(seed)
    reads = [sorted(dice.sample(range(index), dice.randint(min(index, 1), min(index, 3)))) for index in range(8)]
    model = Net(reads)
    found = gradient_paths(model, model(torch.randn(2, 3)))
    reached = 0
    for layer in range(8):
        paths = brute(reads, layer)
        if not paths:
            assert f"layers.{layer}" not in found
            continue
        reached += 1
        sources = {f"layers.{path[-2]}" if len(path) > 1 else "output" for path in paths}
        lengths = [len(path) for path in paths]
        expected = Paths(min(lengths), max(lengths), len(paths), tuple(sorted(sources)))
        assert found[f"layers.{layer}"] == expected
    assert reached > 1


def test_a_layer_that_is_applied_twice_has_the_paths_of_both() -> None:
    model = nn.Linear(3, 3)
    x = torch.randn(1, 3, requires_grad=True)
    paths = gradient_paths(nn.ModuleDict({"m": model}), model(model(x).relu()), x=x)
    assert paths == {"m": Paths(1, 2, 2, ("m", "output")), "x": Paths(2, 2, 1, ("m",))}
    with pytest.raises(UsageError, match="the output has no graph"):
        gradient_paths(model, model(x).detach())


@pytest.mark.method("elan")
@pytest.mark.parametrize("stacks", [1, 2, 5])
@pytest.mark.parametrize("convolutions", [1, 3])
def test_no_layer_of_an_elan_stage_is_far_from_its_end(stacks: int, convolutions: int) -> None:
    stage = ELANStage(2, 2, 4, stacks, convolutions)
    paths = gradient_paths(stage, stage(torch.randn(1, 2, 4, 4)))
    assert len(paths) == stacks * convolutions + 3
    assert max(path.shortest for path in paths.values()) == convolutions + 1
    assert max(path.longest for path in paths.values()) == stacks * convolutions + 2
    if (stacks, convolutions) == (5, 3):
        assert paths["stacks.3.2.conv"] == Paths(2, 5, 2, ("merge.conv", "stacks.4.0.conv"))


@pytest.mark.method("elan")
def test_an_elan_stage_merges_all_ends() -> None:
    stage = ELAN(ELANConfig(width=4, widths=(8,), stacks=3)).eval().stages[0]
    x = torch.randn(2, 4, 6, 6)
    ends = [stage.a(x), stage.b(x)]
    for stack in stage.stacks:
        ends.append(stack(ends[-1]))
    assert torch.equal(stage(x), stage.merge(torch.cat(ends, dim=1)))
    with pytest.raises(UsageError, match="a stage of width 2 cannot be 4 times narrower inside"):
        ELANConfig.read({"widths": (2,)})


@pytest.mark.method("prn")
def test_channels_without_a_shortcut_learn_from_another_depth() -> None:
    """In a block of two convolutions the end reaches the start past none of them, or through both."""
    lengths = {}
    for share in (0.0, 0.5, 1.0):
        block = PRN(PRNConfig(blocks=(3,), width=4, share=share)).layer1
        x = torch.randn(1, 4, 4, 4, requires_grad=True)
        path = gradient_paths(block, block(x), x=x)["x"]
        lengths[share] = (path.shortest, path.longest, path.count)
        (outside,) = torch.autograd.grad(block(x)[:, 3].sum(), x)
        assert outside.abs().sum() > 0
    assert lengths == {0.0: (6, 6, 1), 0.5: (0, 6, 8), 1.0: (0, 6, 8)}


@pytest.mark.method("cspnet")
def test_without_a_split_a_stage_is_the_dense_block_and_its_transition() -> None:
    config = CSPNetConfig(blocks=(3,), growth=3, width=4, split=0, fusion="last")
    stage = CSPNet(config).eval().stages[0]
    x = torch.randn(2, 4, 5, 5)
    dense = DenseBlock(4, 3, 3, bottleneck=True).eval()
    dense.load_state_dict(stage.block.state_dict())
    t = stage.t
    assert torch.equal(stage(x), t.conv(t.norm(dense(x)).relu()))
    assert config.plan()[0]._asdict() == {"around": 0, "inside": 4, "block": 13, "t": 6, "u": 6}


@pytest.mark.method("cspnet")
@pytest.mark.parametrize(("fusion", "transitions"), [("both", (1, 2)), ("first", (1, 1)), ("last", (0, 1))])
def test_what_goes_around_has_one_path_and_what_goes_inside_the_others(
    fusion: str, transitions: tuple[int, int]
) -> None:
    stage = CSPNet(CSPNetConfig(blocks=(2,), growth=3, width=6, fusion=fusion)).eval().stages[0]  # pyright: ignore
    around, inside = (torch.randn(1, 3, 4, 4, requires_grad=True) for _ in range(2))
    y = stage(torch.cat([around, inside], dim=1))
    apart = stage.u(torch.cat([around, stage.t(stage.block(inside))], dim=1))
    assert torch.equal(apart, y)
    paths = gradient_paths(stage, apart, around=around, inside=inside)
    short, long = transitions
    last = ("output",) if fusion == "last" else ("u.conv",)
    assert paths["around"] == Paths(short, short, 1, last)
    # past both layers, through either, through both
    assert (paths["inside"].shortest, paths["inside"].longest, paths["inside"].count) == (long, long + 4, 4)
    found = torch.autograd.grad(y.square().sum(), around)[0]
    halves = around, stage.t(stage.block(inside)).detach()
    assert torch.allclose(torch.autograd.grad(stage.u(torch.cat(halves, 1)).square().sum(), around)[0], found)


@pytest.mark.method("cspnet")
def test_a_stage_without_channels_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a stage is left without channels: .*; lower split or raise compression"):
        CSPNetConfig.read({"blocks": (1,), "width": 2, "split": 0.9})
