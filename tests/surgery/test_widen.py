"""Wider models compute what the narrow ones did, in every family that a rule is known for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_inputs, tiny_model
from deepen.errors import CheckpointError, FamilyError, UsageError
from deepen.surgery.widen_axes import Spread, copies, shares
from tests.surgery.cases import off, outputs

WRONG: Any = "lemons"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def tiny(folder: Path, family: str, dtype: str = "float32", **changes: Any) -> Checkpoint:
    # A large eps, so that a norm that forgets to scale it is seen.
    eps = "layer_norm_epsilon" if family == "gpt2" else "rms_norm_eps"
    model = tiny_model(family, **{eps: 0.05, **changes})
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return deepen.open(folder)


def grown(family: str, width: int) -> dict[str, Any]:
    """Every width at once; heads of GPT-2 follow the stream."""
    heads = {} if family == "gpt2" else {"heads": width // 8}
    return {"width": width, "hidden": 192 if family == "gpt2" else 72, **heads}


def exact_norm(norm: Any, stream: torch.Tensor) -> torch.Tensor:
    """The norm in the precision of the stream; that of transformers rounds to fp32."""
    mean = stream.square().mean(-1, keepdim=True)
    return norm.weight * stream * torch.rsqrt(mean + norm.variance_epsilon)


@pytest.mark.method("widen")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_and_a_half_times_as_wide_passes_with_lemon_and_fails_with_fpi(
    family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", exact_norm)
    monkeypatch.setattr("transformers.models.mistral.modeling_mistral.MistralRMSNorm.forward", exact_norm)
    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm.forward", exact_norm)
    ck = tiny(tmp_path / family, family, "float64", tie_word_embeddings=tied)

    def logits(each: Checkpoint) -> torch.Tensor:
        model = each.load(attn_implementation="sdpa")
        with torch.no_grad():
            return model(**tiny_inputs(model, tokens=16)).logits

    before = logits(ck)
    assert before.dtype == torch.float64
    lemon, told = deepen.widen(ck, **grown(family, 48))
    assert told.same_as == "0-5"
    assert off(logits(lemon), before) < 1e-10
    fpi, told = deepen.widen(ck, **grown(family, 48), how="fpi")
    assert told.same_as is None
    assert off(logits(fpi), before) > 1e-3
    twice, told = deepen.widen(ck, **grown(family, 64), how="fpi")
    assert told.same_as == "0-5"
    assert off(logits(twice), before) < 1e-10
    # Two and a half times: whole copies, and places left over.
    assert off(logits(deepen.widen(ck, **grown(family, 80))[0]), before) < 1e-10


@pytest.mark.parametrize("how", ["lemon", "fpi"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_twice_as_wide_loads_in_transformers_alone(family: str, how: Any, tmp_path: Path) -> None:
    ck = tiny(tmp_path / family, family)
    wide, told = deepen.widen(ck, **grown(family, 64), how=how, measure=True)
    before = outputs(ck)
    assert told.max_logit_difference is not None
    assert told.max_logit_difference < 1e-5 * max(1.0, before.abs().max().item())
    assert told.figures["parameters"] > 1.9
    assert wide.save(tmp_path / "wide").form == "plain"
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    inputs = tiny_inputs(model, tokens=16)
    assert off(output_of(model, inputs), before) < 1e-5
    assert off(step_by_step(model, inputs, 4), before) < 1e-5
    assert model.config.hidden_size == 64
    assert wide.cost().params == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(("name", "size"), [("width", 40), ("hidden", 50), ("heads", 8)])
def test_each_width_grows_alone(name: str, size: Any, tmp_path: Path) -> None:
    ck = tiny(tmp_path / "llama", "llama", attention_bias=True, mlp_bias=True)
    wide, _ = deepen.widen(ck, **{name: size})
    assert off(outputs(wide), outputs(ck)) < 1e-5
    changed = {key for key in wide.config if wide.config[key] != ck.config[key]}
    expected = {"width": {"hidden_size", "rms_norm_eps"}, "hidden": {"intermediate_size"}}
    assert changed == expected.get(name, {"num_attention_heads", "num_key_value_heads"})


def test_growing_by_nothing_is_the_identity(tmp_path: Path) -> None:
    ck = tiny(tmp_path / "llama", "llama")
    same, told = deepen.widen(ck, width=32, hidden=48, heads=4)
    assert told.folded == ()
    assert same.config == ck.config
    assert torch.equal(outputs(same), outputs(ck))


def test_copies_of_lemon_are_read_unequally_and_add_up_to_one() -> None:
    spread = copies(5, 12)
    for noise in (0.0, 0.3):
        found = shares(spread, noise, torch.Generator().manual_seed(0))
        sums = [sum(w for w, entry in zip(found.factor, found.index, strict=True) if entry == at) for at in range(5)]
        assert sums == pytest.approx([1.0] * 5, abs=1e-15)
        assert (found.factor[0] == found.factor[5]) == (noise == 0)
    assert Spread(2, (0, 1, 2), (1.0, 2.0, 3.0)).along(torch.tensor([4.0, 6.0]), 0).tolist() == [4.0, 12.0, 15.0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_new_weights_learn(family: str, tmp_path: Path) -> None:
    wide, _ = deepen.widen(tiny(tmp_path / family, family), **grown(family, 48))
    model: Any = wide.load().train()
    ids = tiny_inputs(model, tokens=16)["input_ids"]
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            seen[name] |= parameter.grad != 0
        optimiser.step()
        optimiser.zero_grad()
    for name, moved in seen.items():
        if moved.dim() == 2 and not name.endswith(("wte.weight", "wpe.weight", "embed_tokens.weight")):
            assert moved.any(1).all(), name
        if "llama" in family and "norm" in name:
            assert moved.all(), name


def test_depth_follows_with_copies_that_add_nothing(tmp_path: Path) -> None:
    ck = tiny(tmp_path / "llama", "llama")
    wide, _ = deepen.widen(ck, width=48, hidden=72)
    deep = wide.apply(" ".join(f"{at} {at}!zero" for at in range(6)))
    assert deep.save(tmp_path / "deep").form == "plain"
    assert off(outputs(deepen.open(tmp_path / "deep")), outputs(ck)) < 1e-5


@pytest.mark.parametrize(
    ("family", "call", "error", "reason"),
    [
        ("llama", lambda ck: deepen.widen(ck, width=16), UsageError, "stream would go from 32 to 16"),
        ("llama", lambda ck: deepen.widen(ck, heads=5), UsageError, "a multiple of 2; got 5"),
        ("llama", lambda ck: deepen.widen(ck, heads=6), CheckpointError, "transformers refuses config.json"),
        ("gpt2", lambda ck: deepen.widen(ck, width=44), UsageError, "its width is a multiple of 8; got 44"),
        ("gpt2", lambda ck: deepen.widen(ck, width=48, heads=5), UsageError, "has 6 heads of 8, not 5"),
        ("gpt2", lambda ck: deepen.widen(ck, how=WRONG), UsageError, "did you mean 'lemon'"),
        ("gemma", lambda ck: deepen.widen(ck, width=64), FamilyError, "no exact rule is known for gemma"),
        (
            "llama",
            lambda ck: deepen.widen(deepen.fuse(ck, 2, 3)[0], width=64),
            FamilyError,
            "a width, factors or experts of",
        ),
    ],
)
def test_bad_input_is_one_clear_error(
    family: str, call: Any, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        call(tiny(tmp_path / family, family) if family != "gemma" else plain(tmp_path / family, family))


def plain(folder: Path, family: str) -> Checkpoint:
    tiny_model(family).save_pretrained(folder)
    return deepen.open(folder)
