"""MaskBlock: what the mask does, and that it always reads the input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.sublayers.contract import Read
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.mask_block import MaskBlock
from tests.laws.ffn_laws import context
from tests.laws.wiring_laws import close


def filled(kind: type[MaskBlock] = MaskBlock, **options: Any) -> MaskBlock:
    module = kind(Sizes(width=6, hidden=5), **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def u() -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def plain(module: MaskBlock) -> torch.Tensor:
    """The output with a mask of 1."""
    normed = F.layer_norm(u(), (6,), module.gain, module.shift_bias, module.eps)
    mapped = F.linear(normed, module.up.weight)
    hidden = F.relu(F.layer_norm(mapped, (5,), module.inner_gain, module.inner_bias, module.eps))
    return F.linear(hidden, module.down.weight)


@torch.no_grad()
def silent_mask_is_plain(kind: type[MaskBlock] = MaskBlock) -> None:
    module = filled(kind)
    module.mask.weight.zero_()
    module.mask.bias.fill_(1.0)
    close(module(Read(u()), context()).y, plain(module), 1e-12)


@torch.no_grad()
def size_of_the_mask_does_not_matter(kind: type[MaskBlock] = MaskBlock) -> None:
    module = filled(kind, eps=0.0)
    before = module(Read(u()), context()).y
    module.mask.weight.mul_(2.0)
    module.mask.bias.mul_(2.0)
    close(module(Read(u()), context()).y, before, 1e-12)


@torch.no_grad()
def mask_multiplies_each_value(kind: type[MaskBlock] = MaskBlock) -> None:
    module = filled(kind)
    mask = module.mask(F.relu(module.wide(u())))
    mapped = F.linear(mask * module.normed(u()), module.up.weight)
    hidden = F.relu(F.layer_norm(mapped, (5,), module.inner_gain, module.inner_bias, module.eps))
    close(module(Read(u()), context()).y, F.linear(hidden, module.down.weight), 1e-12)


CHECKS = (silent_mask_is_plain, size_of_the_mask_does_not_matter, mask_multiplies_each_value)


@pytest.mark.method("mask-block")
@pytest.mark.parametrize("check", CHECKS)
def test_identity(check: Any) -> None:
    check()


class Sigmoid(MaskBlock):
    def block(self, v: Any, h: Any, context: Any) -> Any:
        mask = torch.sigmoid(self.mask(F.relu(self.wide(v))))
        mapped = self.up(mask * h)
        return F.relu(F.layer_norm(mapped, mapped.shape[-1:], self.inner_gain, self.inner_bias, self.eps))


class Added(MaskBlock):
    def block(self, v: Any, h: Any, context: Any) -> Any:
        mapped = self.up(self.mask(F.relu(self.wide(v))) + h)
        return F.relu(F.layer_norm(mapped, mapped.shape[-1:], self.inner_gain, self.inner_bias, self.eps))


class MaskOfHidden(MaskBlock):
    def block(self, v: Any, h: Any, context: Any) -> Any:
        return super().block(h, h, context)


@pytest.mark.parametrize("kind", [Sigmoid, Added, MaskOfHidden])
def test_wrong_blocks_are_caught(kind: type[MaskBlock]) -> None:
    failed = 0
    for check in CHECKS:
        try:
            check(kind)
        except AssertionError:
            failed += 1
    assert failed


@pytest.mark.method("mask-block")
def test_the_mask_reads_the_input_even_where_hidden_values_are_cut_off() -> None:
    module, v = filled(), u().requires_grad_()
    module.block(v, u(), context()).square().sum().backward()
    assert v.grad is not None
    assert float(v.grad.abs().max()) > 0


def test_fields_are_normalised_each_by_itself() -> None:
    module = filled(fields=2, eps=0.0)
    with torch.no_grad():
        module.gain.fill_(1.0)
        module.shift_bias.zero_()
    halves = module.normed(u()).detach().unflatten(-1, (2, 3))
    close(halves.mean(-1) + 1, torch.ones(2, 4, 2, dtype=torch.float64), 1e-12)
    close(halves.square().mean(-1), torch.ones(2, 4, 2, dtype=torch.float64), 1e-12)


def test_fields_that_do_not_fit_are_refused() -> None:
    table = {"name": "mask-block", "fields": 3}
    with pytest.raises(UsageError, match="a width of 16 has no 3 equal fields"):
        StackConfig.read({"layers": 1, "width": 16, "heads": 2, "feed_forward": table})
