"""Wirings that read earlier outputs: each method's own identity, against loops over sources written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.program.site import Site
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.wiring.base import Earlier
from deepen.wiring.history import History
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case

TOKENS = laws.tokens()


def sites(stack: Stack) -> dict[tuple[int, str], torch.Tensor]:
    """What each site reads, computes and leaves; -1 is the embedding, and the final norm's input is `end`."""
    seen: dict[tuple[int, str], torch.Tensor] = {}

    def keep(site: Site, what: str, tensor: torch.Tensor) -> None:
        seen[site.index, what] = tensor

    stack.on_site(keep)
    handle = stack.norm.register_forward_pre_hook(lambda module, inputs: seen.update({(-1, "end"): inputs[0]}))
    with torch.no_grad():
        stack(TOKENS)
        seen[-1, "stream"] = stack.embedding(TOKENS)
    handle.remove()
    stack.hooks.clear()
    return seen


def tiny(name: str, layers: int, **options: Any) -> Any:
    """The wiring of a stack of so many layers."""
    return Stack(StackConfig(layers=layers, width=4, heads=1, wiring={"name": name, **options})).wiring


@pytest.mark.method("denseformer")
@pytest.mark.parametrize(("depth", "period", "dilation", "count"), [(48, 1, 1, 1224), (72, 1, 1, 2700), (48, 5, 4, 62)])
def test_weights_of_denseformer(depth: int, period: int, dilation: int, count: int) -> None:
    wiring = tiny("denseformer", depth, period=period, dilation=dilation)
    assert sum(parameter.numel() for parameter in wiring.parameters()) == count


@pytest.mark.method("denseformer")
@pytest.mark.parametrize("options", [{}, {"period": 2, "dilation": 2}])
def test_denseformer_averages_what_visits_left_before_any_averaging(options: dict[str, int]) -> None:
    stack = laws.changed(Case("denseformer", options), LOOPED)
    seen, wiring = sites(stack), stack.wiring
    period, dilation = options.get("period", 1), options.get("dilation", 1)
    outputs, x = [seen[-1, "stream"]], seen[-1, "stream"]
    for visit in range(5):
        torch.testing.assert_close(seen[2 * visit, "read"], x)
        outputs.append(x + seen[2 * visit, "update"] + seen[2 * visit + 1, "update"])
        x = outputs[-1]
        if (visit + 1) % period == 0:
            weights = wiring.get_parameter(f"weights.{visit}")
            chosen = [j for j in range(visit + 2) if (visit + 1 - j) % dilation == 0]
            x = sum(weight * outputs[j] for weight, j in zip(weights, chosen, strict=True))  # pyright: ignore
    torch.testing.assert_close(seen[-1, "end"], x)


@pytest.mark.method("denseformer")
def test_denseformer_begins_as_pre_ln_bit_for_bit_and_can_skip_a_visit() -> None:
    stack, plain = laws.at_first(Case("denseformer"), PLAIN), laws.at_first(Case("pre-ln"), PLAIN)
    with torch.no_grad():
        assert torch.equal(stack(TOKENS).logits, plain(TOKENS).logits)
        stack.wiring.get_parameter("weights.1").copy_(torch.tensor([0.0, 1.0, 0.0]))
        without = laws.at_first(Case("pre-ln"), "0 2")
        state = {name: value for name, value in plain.state_dict().items() if not name.startswith("layers.")}
        without.load_state_dict(state, strict=False)
        for child, layer in enumerate((0, 2)):
            without.layers[child].load_state_dict(plain.layers[layer].state_dict())
        laws.close(stack(TOKENS).logits, without(TOKENS).logits)


@pytest.mark.method("elc-bert")
def test_weights_of_elc_bert_at_first() -> None:
    base, zero = tiny("elc-bert", 4), tiny("elc-bert", 4, variant="zero")
    torch.testing.assert_close(base.weights[0].softmax(0), torch.tensor([0.2689, 0.7311]), rtol=0, atol=1e-4)
    torch.testing.assert_close(zero.weights[2].softmax(0), torch.full((4,), 0.25))
    # l scalars before layer l, of which the single one of the first layer is no parameter
    assert sum(parameter.numel() for parameter in base.parameters()) == 4 * 5 // 2 - 1


@pytest.mark.method("elc-bert")
def test_feed_forwards_of_elc_bert_begin_smaller_with_depth() -> None:
    fields: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2, "program": "2 (0-1)*2"}
    scaled = Stack(StackConfig(wiring="elc-bert", **fields), seed=3).layers
    plain = Stack(StackConfig(**fields), seed=3).layers
    for layer, place in ((0, 0), (1, 1), (2, 2)):
        for name in ("f.sublayer.up.weight", "f.sublayer.down.weight"):
            found, before = (layers[layer].get_parameter(name) for layers in (scaled, plain))
            torch.testing.assert_close(found, before / (2 * (1 + place)) ** 0.5)


