"""Feedback and recurrent transformers: their formulas written out, exact tiles, one memory, dependence along tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.generate import generate
from deepen.stack.shapes import recurrent_transformer
from deepen.stack.shapes.feedback_transformer import FeedbackTransformer, FeedbackTransformerConfig
from deepen.stack.shapes.recurrent_transformer import LayerPass, RecurrentTransformer, RecurrentTransformerConfig
from deepen.stack.shapes.tokenwise import Seen, attend, feed, merge
from deepen.stack.stack import Stack
from deepen.sublayers.mixer.attention import rotated

SIZES: dict[str, Any] = {"width": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "vocabulary": 29}


def spread(model: nn.Module) -> Any:
    """Weights large enough that every branch matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def recurrent(layers: int = 2) -> RecurrentTransformer:
    return spread(RecurrentTransformer(RecurrentTransformerConfig(layers=layers, **SIZES)))


def feedback(layers: int = 2, embedding_alone: bool = False, **fields: Any) -> FeedbackTransformer:
    model = spread(FeedbackTransformer(FeedbackTransformerConfig(layers=layers, **SIZES, **fields)))
    if embedding_alone:
        with torch.no_grad():
            model.memory.weights.fill_(-torch.inf)
            model.memory.weights[0] = 0
    return model


def tokens(length: int = 7, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 29, (batch, length), generator=torch.Generator().manual_seed(0))


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max()) < 1e-11 * float(b.abs().max())


