"""Every registered model of another shape under the laws of its family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from deepen.errors import UsageError
from deepen.registry import lookup, methods
from deepen.stack.shapes.base import ImageConfig, ShapeConfig
from deepen.stack.shapes.cspnet import CSPNetConfig
from deepen.stack.shapes.dc_bilstm import DCBiLSTMConfig
from deepen.stack.shapes.densenet import DenseNetConfig
from deepen.stack.shapes.dla import DLAConfig
from deepen.stack.shapes.elan import ELANConfig
from deepen.stack.shapes.feedback_transformer import FeedbackTransformerConfig
from deepen.stack.shapes.fractalnet import FractalNetConfig
from deepen.stack.shapes.prn import PRNConfig
from deepen.stack.shapes.recurrent_transformer import RecurrentTransformerConfig
from deepen.stack.shapes.resnet import ResNetConfig
from deepen.stack.shapes.tokenwise import TokenConfig
from deepen.stack.shapes.vgg import VGGConfig

IMAGE: dict[str, Any] = {"channels": 2, "classes": 3}
VOCABULARY = 17
TOKENS: dict[str, Any] = {"layers": 2, "width": 8, "heads": 4, "hidden": 12, "vocabulary": VOCABULARY}
CASES: dict[str, list[ShapeConfig]] = {
    "resnet": [
        ResNetConfig(blocks=(2, 1), width=4, **IMAGE),
        ResNetConfig(blocks=(1, 1), width=3, block="bottleneck", stem="large", **IMAGE),
        ResNetConfig(blocks=(1, 2), width=2, widen=2, preactivation=True, dropout=0.1, **IMAGE),
        ResNetConfig(blocks=(1, 1), width=2, block="bottleneck", preactivation=True, shortcut="pad", **IMAGE),
        ResNetConfig(blocks=(2, 1), width=4, shortcut="pad", residual=False, **IMAGE),
    ],
    "prn": [PRNConfig(blocks=(2, 1), width=4, **IMAGE), PRNConfig(blocks=(1,), width=4, share=0.2, **IMAGE)],
    "vgg": [VGGConfig(convolutions=(2, 1), widths=(4, 6), hidden=8, grid=2, **IMAGE)],
    "densenet": [
        DenseNetConfig(blocks=(2, 3), growth=3, width=4, **IMAGE),
        DenseNetConfig(blocks=(2, 1), growth=3, width=5, bottleneck=False, compression=0.7, stem="large", **IMAGE),
    ],
    "cspnet": [
        CSPNetConfig(blocks=(2, 1), growth=3, width=5, **IMAGE),
        CSPNetConfig(blocks=(2, 1), growth=3, width=4, bottleneck=False, fusion="first", **IMAGE),
        CSPNetConfig(blocks=(2, 1), growth=3, width=4, split=0.25, fusion="last", compression=0.7, **IMAGE),
    ],
    "elan": [
        ELANConfig(width=3, widths=(8, 9), **IMAGE),
        ELANConfig(width=3, widths=(6,), narrow=2, stacks=3, **IMAGE),
    ],
    "deep-layer-aggregation": [
        DLAConfig(depths=(1, 2), widths=(4, 6), width=3, **IMAGE),
        DLAConfig(depths=(3,), widths=(4,), width=4, residual=True, stem="large", **IMAGE),
        DLAConfig(depths=(1, 1, 1), widths=(4, 4, 6), width=4, across="iterative", **IMAGE),
    ],
    "fractalnet": [FractalNetConfig(widths=(4, 5), **IMAGE), FractalNetConfig(widths=(4,), columns=1, **IMAGE)],
    "feedback-transformer": [
        FeedbackTransformerConfig(**TOKENS),
        FeedbackTransformerConfig(**TOKENS, kv_heads=2, span=3),
    ],
    "recurrent-transformer": [
        RecurrentTransformerConfig(**TOKENS),
        RecurrentTransformerConfig(**TOKENS, kv_heads=2),
    ],
    "dc-bi-lstm": [
        DCBiLSTMConfig(vocabulary=VOCABULARY, width=4, layers=3, units=3, last=5),
        DCBiLSTMConfig(vocabulary=VOCABULARY, width=4, layers=3, units=3, last=5, dense=False),
    ],
}
EACH = [pytest.param(name, config, id=f"{name}-{i}") for name, own in CASES.items() for i, config in enumerate(own)]
FIRST = [pytest.param(name, own[0], id=name) for name, own in CASES.items()]
CAUSAL = [each for each in EACH if isinstance(each.values[1], TokenConfig)]


def built(name: str, config: ShapeConfig, seed: int = 0) -> Any:
    """A model in double precision with random parameters and statistics, in evaluation mode."""
    model = lookup(name).implementation(config, seed).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for tensor in (each for name, each in model.named_buffers() if name.endswith(("_mean", "_var"))):
            tensor += 0.1 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
    return model


def example(config: ShapeConfig, batch: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if isinstance(config, ImageConfig):
        return torch.randn(batch, config.channels, 20, 17, generator=generator, dtype=torch.float64)
    return torch.randint(0, VOCABULARY, (batch, 7), generator=generator)


def output(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    found = model(inputs)
    return found if isinstance(found, torch.Tensor) else found.logits


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert float((a - b).abs().max()) < tolerance * float(b.abs().max())


def test_every_shape_has_a_case() -> None:
    assert set(CASES) == {method.name for method in methods("shape")}


@pytest.mark.parametrize(("name", "config"), EACH)
def test_parameters_are_as_many_as_stated(name: str, config: ShapeConfig) -> None:
    model = lookup(name).implementation(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters


@pytest.mark.parametrize(("name", "config"), EACH)
def test_every_parameter_learns(name: str, config: ShapeConfig) -> None:
    model = built(name, config)
    output(model, example(config)).square().sum().backward()
    sizes = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in sizes.items():
        assert gradient is not None, name
        assert float(gradient.abs().max()) > 1e-12, name


@pytest.mark.parametrize(("name", "config"), EACH)
@torch.no_grad()
def test_members_of_a_batch_are_independent(name: str, config: ShapeConfig) -> None:
    model, inputs = built(name, config), example(config)
    together = output(model, inputs)
    close(output(model, inputs[[2, 0, 1]]), together[[2, 0, 1]])
    close(output(model, inputs[1:2]), together[1:2])


@pytest.mark.parametrize(("name", "config"), EACH)
@torch.no_grad()
def test_saved_equals_loaded(name: str, config: ShapeConfig) -> None:
    model, inputs = built(name, config), example(config)
    again = lookup(name).implementation(type(config).read(config.model_dump()), 5).double().eval()
    assert not torch.equal(output(again, inputs), output(model, inputs))
    again.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(output(again, inputs), output(model, inputs))


@pytest.mark.parametrize(("name", "config"), FIRST)
def test_a_seed_fixes_the_values_and_leaves_the_generator(name: str, config: ShapeConfig) -> None:
    kind = lookup(name).implementation
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two = kind(config, 1), kind(config, 1)
    assert torch.equal(torch.get_rng_state(), before)
    for (key, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    drawn = kind(config, None)
    assert not torch.equal(torch.get_rng_state(), before)
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), drawn.parameters(), strict=True))


@pytest.mark.parametrize(("name", "config"), FIRST)
def test_a_configuration_is_frozen_and_its_errors_are_clear(name: str, config: ShapeConfig) -> None:
    key = next(iter(type(config).model_fields))
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, key, 1)
    with pytest.raises(UsageError, match=f"{type(config).__name__}: no key '{key}x' \\(did you mean '{key}'\\?\\)"):
        type(config).read({**config.model_dump(), f"{key}x": 1})
    with pytest.raises(UsageError, match=f"{type(config).__name__}: {key}: Input should be a valid integer"):
        type(config).read({**config.model_dump(), key: "many"})


@pytest.mark.parametrize(("name", "config"), [each for each in FIRST if isinstance(each.values[1], ImageConfig)])
def test_images_that_do_not_fit_are_refused(name: str, config: ImageConfig) -> None:
    model = lookup(name).implementation(config)
    with pytest.raises(UsageError, match=r"expected images \(batch, 2, height, width\), got \(1, 3, 9, 9\)"):
        model(torch.zeros(1, 3, 9, 9))
    side = 2**config.halvings - 1
    with pytest.raises(UsageError, match=f"too small to be halved {config.halvings} times; give at least {side + 1}"):
        model(torch.zeros(1, 2, side, 9))
    assert model.eval()(torch.zeros(1, 2, side + 1, side + 1)).shape == (1, 3)


@pytest.mark.parametrize(("name", "config"), CAUSAL)
@torch.no_grad()
def test_cached_equals_uncached(name: str, config: ShapeConfig) -> None:
    model, inputs = built(name, config), example(config)
    cache = model.new_cache(room=2)
    pieces = [model(piece, cache=cache).logits for piece in inputs.split([3, 1, 2, 1], dim=1)]
    close(torch.cat(pieces, dim=1), model(inputs).logits)
    assert cache.length == 7


@pytest.mark.parametrize(("name", "config"), CAUSAL)
@torch.no_grad()
def test_no_position_sees_a_later_one(name: str, config: ShapeConfig) -> None:
    model, inputs = built(name, config), example(config)
    other = inputs.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    before, after = model(inputs).logits, model(other).logits
    close(after[:, :4], before[:, :4], 1e-13)
    assert bool(((after - before).abs().amax(-1)[:, 4:] > 1e-8).all())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), EACH)
def test_compiled_equals_eager(name: str, config: ShapeConfig) -> None:
    model: nn.Module = built(name, config)
    # the trace of a token-wise model grows with the tokens
    inputs = example(config)[:, :3]
    torch.compiler.reset()
    # a compiler does not trace the LSTM of torch, and breaks the graph there
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=name != "dc-bi-lstm")
    close(output(compiled, inputs).detach(), output(model, inputs).detach())