@pytest.mark.method("elc-bert")
@pytest.mark.parametrize("variant", ["base", "normalized"])
@pytest.mark.parametrize("weighted", [False, True])
def test_elc_bert_written_out(variant: str, weighted: bool) -> None:
    stack = laws.changed(Case("elc-bert", {"variant": variant, "weighted_output": weighted}), LOOPED)
    seen, wiring = sites(stack), stack.wiring
    outputs = [seen[-1, "stream"]]
    for visit, layer in enumerate((0, 1, 2, 1, 2)):
        shares = wiring.get_parameter(f"weights.{visit - 1}").softmax(0) if visit else [1.0]
        entry = sum(share * output for share, output in zip(shares, outputs, strict=True))  # pyright: ignore
        torch.testing.assert_close(seen[2 * visit, "read"], entry)
        z = stack.layers[layer].get_submodule("a.after")(seen[2 * visit, "update"])
        torch.testing.assert_close(seen[2 * visit + 1, "read"], entry + z if variant == "normalized" else z)
        h = z + seen[2 * visit + 1, "update"]
        if variant == "normalized":
            h = (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True, unbiased=False)
        outputs.append(h)
    end = outputs[-1]
    if weighted:
        shares = wiring.get_parameter("output").softmax(0)
        end = sum(share * output for share, output in zip(shares, outputs, strict=True))
    torch.testing.assert_close(seen[-1, "end"], end)


@pytest.mark.method("elc-bert")
def test_gradients_of_the_weights_of_elc_bert_sum_to_zero() -> None:
    stack = laws.changed(Case("elc-bert"), PLAIN)
    stack(TOKENS).logits.square().mean().backward()
    for weights in stack.wiring.parameters():
        assert weights.grad is not None
        assert float(weights.grad.abs().max()) > 1e-6
        assert abs(float(weights.grad.sum())) < 1e-12


@pytest.mark.method("attention-residuals")
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_attention_residuals_written_out(block: int) -> None:
    stack = laws.changed(Case("attention-residuals", {"block": block}), LOOPED)
    seen = sites(stack)
    queries, gains = (stack.wiring.get_parameter(name) for name in ("queries", "gains"))
    finished, part, inside = [seen[-1, "stream"]], None, 0
    for index in range(11):
        sources = finished if part is None else [*finished, part]
        u = sources[0]
        if index:
            keys = [gains[index - 1] * v / v.square().mean(-1, keepdim=True).sqrt() for v in sources]
            shares = torch.stack([key @ queries[index - 1] for key in keys]).softmax(0)
            torch.testing.assert_close(shares.sum(0), torch.ones_like(shares[0]))
            u = len(sources) * sum(share[..., None] * v for share, v in zip(shares, sources, strict=True))
        torch.testing.assert_close(seen[index, "read"] if index < 10 else seen[-1, "end"], u)
        if index < 10:
            y = seen[index, "update"]
            part, inside = y if part is None else part + y, inside + 1
            if inside == block:
                finished, part, inside = [*finished, part], None, 0


@pytest.mark.method("attention-residuals")
def test_the_size_of_a_source_does_not_change_its_share() -> None:
    wiring: Any = laws.changed(Case("attention-residuals"), PLAIN).wiring
    x = torch.randn(2, 1, 1, laws.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    site = wiring.shape.sites[0]
    shares = []
    for factor in (1.0, 100.0):
        state = wiring.write(wiring.init(factor * x[0], Earlier()), site, None, x[1], None)
        sources = torch.stack([factor * x[0, 0, 0], x[1, 0, 0]], dim=1)
        shares.append(torch.linalg.lstsq(sources, wiring.readout(state)[0, 0]).solution)
    torch.testing.assert_close(shares[0], shares[1])


def test_a_mix_of_a_history_has_the_gradients_of_a_plain_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3,), (3, 2, 5)):
        x = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        weights = torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        vector = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
        history = History.start(x[0], 3).push(x[1]).push(x[2])
        broad = weights[:, None, None, None] if weights.ndim == 1 else weights[..., None]
        expected, found = ((broad * x).sum(0), x @ vector), (history.mix(weights), history.dot(vector))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one)
            for left, right in zip(*(gradients(y, x, weights, vector) for y in (one, other)), strict=True):
                assert (left is None) == (right is None)
                if left is not None and right is not None:
                    torch.testing.assert_close(left, right)


def test_several_mixes_of_a_history_have_the_gradients_of_plain_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.randn(2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    found = History.start(x[0], 4).push(x[1]).push(x[2]).mixes(weights)
    expected = torch.einsum("ms,sbtd->mbtd", weights, x)
    torch.testing.assert_close(found, expected)
    for left, right in zip(gradients(expected, x, weights), gradients(found, x, weights), strict=True):
        assert left is not None
        assert right is not None
        torch.testing.assert_close(left, right)


def gradients(y: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return torch.autograd.grad(y.sin().sum(), inputs, retain_graph=True, allow_unused=True)
