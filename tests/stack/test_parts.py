"""Blocks of another form as programs over parts: their texts, and what they compute in a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.errors import ProgramError
from deepen.program import Program
from deepen.stack import parts
from deepen.stack.stack import Stack
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import Case

TOKENS = laws.tokens()


def text(name: str, program: str, *args: Any, depth: int = 12, **options: Any) -> str:
    made, note = getattr(parts, name)(Program.parse(program), *args, depth=depth, **options)
    assert note
    return str(made)


def stack(program: str, depth: int = 3) -> Any:
    return laws.at_first(Case("pre-ln"), program, layers=depth, window=None)


def silenced(model: Stack, part: str) -> Stack:
    """The stack with outputs of 0 in one part of every layer."""
    with torch.no_grad():
        for layer in model.layers:
            layer.get_parameter(f"{part}.sublayer.{'out' if part == 'a' else 'down'}.weight").zero_()
    return model


@torch.no_grad()
def same(one: Stack, other: Stack) -> None:
    laws.close(one(TOKENS).logits, other(TOKENS).logits)


def with_layers_of(model: Stack, like: Stack) -> Stack:
    """The model with the embedding, head and layers of another, by the layers that its program was written with."""
    state = {name: value for name, value in like.state_dict().items() if not name.startswith("layers.")}
    model.load_state_dict(state, strict=False)
    for child, key in enumerate(model.written.keys):
        model.layers[child].load_state_dict(like.layers[key.layer].state_dict())
    return model


@pytest.mark.method("macaron")
def test_macaron_texts() -> None:
    assert text("macaron", "0-1") == ("0.f[scale=1/2] 0.a 0.f![scale=1/2] 1.f[scale=1/2] 1.a 1.f![scale=1/2]")
    assert text("macaron", "0 (1)*2", shared=True) == (
        "0.f[scale=1/2] 0.a 0.f[scale=1/2] (1.f[scale=1/2] 1.a 1.f[scale=1/2])*2"
    )
    with pytest.raises(ProgramError, match="macaron needs whole layers"):
        text("macaron", "0 1.a")


@pytest.mark.method("macaron")
@torch.no_grad()
def test_macaron_is_two_half_steps_around_the_mixer() -> None:
    model = stack(text("macaron", "0"), 1)
    first, second = model.layers[0], model.layers[1]
    second.f.load_state_dict({name: value * 0.5 for name, value in first.f.state_dict().items()})
    seen: dict[tuple[int, str], torch.Tensor] = {}
    model.on_site(lambda site, what, tensor: seen.update({(site.index, what): tensor}))
    end = model.norm.register_forward_pre_hook(lambda module, given: seen.update({(3, "read"): given[0]}))
    model(TOKENS)
    end.remove()
    updates = [seen[index, "update"] for index in range(3)]
    torch.testing.assert_close(seen[1, "read"], seen[0, "read"] + updates[0] / 2)
    torch.testing.assert_close(seen[2, "read"], seen[1, "read"] + updates[1])
    torch.testing.assert_close(seen[3, "read"], seen[2, "read"] + updates[2] / 2)
    assert not torch.allclose(updates[0], updates[2])
    model.hooks.clear()
    same(silenced(model, "f"), with_layers_of(stack("0.a", 1), model))


@pytest.mark.method("parallel-attention-feed-forward")
def test_parts_side_by_side_are_the_layer_where_one_of_them_is_silent() -> None:
    assert text("parallel_parts", "0 (1-2)*2 3") == "{0.a|0.f} ({1.a|1.f} {2.a|2.f})*2 {3.a|3.f}"
    for part in "af":
        same(silenced(stack("{0.a|0.f} {1.a|1.f}"), part), silenced(stack("0-1"), part))
    with torch.no_grad():
        assert not torch.allclose(stack("{0.a|0.f}", 1)(TOKENS).logits, stack("0", 1)(TOKENS).logits)


@pytest.mark.method("sandwich-order")
def test_sandwich_orders() -> None:
    found = text("sandwich_order", "0-3", 2)
    assert "".join(visit[-1] for visit in found.split()) == "aaafafff"
    assert found == "0.a 1.a 2.a 0.f 3.a 1.f 2.f 3.f"
    assert text("sandwich_order", "0-2", 3) == "0.a 1.a 2.a 0.f 1.f 2.f"
    same(stack(text("sandwich_order", "0-2", 0)), stack("0-2"))
    for k in (-1, 4):
        with pytest.raises(ProgramError, match=f"{k} mixers cannot stand first, the program has 3 layers"):
            text("sandwich_order", "0-2", k)


def test_any_order_of_parts() -> None:
    assert text("reorder", "2 0 1", "fafaf") == "2.f 2.a 0.f 0.a 1.f"
    with pytest.raises(ProgramError, match="'s' is neither a"):
        text("reorder", "0-1", "sf")
    with pytest.raises(ProgramError, match="asks for 3 parts of one kind, the program has 2 layers"):
        text("reorder", "0-1", "aaaf")
    with pytest.raises(ProgramError, match="reorder needs a plain list of whole layers"):
        text("reorder", "(0-1)*2", "af")


@pytest.mark.method("brainformer")
def test_brainformer_blocks() -> None:
    made, note = parts.brainformer(Program.identity(12), 12)
    visits = str(made).split()
    # attention, mixture, feed-forward, attention, mixture, feed-forward, mixture, feed-forward
    assert visits[:8] == ["0.a", "0.f", "1.f", "1.a", "2.f", "3.f", "4.f", "5.f"]
    assert visits[8:] == ["2.a", "6.f", "7.f", "3.a", "8.f", "9.f", "10.f", "11.f"]
    assert note == "2 blocks; mixtures of experts: layers 0, 2, 4, 6, 8, 10"
    with pytest.raises(ProgramError, match="8 layers are not blocks of 6"):
        parts.brainformer(Program.identity(8), 8)


@pytest.mark.parametrize("name", ["moda", "lime", "muddformer", "deep-cross-attention", "post-ln"])
@pytest.mark.method("sandwich-order")
def test_wirings_run_reordered_parts(name: str) -> None:
    laws.cached_equals_uncached(Case(name), text("sandwich_order", "0-2", 1))
