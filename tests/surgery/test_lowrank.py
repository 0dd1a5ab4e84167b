"""Low-rank attention: the weighted SVD, real factors that are stored, priced and run, and their product when baked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_inputs, tiny_model
from deepen.errors import CheckpointError, FamilyError, UsageError
from deepen.surgery.activations import Activations
from deepen.surgery.lowrank import factors, shares
from tests.cli.models import tokenizer
from tests.surgery.cases import off, outputs
from tests.surgery.test_narrow import read, with_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return with_tokenizer(tmp_path_factory.mktemp("lowrank") / "llama", "llama")


@pytest.fixture(scope="module")
def streams(llama: Checkpoint) -> Activations:
    return read(llama)


@pytest.mark.method("low-rank")
def test_the_factors_are_nearest_in_the_weighted_norm() -> None:
    torch.manual_seed(0)
    matrix, root = torch.randn(7, 10, dtype=torch.float64), torch.rand(10, dtype=torch.float64) * 5 + 0.1
    values = torch.linalg.svdvals(matrix * root)
    for rank in range(1, 8):
        left, right = factors(matrix, root, rank)
        assert (left.shape, right.shape) == ((7, rank), (rank, 10))
        assert ((matrix - left @ right) * root).norm() == pytest.approx(values[rank:].norm().item(), abs=1e-9)
        plain = factors(matrix, torch.ones(10), rank)
        assert (matrix - plain[0] @ plain[1]).norm() <= (matrix - left @ right).norm() + 1e-12
    left, right = factors(matrix, root, 7)
    assert torch.allclose(left @ right, matrix, atol=1e-9)
    u, s, v = torch.linalg.svd(matrix)
    left, right = factors(matrix, torch.ones(10), 3)
    assert torch.allclose(left @ right, u[:, :3] * s[:3] @ v[:3], atol=1e-9)


def test_the_split_of_the_share_is_that_of_the_paper() -> None:
    width = 4096
    for keep in (0.5, 0.6):
        both = int(keep * width / 2)
        small, large = (share * width / 2 for share in shares(keep))
        # The paper rounds twice.
        assert int(small) == pytest.approx(int(2 * both / 4), abs=1)
        assert int(large) == pytest.approx(int(6 * both / 4), abs=1)
    for keep in (0.7, 0.8, 0.9):
        assert shares(keep) == (pytest.approx(2 * keep - 1), 1.0)
    assert [sum(shares(keep)) / 2 for keep in (0.3, 0.6, 0.8)] == pytest.approx([0.3, 0.6, 0.8])


def test_full_rank_is_the_model_itself(tmp_path: Path) -> None:
    tiny_model("qwen2", num_key_value_heads=4).save_pretrained(tmp_path / "square")
    tokenizer().save_pretrained(tmp_path / "square")
    ck = deepen.open(tmp_path / "square")
    known = read(ck)
    full, told = deepen.low_rank(ck, known, rank=32, feed_forward=False)
    assert off(outputs(full), outputs(ck)) < 1e-5
    assert full.cost().params > ck.cost().params
    assert "k_proj at rank 32" in told.note
    # The biases of queries, keys and values stand behind the factors.
    assert "model.layers.0.self_attn.q_proj.left.bias" in full.source.infos
    assert off(outputs(deepen.low_rank(ck, known, rank=16, feed_forward=False)[0]), outputs(ck)) > 1e-3


def test_keeping_everything_changes_nothing(llama: Checkpoint, streams: Activations) -> None:
    same, told = deepen.low_rank(llama, streams, keep=1.0)
    assert torch.equal(outputs(same), outputs(llama))
    assert (told.folded, told.figures["parameters"]) == ((), 1)


def test_values_and_output_stay_dense_where_their_share_is_whole(llama: Checkpoint, streams: Activations) -> None:
    small, _ = deepen.low_rank(llama, streams, keep=0.75, feed_forward=False)
    assert small.factors["text"][0] == {"self_attn.q_proj": 8, "self_attn.k_proj": 5}
    assert "model.layers.0.self_attn.v_proj.weight" in small.source.infos
    assert "model.layers.0.self_attn.q_proj.weight" not in small.source.infos


def test_factors_are_stored_run_cached_and_priced(llama: Checkpoint, streams: Activations, tmp_path: Path) -> None:
    small, told = deepen.low_rank(llama, streams, keep=0.5, multiple=8)
    assert told.figures["parameters"] == small.cost().params / llama.cost().params < 0.8
    assert small.save(tmp_path / "small").form == "native"
    stated = json.loads((tmp_path / "small" / "config.json").read_text())["factors"]["text"]["3"]
    # q: 1/4 of 32 x 32, k: 1/4 of 16 x 32, v and o: 3/4.
    assert stated == {f"self_attn.{name}_proj": rank for name, rank in (("q", 4), ("k", 2), ("v", 8), ("o", 12))}
    again = deepen.open(tmp_path / "small")
    assert torch.equal(outputs(again), outputs(small))
    model: Any = again.load()
    inputs = tiny_inputs(model, tokens=16)
    assert off(step_by_step(model, inputs, 4), output_of(model, inputs)) < 1e-5
    assert again.cost().params == small.cost().params == sum(each.numel() for each in model.parameters())
    layer = small.cost().flops - small.apply("0-4").cost().flops
    feed = 3 * 24 * 32 * 2
    attention = 2 * (4 * 64 + 2 * 48 + 8 * 48 + 12 * 64)
    keys = llama.cost().flops - llama.apply("0-4").cost().flops - 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert keys > 0
    assert layer == pytest.approx(feed + attention + keys)
    model.save_pretrained(tmp_path / "written")
    assert torch.equal(outputs(deepen.open(tmp_path / "written")), outputs(small))


def test_baking_multiplies_the_factors_out_and_says_so(llama: Checkpoint, streams: Activations, tmp_path: Path) -> None:
    small, _ = deepen.low_rank(llama, streams, keep=0.5, multiple=8)
    told = small.save(tmp_path / "baked", bake=True)
    assert "24 linear maps are written as the product of their two factors, at full size" in told.notes
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "baked")
    assert off(output_of(model, tiny_inputs(model, tokens=16)), outputs(small)) < 1e-5
    assert model.config.intermediate_size == 24
    assert deepen.open(tmp_path / "baked").factors == {}


def test_programs_run_over_factored_layers(llama: Checkpoint, streams: Activations, tmp_path: Path) -> None:
    small, _ = deepen.low_rank(llama, streams, keep=0.5, feed_forward=False)
    before = outputs(small)
    for program in ("0-2 2!zero 3-5", "0-5 5!zero"):
        grown = small.apply(program)
        assert off(outputs(grown), before) < 1e-6
        grown.save(tmp_path / program.replace(" ", "_"), bake=True)
        assert off(outputs(deepen.open(tmp_path / program.replace(" ", "_"))), before) < 1e-5
    looped = small.apply("5 (1-2)*2 0.f")
    looped.save(tmp_path / "looped")
    assert torch.equal(outputs(deepen.open(tmp_path / "looped")), outputs(looped))
    merged, _ = deepen.merge(small, 2, 3)
    assert merged.factors["text"][6] == small.factors["text"][2]
    assert outputs(merged).isfinite().all()


def test_half_of_attention_stays_where_the_text_needs_it(llama: Checkpoint, streams: Activations) -> None:
    ids = torch.tensor(llama.tokenizer()("the king is dead, long live the king. who goes there?").input_ids)[None]

    def apart(known: Activations) -> float:
        made, _ = deepen.low_rank(llama, known, keep=0.6, feed_forward=False)
        model, other = made.load(), llama.load()
        with torch.no_grad():
            return (model(input_ids=ids).logits - other(input_ids=ids).logits).square().mean().item()

    flat = {layer: {path: torch.ones_like(value) for path, value in paths.items()}
            for layer, paths in streams.squares.items()}  # fmt: skip
    assert apart(streams) < apart(replace(streams, squares=flat))


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck, a: deepen.low_rank(ck, a, keep=0), UsageError, "above 0 and at most 1, got 0"),
        (lambda ck, a: deepen.low_rank(ck, a, ratio=0.5), UsageError, "ratio of values to queries is 1 or more"),
        (lambda ck, a: deepen.low_rank(ck, a, rank=17), UsageError, "rank 17 for self_attn.k_proj of layer 0"),
        (lambda ck, a: deepen.low_rank(ck, a, rank=0), UsageError, "expected 1 to 32"),
        (lambda ck, a: deepen.low_rank(ck, a, keep=0.01), UsageError, "rank 0 for self_attn"),
        (lambda ck, a: deepen.low_rank(ck.apply("0-3"), a), UsageError, "read them again"),
        (lambda ck, a: deepen.low_rank(deepen.low_rank(ck, a, keep=0.5, multiple=8)[0], a), FamilyError,
         "dense and unfused"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    llama: Checkpoint, streams: Activations, call: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        call(llama, streams)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("opt", "layer 0 of opt has k_proj, q_proj, v_proj of the linear maps"),
        ("gpt2", "layer 0 of gpt2 has none of the linear maps"),
        ("phi3", "layer 0 of phi3 has o_proj of the linear maps"),
    ],
)
def test_fused_attention_is_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family)
    with pytest.raises(FamilyError, match=reason):
        deepen.low_rank(ck, read(ck))


@pytest.mark.parametrize(
    ("stated", "error", "reason"),
    [
        ({"text": {"9": {"self_attn.q_proj": 4}}}, CheckpointError, "factors must give linear maps"),
        ({"text": {"2": {"self_attn.q_proj": 0}}}, CheckpointError, "factors must give linear maps"),
        ([], CheckpointError, "factors must give linear maps"),
        ({"text": {"2": {"self_attn.q_proj": 33}}}, FamilyError, "rank 33 of self_attn.q_proj is not from 1 to 32"),
        ({"text": {"2": {"self_attn.nothing": 3}}}, FamilyError, "self_attn.nothing of a LlamaDecoderLayer is nothing"),
        ({"text": {"2": {"input_layernorm": 3}}}, FamilyError, "is a LlamaRMSNorm; only a linear map has factors"),
        ({"text": {"2": {"self_attn.q_proj": 5}}}, CheckpointError, "config.json describes"),
    ],
)
def test_factors_that_fit_no_layer_are_refused(
    llama: Checkpoint, streams: Activations, stated: Any, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    deepen.low_rank(llama, streams, keep=0.5, feed_forward=False)[0].save(tmp_path / "small")
    path = tmp_path / "small" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "factors": stated}))
    with pytest.raises(error, match=reason):
        deepen.open(tmp_path / "small").load()
