"""ResNet, its plain control, PRN and VGG: published counts, identities at first, and what a shortcut carries."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.shapes.base import initialise
from deepen.stack.shapes.prn import PRN, PRNConfig
from deepen.stack.shapes.resnet import Block, ResNet, ResNetConfig
from deepen.stack.shapes.vgg import VGG, VGGConfig, grown


def images(size: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.method("resnet")
@pytest.mark.parametrize(
    ("config", "count"),
    [
        (ResNetConfig(blocks=(2, 2, 2, 2), stem="large", classes=1000), 11_689_512),
        (ResNetConfig(blocks=(3, 4, 6, 3), block="bottleneck", stem="large", classes=1000), 25_557_032),
        (ResNetConfig(blocks=(3, 3, 3), width=16, shortcut="pad"), 269_722),
        (ResNetConfig(blocks=(9, 9, 9), width=16, shortcut="pad"), 853_018),
        (ResNetConfig(blocks=(18, 18, 18), width=16, shortcut="pad", residual=False), 1_727_962),
        (ResNetConfig(blocks=(4, 4, 4), width=16, widen=10, preactivation=True), 36_479_194),
    ],
    ids=["18", "50", "20", "56", "110-plain", "wide-28-10"],
)
def test_published_counts(config: ResNetConfig, count: int) -> None:
    assert config.parameters == count


@pytest.mark.method("resnet")
@pytest.mark.parametrize("preactivation", [False, True])
@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_branches_of_zero_leave_every_block_the_identity(preactivation: bool, block: str) -> None:
    config = ResNetConfig(blocks=(3, 3), width=4, block=block, preactivation=preactivation, zero_last=True)  # pyright: ignore
    model = ResNet(config)
    kept = [module for module in model.modules() if isinstance(module, Block) and module.downsample is None]
    assert len(kept) == (5 if block == "basic" else 4)
    for part in kept:
        width = part.get_submodule("bn1" if preactivation else f"bn{part.count}").num_features
        x = torch.randn(2, int(width), 5, 5)
        # after a relu, as blocks find it; a pre-activated block keeps what is below zero too
        assert torch.equal(part(x if preactivation else x.relu()), x if preactivation else x.relu())
    shallow = ResNet(config.model_copy(update={"blocks": (1, 1)})).eval()
    names = shallow.state_dict().keys()
    shallow.load_state_dict({name: value for name, value in model.state_dict().items() if name in names})
    assert torch.equal(shallow(images()), model.eval()(images()))


@pytest.mark.method("resnet")
def test_branches_of_zero_learn() -> None:
    for preactivation in (False, True):
        model = ResNet(ResNetConfig(blocks=(2,), width=4, preactivation=preactivation, zero_last=True))
        model(images()).square().sum().backward()
        last = [block.get_parameter("conv2.weight" if preactivation else "bn2.weight") for block in model.layer1]
        assert all(float(parameter.grad.abs().min()) > 0 for parameter in last if parameter.grad is not None)
        assert all(parameter.grad is not None for parameter in last)


@pytest.mark.method("resnet")
def test_the_plain_control_has_the_same_parameters_and_no_shortcut() -> None:
    config = ResNetConfig(blocks=(2, 2), width=4, shortcut="pad")
    residual = ResNet(config).eval()
    plain = ResNet(config.model_copy(update={"residual": False}), seed=1).eval()
    plain.load_state_dict(residual.state_dict())
    assert not torch.allclose(plain(images()), residual(images()))
    x = residual.conv1(images())
    x = F.relu(residual.bn1(x))
    for block in (*residual.layer1, *residual.layer2):
        x = F.relu(block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x))))))
    assert torch.equal(plain.features(images()), x)


@pytest.mark.method("resnet")
def test_a_padded_shortcut_takes_every_second_pixel_and_adds_no_channels() -> None:
    block = Block(ResNetConfig(width=3, shortcut="pad", preactivation=True), 3, 6, 2)
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 3, 7, 7)
    assert torch.equal(block(x)[:, :3], x[:, :, ::2, ::2])
    assert not block(x)[:, 3:].any()


@pytest.mark.method("resnet")
def test_at_56_layers_the_gradient_of_the_plain_control_explodes() -> None:
    """Norms of each layer's batch raise a gradient that must pass all of them; a shortcut goes around them."""
    sizes = {}
    for residual in (True, False):
        config = ResNetConfig(blocks=(9, 9, 9), width=4, shortcut="pad", residual=residual)
        model = ResNet(config)
        nn.functional.cross_entropy(model(images(8, 8)), torch.arange(8)).backward()
        gradient = model.conv1.weight.grad
        assert gradient is not None
        sizes[residual] = float(gradient.norm())
    assert 0 < sizes[True] < sizes[False] / 100


