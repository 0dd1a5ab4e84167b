"""Stacks with the weights of checkpoints against transformers, and stacks as models of transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import deepen
import deepen.hf
from deepen.checkpoint.stack_model import DeepenConfig, DeepenForCausalLM
from deepen.checkpoint.stack_weights import FORMS, save_stack, to_stack
from deepen.checkpoint.tiny import tiny_checkpoint
from deepen.errors import DeepenError, FamilyError, SaveError
from deepen.stack.generate import generate

TOKENS = torch.randint(0, 90, (2, 20), generator=torch.Generator().manual_seed(0))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("program", ["0-5", "0 (1-2)*2 3-5", "0 3! 4!zero 2.f"])
@pytest.mark.parametrize("family", sorted(FORMS))
def test_logits_are_those_of_transformers_and_come_back(family: str, program: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "in", family)
    ck = deepen.open(tmp_path / "in").apply(program)
    stack, model = to_stack(ck), ck.load()
    reference = logits(model)
    assert apart(logits(stack), reference) < 1e-5 * reference.abs().max().item()
    save_stack(stack, tmp_path / "out", family)
    again = deepen.open(tmp_path / "out")
    assert apart(logits(again.load()), reference) == 0
    if "(" not in program:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
        assert apart(logits(plain), reference) < 1e-5 * reference.abs().max().item()


@pytest.mark.parametrize("wiring", ["denseformer", "hyper-connections", "attention-residuals"])
def test_wirings_that_begin_as_pre_ln_keep_the_logits(wiring: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "in", "llama", rms_norm_eps=1e-12)
    ck = deepen.open(tmp_path / "in")
    reference = logits(to_stack(ck).double())
    assert apart(logits(to_stack(ck, wiring=wiring).double()), reference) < 1e-6 * reference.abs().max().item()


@pytest.mark.parametrize(
    ("family", "changes", "wiring", "message"),
    [
        ("llama", {}, "post-ln", "equals no Pre-LN model"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "pre-ln", "'linear'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "pre-ln", "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "relu"}, "pre-ln", "'relu'"),
        ("gpt_neox", {}, "pre-ln", "takes weights of llama"),
    ],
)
def test_what_does_not_fit_is_refused(
    family: str, changes: dict[str, Any], wiring: str, message: str, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path / "in", family, **changes)
    with pytest.raises(FamilyError, match=message):
        to_stack(deepen.open(tmp_path / "in"), wiring=wiring)


def test_a_family_that_cannot_express_a_stack(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "in", "qwen3")
    stack = to_stack(deepen.open(tmp_path / "in"))
    with pytest.raises(FamilyError, match="llama cannot express qk_norm = True"):
        save_stack(stack, tmp_path / "out", "llama")
    with pytest.raises(SaveError, match="exists"):
        save_stack(stack, tmp_path / "in", "qwen3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def model(**fields: Any) -> DeepenForCausalLM:
    """A stack as a model of transformers, moved from its initial values."""
    sizes = {"layers": 4, "program": "0 (1-2)*2[emb,kv=first] 3!zero 3", "width": 32, "heads": 4, "kv_heads": 2}
    torch.manual_seed(0)
    made = DeepenForCausalLM(DeepenConfig(stack={**sizes, **fields})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wiring", ["pre-ln", "hyper-connections", "attention-residuals"])
def test_save_and_the_auto_classes(wiring: str, tied: bool, tmp_path: Path) -> None:
    program = "0 (1-2)*2 3!zero 3"
    made = model(wiring=wiring, program=program, tied=tied)
    made.save_pretrained(tmp_path)
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert apart(logits(again), logits(made)) == 0
    assert AutoConfig.from_pretrained(tmp_path).stack["program"] == "0 (1-2)*2 3-4"
    stream = AutoModel.from_pretrained(tmp_path)(TOKENS).last_hidden_state
    assert apart(made.stack.head(stream), logits(made)) == 0


@pytest.mark.parametrize(
    "fields",
    [{}, {"wiring": "hyper-connections"}, {"wiring": "short-swa"}, {"grams": [2, 4], "gram_rows": 97}],
    ids=str,
)
def test_generate_is_that_of_the_stack(fields: dict[str, Any]) -> None:
    made = model(**fields)
    expected = generate(made.stack, TOKENS, steps=8)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 255}
    assert torch.equal(made.generate(TOKENS, **settings), expected)  # pyright: ignore
    padding = torch.zeros(2, 3, dtype=torch.long)
    padded, mask = torch.cat([padding, TOKENS], 1), torch.cat([padding, torch.ones_like(TOKENS)], 1)
    assert torch.equal(made.generate(padded, attention_mask=mask, **settings)[:, 3:], expected)  # pyright: ignore
    beams = made.generate(TOKENS, num_beams=3, **settings)  # pyright: ignore
    assert torch.equal(made.generate(TOKENS, num_beams=3, use_cache=False, **settings), beams)  # pyright: ignore


def test_training_peft_and_gradient_checkpointing() -> None:
    made = model().train()
    plain = made(TOKENS, labels=TOKENS).loss
    expected = torch.nn.functional.cross_entropy(made(TOKENS).logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert torch.equal(plain, expected)
    plain.backward()
    grads = {name: parameter.grad.clone() for name, parameter in made.named_parameters()}
    made.zero_grad()
    made.activation_checkpointing_enable()
    made(TOKENS, labels=TOKENS).loss.backward()
    assert all(torch.equal(parameter.grad, grads[name]) for name, parameter in made.named_parameters())
    before = logits(made.eval())
    with warnings.catch_warnings():
        # of peft's own call, which this version of transformers has renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = get_peft_model(made, LoraConfig(r=2, target_modules=["qkv", "down"]))
    assert apart(logits(adapted), before) == 0
    adapted.train()(TOKENS, labels=TOKENS).loss.backward()
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * len(made.stack.layers)
    assert all(parameter.grad is not None for parameter in trained.values())
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.1
    changed = logits(adapted.eval())
    # the turn that reads the keys of another visit runs its queries through the adapter too
    assert apart(logits(adapted.merge_and_unload()), changed) < 1e-5
    assert apart(changed, before) > 1e-3


def test_inputs_that_a_stack_does_not_take() -> None:
    with pytest.raises(DeepenError, match="inputs_embeds"):
        model()(inputs_embeds=torch.zeros(1, 2, 32))
    with pytest.raises(DeepenError, match="no key 'widht'"):
        DeepenConfig(stack={"layers": 1, "widht": 8, "heads": 1})
