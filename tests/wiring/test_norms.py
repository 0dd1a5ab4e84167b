"""Where norms stand and what constants of depth are: each method's own identity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepen.errors import UsageError
from deepen.program.site import Site
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.wiring.deepnorm import constants
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case

TOKENS = laws.tokens()


def streams(stack: Any) -> tuple[torch.Tensor, dict[tuple[int, str], torch.Tensor]]:
    """The embedding, and what each site reads, computes and leaves."""
    seen: dict[tuple[int, str], torch.Tensor] = {}

    def keep(site: Site, what: str, tensor: torch.Tensor) -> None:
        seen[site.index, what] = tensor

    stack.on_site(keep)
    with torch.no_grad():
        stack(TOKENS)
        return stack.embedding(TOKENS), seen


def size(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1).sqrt()


def logits(stack: Any) -> torch.Tensor:
    with torch.no_grad():
        return stack(TOKENS).logits


@pytest.mark.method("pre-ln")
def test_the_stream_of_pre_ln_is_the_embedding_and_the_sum_of_all_outputs() -> None:
    x, seen = streams(laws.at_first(Case("pre-ln"), LOOPED))
    outputs = [tensor for (_, what), tensor in seen.items() if what == "update"]
    assert len(outputs) == 10
    torch.testing.assert_close(seen[9, "stream"], x + sum(outputs), rtol=0, atol=1e-10)


@pytest.mark.method("pre-ln")
def test_without_outputs_the_stream_of_pre_ln_is_the_embedding_bit_for_bit() -> None:
    stack = laws.at_first(Case("pre-ln"), PLAIN)
    for layer in stack.layers:
        torch.nn.init.zeros_(layer.get_parameter("a.sublayer.out.weight"))
        torch.nn.init.zeros_(layer.get_parameter("f.sublayer.down.weight"))
    x, seen = streams(stack)
    assert torch.equal(seen[5, "stream"], x)


@pytest.mark.method("post-ln")
def test_every_stream_of_post_ln_is_an_output_of_a_norm() -> None:
    stack = laws.at_first(Case("post-ln"), LOOPED)
    for layer in stack.layers:
        for part in "af":
            torch.nn.init.ones_(layer.get_parameter(f"{part}.after.weight"))
    stack.embedding.weight.data *= 7
    x, seen = streams(stack)
    assert float(size(x).mean()) > 4
    assert torch.equal(seen[0, "read"], x)
    for index in range(10):
        torch.testing.assert_close(size(seen[index, "stream"]), torch.ones_like(size(x)))
    assert isinstance(stack.norm, torch.nn.Identity)


@pytest.mark.method("sandwich")
@pytest.mark.parametrize("name", ["sandwich", "depth-scaled-sandwich"])
def test_the_scale_of_a_sandwiched_branch_does_not_matter(name: str) -> None:
    stack, plain = laws.at_first(Case(name), LOOPED), laws.at_first(Case("pre-ln"), LOOPED)
    before, unlike = logits(stack), logits(plain)
    for model in (stack, plain):
        for layer in model.layers:
            layer.get_parameter("f.sublayer.down.weight").data *= 10
            layer.get_parameter("a.sublayer.out.weight").data *= 10
    laws.close(logits(stack), before)
    assert float((logits(plain) - unlike).abs().max()) > 0.1


@pytest.mark.method("depth-scaled-sandwich")
@pytest.mark.parametrize("depth", [8, 32])
def test_updates_of_the_depth_scaled_sandwich_have_the_stated_size(depth: int) -> None:
    """A fixed size a site, so the variance that all of them add does not depend on depth."""
    stack = Stack(StackConfig(
        layers=depth, width=16, heads=2, vocabulary=29, wiring="depth-scaled-sandwich", eps=0.0, init="tiny"
    )).double()  # fmt: skip
    x, seen = streams(stack)
    before, total = x, 0.0
    for index in range(2 * depth):
        update = seen[index, "stream"] - before
        wanted = (0.283 if index % 2 == 0 else 0.432) / math.sqrt(depth)
        torch.testing.assert_close(size(update), torch.full_like(size(update), wanted), rtol=1e-5, atol=0)
        total += wanted**2
        before = seen[index, "stream"]
    assert math.isclose(total, 0.283**2 + 0.432**2)


@pytest.mark.method("deepnorm")
@pytest.mark.parametrize(
    ("side", "blocks", "others", "alpha", "beta"),
    [
        ("decoder", 12, 0, 2.213, 0.3195),
        ("decoder", 24, 0, 2.632, 0.2686),
        ("decoder", 96, 0, 3.722, 0.1900),
        ("encoder", 12, 0, 2.213, 0.3195),
        ("encoder", 6, 6, 1.418, 0.4970),
        ("decoder", 6, 6, 2.060, 0.3433),
    ],
)
def test_the_table_of_deepnorm(side: Any, blocks: int, others: int, alpha: float, beta: float) -> None:
    found = constants(side, blocks, others)
    assert f"{found.alpha:.3f}" == f"{alpha:.3f}"
    assert f"{found.beta:.4f}" == f"{beta:.4f}"


@pytest.mark.method("deepnorm")
def test_deepnorm_is_post_ln_with_branches_divided_by_alpha() -> None:
    stack, post = laws.at_first(Case("deepnorm"), LOOPED), laws.at_first(Case("post-ln"), LOOPED)
    post.load_state_dict(stack.state_dict())
    alpha = (2 * 5) ** 0.25
    for layer in post.layers:
        layer.get_parameter("f.sublayer.down.weight").data /= alpha
        layer.get_parameter("a.sublayer.out.weight").data /= alpha
    laws.close(logits(stack), logits(post))


@pytest.mark.parametrize(
    ("wiring", "beta"),
    [
        pytest.param("deepnorm", (8 * 6) ** -0.25, marks=pytest.mark.method("deepnorm")),
        pytest.param("deeploop", (8 * 6) ** -0.5, marks=pytest.mark.method("deeploop")),
    ],
)
def test_beta_multiplies_values_outputs_and_feed_forwards_once(wiring: str, beta: float) -> None:
    """Queries and keys keep their initial values, and a layer that runs several times is multiplied once."""
    fields: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "program": "(0-1)*3"}
    scaled = Stack(StackConfig(wiring=wiring, **fields), seed=3).layers[1]
    plain = Stack(StackConfig(**fields), seed=3).layers[1]
    for name in ("a.sublayer.out", "f.sublayer.up", "f.sublayer.down"):
        torch.testing.assert_close(scaled.get_parameter(f"{name}.weight"), beta * plain.get_parameter(f"{name}.weight"))
    found, before = (layer.get_parameter("a.sublayer.qkv.weight") for layer in (scaled, plain))
    assert torch.equal(found[:24], before[:24])
    torch.testing.assert_close(found[24:], beta * before[24:])


@pytest.mark.method("deeploop")
def test_deeploop_counts_every_turn() -> None:
    """Four layers in three rounds are 12 blocks; with p = 1/4 the constants are those of DeepNorm."""
    fields: dict[str, Any] = {"layers": 4, "width": 8, "heads": 2, "program": "(0-3)*3"}
    wiring: Any = Stack(StackConfig(wiring="deeploop", **fields)).wiring
    assert f"{wiring.alpha:.3f} {wiring.beta:.4f}" == "4.899 0.1021"
    quarter: Any = Stack(StackConfig(wiring={"name": "deeploop", "p": 0.25}, **fields)).wiring
    assert (quarter.alpha, quarter.beta) == constants("decoder", 12)
    other: Any = Stack(StackConfig(layers=24, width=8, heads=2, wiring="deeploop")).wiring
    assert f"{other.alpha:.3f} {other.beta:.5f}" == "6.928 0.07217"


@pytest.mark.method("deeploop")
def test_a_site_of_deeploop_written_out() -> None:
    stack = laws.at_first(Case("deeploop"), PLAIN)
    x, seen = streams(stack)
    with torch.no_grad():
        expected = stack.layers[0].get_submodule("a.after")(math.sqrt(6) * x + seen[0, "update"])
    torch.testing.assert_close(seen[0, "stream"], expected)


@pytest.mark.method("looped-scaling")
def test_looped_scaling_divides_by_the_rounds_and_by_the_root_of_the_layers() -> None:
    factors = {}
    for rounds in (1, 4):
        x, seen = streams(laws.at_first(Case("looped-scaling", {"strength": 3.0}), f"(0-2)*{rounds}"))
        factors[rounds] = ((seen[0, "stream"] - x) / seen[0, "update"]).mean()
    assert math.isclose(float(factors[1]), 3 / math.sqrt(3), rel_tol=1e-9)
    assert math.isclose(float(factors[1] / factors[4]), 4, rel_tol=1e-9)


@pytest.mark.method("layer-scale")
def test_gains_of_layer_scale_fold_into_the_output_matrices() -> None:
    settings: dict[str, Any] = {"bias": True, "feed_forward": "gelu"}
    stack = laws.changed(Case("layer-scale"), "2 0-1", **settings)
    plain = laws.at_first(Case("pre-ln"), "2 0-1", **settings)
    state = {name: value for name, value in stack.state_dict().items() if not name.startswith("wiring.")}
    wiring: Any = stack.wiring
    folded = wiring.folded(stack.layers)
    assert len(folded) == 12
    plain.load_state_dict({**state, **folded})
    laws.close(logits(plain), logits(stack), 1e-12)


@pytest.mark.method("layer-scale")
def test_gains_of_a_layer_that_runs_twice_do_not_fold() -> None:
    stack = laws.changed(Case("layer-scale"), LOOPED)
    wiring: Any = stack.wiring
    with pytest.raises(UsageError, match="layer 1 is visited more than once"):
        wiring.folded(stack.layers)


@pytest.mark.method("layer-scale")
def test_layer_scale_begins_by_depth_and_is_the_identity_without_gains() -> None:
    for depth, value in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
        gains: Any = Stack(StackConfig(layers=depth, width=4, heads=1, wiring="layer-scale")).wiring.gains
        assert gains.unique().tolist() == pytest.approx([value])
    stack = laws.at_first(Case("layer-scale", {"value": 0.0}), LOOPED)
    x, seen = streams(stack)
    assert torch.equal(seen[9, "stream"], x)


@pytest.mark.method("rezero")
def test_rezero_begins_as_the_identity_and_only_its_factors_learn_in_the_first_step() -> None:
    stack = laws.at_first(Case("rezero"), LOOPED)
    x, seen = streams(stack)
    assert torch.equal(seen[9, "stream"], x)
    stack.hooks.clear()
    torch.nn.functional.cross_entropy(stack(TOKENS).logits.flatten(0, 1), TOKENS.flatten()).backward()
    for name, parameter in stack.layers.named_parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any(), name
    factors: Any = stack.wiring.factors
    assert bool((factors.grad.abs() > 1e-8).all())
    assert factors.shape == (5,)
    assert not any("norm" in name or "after" in name for name, _ in stack.named_parameters())