def attention_of_one(q: torch.Tensor, k: list[torch.Tensor], v: list[torch.Tensor]) -> torch.Tensor:
    """(B, H, d) of queries (B, H, d) over lists of keys and values (B, R, d), head by head."""
    groups = q.shape[1] // k[0].shape[1]
    out = []
    for head in range(q.shape[1]):
        keys, values = (torch.stack([each[:, head // groups] for each in all_], 1) for all_ in (k, v))
        share = (keys @ q[:, head, :, None] / q.shape[-1] ** 0.5).softmax(dim=1)
        out.append((share * values).sum(dim=1))
    return torch.stack(out, 1)


def test_attention_in_pieces_is_attention() -> None:
    q, k, v = (torch.randn(2, heads, length, 6, dtype=torch.float64) for heads, length in ((4, 3), (2, 9), (2, 9)))
    whole = attend(q, k, v)
    parts = merge(attend(q, k[:, :, :4], v[:, :, :4]), attend(q, k[:, :, 4:], v[:, :, 4:]))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert near(whole.y, expected)
    assert near(parts.y, expected)
    assert near(parts.sum, whole.sum)
    assert near(attend(q, k, v, (torch.arange(9) < 4).expand(3, 9)).y, attend(q, k[:, :, :4], v[:, :, :4]).y)
    large = merge(Seen(q, torch.full((2, 4, 3, 1), 800.0)), Seen(-q, torch.full((2, 4, 3, 1), -800.0)))
    assert torch.equal(large.y, q)


@torch.no_grad()
def recurrence(model: RecurrentTransformer, ids: torch.Tensor) -> torch.Tensor:
    """The formula, token by token and head by head."""
    x = model.stack.embedding(ids)
    for layer in model.stack.layers:
        own, kept_k, kept_v, ends = layer.a.sublayer, [], [], []
        for place in range(ids.shape[1]):
            cos, sin = model.stack.rotary(place, 1, None, x)

            def project(z: torch.Tensor, turn: Any = (cos, sin), layer: Any = layer, own: Any = own) -> Any:
                q, k, v = own.qkv(layer.a.norm(z)).unflatten(-1, (-1, own.head_width)).split((4, 2, 2), dim=-2)
                return rotated(q, *turn)[:, 0], rotated(k, *turn)[:, 0], v[:, 0]

            own_x = x[:, place : place + 1]
            q, k, v = project(own_x)
            y = own_x + own.out(attention_of_one(q, [*kept_k, k], [*kept_v, v]).flatten(1))[:, None]
            y = y + feed(layer.f, y)
            _, k, v = project(y)
            kept_k.append(k)
            kept_v.append(v)
            ends.append(y)
        x = torch.cat(ends, 1)
    return model.stack.head(model.stack.norm(x))


@pytest.mark.method("recurrent-transformer")
def test_tiles_and_the_loop_are_the_formula() -> None:
    model, ids = recurrent(), tokens(11)
    expected = recurrence(model, ids)
    assert near(model(ids).logits, expected)
    assert near(model(ids, tiled=False).logits, expected)


@pytest.mark.method("recurrent-transformer")
def test_keys_of_what_a_layer_reads_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that makes it a plain Transformer: later tokens see the temporary keys."""
    model, ids = recurrent(), tokens()
    expected = recurrence(model, ids)
    right = LayerPass._token

    def wrong(self: LayerPass, place: int, seen: Seen) -> Any:
        own, cut = self.attention, slice(place, place + 1)
        k, v = own.qkv(self.layer.a.norm(self.x[:, cut])).unflatten(-1, (-1, 4))[:, :, 4:].chunk(2, dim=-2)
        k = rotated(k, *(each[cut] for each in self.rotary))
        return right(self, place, seen)._replace(k=k.transpose(1, 2), v=v.transpose(1, 2))

    monkeypatch.setattr(LayerPass, "_token", wrong)
    found = model(ids).logits
    assert near(found, model.stack(ids).logits)
    assert not near(found, expected)


@pytest.mark.method("recurrent-transformer")
def test_gradients_of_tiles_and_of_the_loop_agree() -> None:
    found = []
    for tiled in (True, False):
        model = recurrent()
        model(tokens(9), tiled=tiled).logits.square().sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    for name, gradient in found[0].items():
        assert near(gradient, found[1][name]), name


@pytest.mark.method("recurrent-transformer")
@pytest.mark.parametrize("length", [64, 128, 256])
@torch.no_grad()
def test_tiles_load_n_log_n_keys(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loads = recurrent(layers=1), []

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Seen:
        loads.append(k.shape[2])
        return attend(q, k, v)

    monkeypatch.setattr(recurrent_transformer, "attend", counted)
    model(tokens(length, 1))
    assert sum(loads) == length // 2 * (length.bit_length() - 1)
    if length == 64:
        loads.clear()
        model(tokens(length, 1), tiled=False)
        assert sum(loads) == length * (length - 1) // 2


@pytest.mark.method("recurrent-transformer")
@torch.no_grad()
def test_a_single_token_sees_the_plain_stack_and_later_ones_do_not() -> None:
    model, ids = recurrent(), tokens()
    plain, found = model.stack(ids).logits, model(ids).logits
    assert near(found[:, :1], plain[:, :1])
    assert float((found - plain).abs().amax(-1)[:, 1:].min()) > 1e-3
    # layers that add nothing give what they read, so both pairs of keys and values are the same
    for layer in model.stack.layers:
        layer.a.sublayer.out.weight.zero_()
        layer.f.sublayer.down.weight.zero_()
    assert torch.equal(model(ids).logits, model.stack(ids).logits)
    layer_pass = LayerPass(model.stack.layers[0], model.stack.embedding(ids), model.stack.rotary(0, 7, None, plain))
    done = layer_pass.one_by_one()
    assert near(done.v.repeat_interleave(2, dim=1), layer_pass.seen.y)


@pytest.mark.method("recurrent-transformer")
def test_attention_of_a_layer_depends_on_its_own_feed_forward_at_earlier_tokens() -> None:
    model, seen = recurrent(layers=1), []
    layer: Any = model.stack.layers[0]
    layer.a.sublayer.out.register_forward_hook(lambda module, given, output: seen.append(output))
    down = layer.f.sublayer.down.weight
    model(tokens(3))
    first, second, _ = seen
    assert torch.autograd.grad(first.sum(), down, allow_unused=True) == (None,)
    assert float(torch.autograd.grad(second.sum(), down)[0].abs().max()) > 1e-3
    seen.clear()
    model.stack(tokens(3))
    assert torch.autograd.grad(seen[0].sum(), down, allow_unused=True) == (None,)


@torch.no_grad()
def feedback_formula(model: FeedbackTransformer, ids: torch.Tensor) -> torch.Tensor:
    """The formula, token by token and head by head."""
    memory_k, memory_v, ends = [], [], []
    shares = model.memory.weights.exp() / model.memory.weights.exp().sum()
    span = model.config.span or ids.shape[1]
    for place in range(ids.shape[1]):
        x = model.embedding(ids[:, place : place + 1])
        turn = model.rotary(place, 1, None, x)
        m = shares[0] * x
        for layer, share in zip(model.layers, shares[1:], strict=True):
            if place:
                q = rotated(layer.query(layer.norm(x)).unflatten(-1, (4, 4)), *turn)[:, 0]
                y = attention_of_one(q, memory_k[-span:], memory_v[-span:])
                x = x + layer.out(y.flatten(1))[:, None]
            x = x + feed(layer.f, x)
            m = m + share * x
        k, v = model.memory.kv(model.memory.norm(m)).unflatten(-1, (4, 4)).split((2, 2), dim=-2)
        memory_k.append(rotated(k, *turn)[:, 0])
        memory_v.append(v[:, 0])
        ends.append(x)
    return model.head(model.norm(torch.cat(ends, 1)))


@pytest.mark.method("feedback-transformer")
@pytest.mark.parametrize("span", [None, 1, 3])
def test_the_memory_is_the_formula(span: int | None) -> None:
    model = feedback(layers=3, span=span)
    assert near(model(tokens()).logits, feedback_formula(model, tokens()))


@pytest.mark.method("feedback-transformer")
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("span", [None, 2])
@torch.no_grad()
def test_with_memories_of_embeddings_alone_all_tokens_run_at_once(layers: int, span: int | None) -> None:
    model = feedback(layers, embedding_alone=True, span=span)
    assert near(model.parallel(tokens()).logits, model(tokens()).logits)
    with pytest.raises(UsageError, match=r"the memory holds the outputs of layers: 0\.\d+ of its weight"):
        feedback(layers).parallel(tokens())


@pytest.mark.method("feedback-transformer")
def test_one_memory_for_all_layers() -> None:
    shallow, deep = feedback(layers=1), feedback(layers=5)
    kept = []
    for model in (shallow, deep):
        with torch.no_grad():
            cache = model.new_cache()
            model(tokens(), cache=cache)
        kept.append(cache.bytes)
        assert float(model.memory.weights.detach().softmax(-1).sum()) == pytest.approx(1.0)
    assert kept[0] == kept[1] == 2 * 2 * 2 * 7 * 4 * 8
    names = [name for name, _ in deep.named_parameters() if "kv" in name]
    assert names == ["memory.kv.weight"]
    fresh = FeedbackTransformer(FeedbackTransformerConfig(layers=3, **SIZES)).memory
    assert fresh.weights.softmax(-1).tolist() == [0.25] * 4


@pytest.mark.method("feedback-transformer")
def test_the_lowest_layer_sees_the_highest_of_the_past() -> None:
    model, seen = feedback(layers=2), []
    model.layers[0].out.register_forward_hook(lambda module, given, output: seen.append(output))
    model(tokens(2))
    top = model.layers[1].f.sublayer.down.weight
    assert len(seen) == 1
    assert float(torch.autograd.grad(seen[0].sum(), top)[0].abs().max()) > 1e-3


@pytest.mark.method("feedback-transformer")
@torch.no_grad()
def test_a_span_bounds_what_memories_of_embeddings_tell() -> None:
    model = feedback(layers=2, embedding_alone=True, span=2)
    ids = tokens(8, 1)
    other = ids.clone()
    other[0, 2] = (other[0, 2] + 1) % 29
    moved = (model(other).logits - model(ids).logits).abs().amax(-1)[0] > 1e-9
    assert moved.tolist() == [False, False, True, True, True, False, False, False]


@pytest.mark.method("feedback-transformer")
@pytest.mark.method("recurrent-transformer")
@pytest.mark.parametrize("make", [feedback, recurrent])
def test_generation_continues_as_without_a_cache(make: Any) -> None:
    model, ids = make(), tokens(4)
    found = generate(model, ids, steps=5)
    assert found.shape == (2, 9)
    with torch.no_grad():
        for length in range(4, 9):
            assert torch.equal(model(found[:, :length]).logits[:, -1].argmax(-1), found[:, length])
            assert near(model(found[:, :length], last=1).logits, model(found[:, :length]).logits[:, -1:])
    with pytest.raises(UsageError, match="takes no padding; give sequences of one length"):
        model(ids, valid=torch.tensor([[True] * 4, [False] + [True] * 3]))
    with pytest.raises(UsageError, match="the input is empty; give at least one token"):
        model(ids[:, :0])


@pytest.mark.parametrize("kind", [FeedbackTransformerConfig, RecurrentTransformerConfig])
def test_sizes_that_do_not_fit_are_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match=f"{kind.__name__}: a width of 10 is not divisible by 4 heads"):
        kind.read({"layers": 1, "width": 10, "heads": 4})


def parity(model: nn.Module, steps: int) -> float:
    """The share of right answers, after training, to whether so many of 16 bits so far are odd."""
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        bits = torch.randint(0, 2, (64, 16), generator=generator)
        loss = nn.functional.cross_entropy(model(bits).logits.flatten(0, 1), (bits.cumsum(1) % 2).flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    bits = torch.randint(0, 2, (256, 16), generator=generator)
    with torch.no_grad():
        return float((model(bits).logits.argmax(-1) == bits.cumsum(1) % 2).float().mean())


@pytest.mark.slow
@pytest.mark.method("feedback-transformer")
def test_one_layer_with_feedback_learns_parity_where_two_plain_layers_do_not() -> None:
    sizes: dict[str, Any] = {"width": 32, "heads": 2, "hidden": 64, "vocabulary": 2}
    assert parity(FeedbackTransformer(FeedbackTransformerConfig(layers=1, **sizes)), 250) > 0.99
    assert parity(Stack(StackConfig(layers=2, **sizes)), 250) < 0.65
