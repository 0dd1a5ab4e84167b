"""Attention replaced by shallow feed-forwards: what is kept, what is learned, what is refused."""

from __future__ import annotations

import pytest
import torch

from deepen.errors import DataError, UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.train.replace_attention import replace_attention


def teacher(**fields: object) -> Stack:
    settings = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 11, "context": 6, "init": "small", **fields}
    return Stack(StackConfig.read(settings)).eval()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, (16, 6), generator=generator) for _ in range(count)]


@pytest.mark.method("shallow-mixer")
def test_students_learn_what_attention_did_and_nothing_else_changes() -> None:
    model = teacher(program="0 (1)*2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = replace_attention(model, batches(1), inner=32, lr=1e-2)
    found = replace_attention(model, batches(60), inner=32, lr=1e-2)
    for start, end in zip(first.errors, found.errors, strict=True):
        assert start is not None
        assert end is not None
        assert end < 0.6 < start
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        if ".a.sublayer." not in name:
            assert torch.equal(found.stack.state_dict()[name], value)
    assert found.stack.config.mixer == {"name": "shallow-mixer", "inner": 32}
    with torch.no_grad():
        wanted, given, bare = (stack(batches(1)[0]).logits for stack in (model, found.stack, first.stack))
    assert float((given - wanted).square().mean()) < 0.5 * float((bare - wanted).square().mean())
    # the hooks are gone
    assert not any(layer.get_submodule("a.sublayer")._forward_hooks for layer in model.layers)


def test_what_cannot_be_replaced_is_refused() -> None:
    with pytest.raises(DataError, match="no batch"):
        replace_attention(teacher(), [])
    with pytest.raises(UsageError, match="the learning rate is more than 0, got -1"):
        replace_attention(teacher(), batches(1), lr=-1)
    with pytest.raises(UsageError, match="it takes no window"):
        replace_attention(teacher(window=3), batches(1))