@pytest.mark.method("resnet")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residual": False}, "a shortcut of 0 of 64 channels is not projected; use shortcut='pad'"),
        ({"residual": False, "shortcut": "pad", "zero_last": True}, "a shortcut of 0 of 64 channels needs branches"),
        ({"blocks": (2, 0)}, "every stage needs a block, got (2, 0)"),
    ],
)
def test_impossible_pairs_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as found:
        ResNetConfig.read(fields)
    assert message in str(found.value)


@pytest.mark.method("prn")
def test_a_share_of_one_is_residual_and_of_none_is_plain() -> None:
    base = {"blocks": (2, 2), "width": 4}
    for share, residual in ((1.0, True), (0.0, False)):
        model = PRN(PRNConfig(**base, share=share)).eval()
        control = ResNet(ResNetConfig(**base, shortcut="pad", residual=residual), seed=3).eval()
        control.load_state_dict(model.state_dict())
        assert torch.equal(model(images()), control(images()))


@pytest.mark.method("prn")
def test_only_the_first_channels_have_a_shortcut() -> None:
    block = Block(PRNConfig(width=8, share=0.25, preactivation=True), 8, 8, 1)
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(block(x)[:, :2], x[:, :2])
    assert not block(x)[:, 2:].any()


@pytest.mark.method("vgg")
@pytest.mark.parametrize(("last", "count"), [(3, 138_357_544), (4, 143_667_240)])
def test_published_counts_of_vgg(last: int, count: int) -> None:
    config = VGGConfig(convolutions=(2, 2, last, last, last), classes=1000)
    assert config.parameters == count


@pytest.mark.method("vgg")
def test_three_convolutions_of_three_see_seven_pixels() -> None:
    model = VGG(VGGConfig(convolutions=(3,), widths=(4,), hidden=4))
    with torch.no_grad():
        for layer in model.convolutions:
            layer.weight.abs_()
    x = torch.ones(1, 3, 15, 15, requires_grad=True)
    model.features[:-1](x)[0, 0, 7, 7].backward()
    assert x.grad is not None
    seen = x.grad.abs().sum(dim=(0, 1)).nonzero()
    assert (seen.amin(0).tolist(), seen.amax(0).tolist(), len(seen)) == ([4, 4], [10, 10], 49)


@pytest.mark.method("vgg")
def test_a_grown_vgg_computes_the_same() -> None:
    model = VGG(VGGConfig(convolutions=(1, 1, 2), widths=(4, 6, 8), hidden=16, grid=1)).eval()
    before = model(images())
    larger = grown(model, (2, 2, 2))
    assert (len(model.convolutions), len(larger.convolutions)) == (4, 6)
    assert larger.config.parameters == sum(parameter.numel() for parameter in larger.parameters())
    assert torch.equal(larger(images()), before)
    assert torch.equal(model(images()), before)
    with pytest.raises(UsageError, match=r"stages of \(1, 1, 2\) convolutions cannot grow to \(2, 1, 1\)"):
        grown(model, (2, 1, 1))


def test_a_part_without_initial_values_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="0 has no initial values"):
        initialise(nn.Sequential(nn.PReLU()))
