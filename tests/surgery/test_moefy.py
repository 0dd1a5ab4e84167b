"""Feed-forwards of experts: the clusters, the routers, what is computed, what is stored, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

import deepen
import deepen.hf
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.experts import Experts, Split
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_inputs
from deepen.cli import main
from deepen.errors import CheckpointError, DeepenError, FamilyError, ProgramError, SaveError, UsageError
from deepen.surgery import moefy as moefication
from deepen.surgery.clusters import clusters, together
from deepen.surgery.expert_layers import chosen_layers, measured
from deepen.surgery.factor_llm import router_loss
from deepen.surgery.feed_inputs import FeedInputs
from deepen.surgery.routers import balance_loss, expert_outputs, gate_of, key_centres, prior_labels, prior_loss
from tests.assets import shakespeare_text, smollm2_gguf
from tests.cli.models import TEXT
from tests.surgery.cases import layer, off, outputs
from tests.surgery.test_narrow import with_tokenizer

FAMILIES = ("llama", "gpt2", "qwen3", "starcoder2", "gemma2", "phi", "gpt_neox")


def read(ck: Checkpoint) -> FeedInputs:
    return deepen.feed_inputs(ck, TEXT, context=32, tokens=640)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return with_tokenizer(tmp_path_factory.mktemp("moefy") / "llama", "llama")


@pytest.fixture(scope="module")
def data(llama: Checkpoint) -> FeedInputs:
    return read(llama)


def moefied(ck: Checkpoint, data: FeedInputs | None = None, **options: Any) -> Checkpoint:
    given = {"experts": 6, "active": 2, "by": "weights", "router": "similarity", **options}
    return deepen.moefy(ck, data=data, **given)[0]


def feed(model: PreTrainedModel, index: int) -> Any:
    found = [each for each in layer(model, index).modules() if isinstance(each, Experts)]
    assert len(found) == 1
    return found[0]


@pytest.mark.method("moefication")
@pytest.mark.parametrize("router", ["oracle", "similarity", "mlp"])
@pytest.mark.parametrize("by", ["coactivation", "weights"])
def test_all_experts_are_the_whole_model(llama: Checkpoint, data: FeedInputs, by: Any, router: Any) -> None:
    whole, told = deepen.moefy(llama, experts=6, active=6, data=data, by=by, router=router, steps=3)
    assert told.same_as == str(llama.program)
    assert off(outputs(whole), outputs(llama)) < 1e-5
    assert told.figures == pytest.approx({"recall": 1, "oracle": 1, "error": 0}, abs=1e-6)
    # The neurons did move, and the weights are not those of the file.
    assert not torch.equal(*(ck.source.read("model.layers.2.mlp.down_proj.weight") for ck in (whole, llama)))
    some = deepen.activate(whole, 2)
    assert off(outputs(some), outputs(llama)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_other_feed_forwards_are_split_exactly(family: str, tmp_path: Path) -> None:
    from tests.surgery.cases import checkpoint

    def biased(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()

    ck = checkpoint(tmp_path / family, family, biased)
    tower = ck.family.towers[-1].name
    whole = moefied(ck, experts=4, active=4, tower=tower)
    assert off(outputs(whole), outputs(ck)) < 1e-5
    assert off(outputs(deepen.activate(whole, 1, tower=tower)), outputs(ck)) > 1e-4
    whole.save(tmp_path / "whole")
    assert torch.equal(outputs(deepen.open(tmp_path / "whole")), outputs(whole))


MUTATIONS: dict[str, Callable[[Any], None]] = {
    "the columns of the output are not moved along": lambda part: part.down_proj.weight.data.copy_(
        part.down_proj.weight.data.roll(1, 1)
    ),
    "gate and up are swapped": lambda part: part.gate_proj.weight.data.copy_(
        torch.stack([part.up_proj.weight.data, part.up_proj.weight.data.copy_(part.gate_proj.weight.data)])[0]
    ),
    "the rows of the gate are moved alone": lambda part: part.gate_proj.weight.data.copy_(
        part.gate_proj.weight.data.roll(8, 0)
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_permutation_would_be_seen(llama: Checkpoint, mutation: str) -> None:
    model = moefied(llama, active=6).load()
    inputs = tiny_inputs(model, tokens=16)
    assert off(output_of(model, inputs), outputs(llama)) < 1e-5
    with torch.no_grad():
        MUTATIONS[mutation](feed(model, 3))
    assert off(output_of(model, inputs), outputs(llama)) > 1e-3


def plain(part: Any, reads: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What a gated feed-forward writes with some of its experts, token by token, over all neurons."""
    size = part.width // part.split.experts
    mask = torch.zeros(len(reads), part.split.experts).scatter_(1, chosen, 1.0).repeat_interleave(size, 1)
    hidden = torch.nn.functional.silu(part.gate_proj(reads)) * part.up_proj(reads)
    return (hidden * mask) @ part.down_proj.weight.T


@pytest.mark.parametrize("router", ["oracle", "similarity", "mlp"])
def test_each_token_runs_the_experts_that_its_router_names(llama: Checkpoint, data: FeedInputs, router: Any) -> None:
    ck = moefied(llama, data, router=router, steps=3)
    part = feed(ck.load(), 2)
    torch.manual_seed(1)
    reads = torch.randn(40, 32)
    with torch.no_grad():
        if router == "oracle":
            hidden = torch.nn.functional.silu(part.gate_proj(reads)) * part.up_proj(reads)
            scores = (hidden.abs() * part.down_proj.weight.norm(dim=0)).view(40, 6, 8).sum(-1)
        elif router == "mlp":
            first, second = (part.get_submodule(f"router.{at}") for at in (0, 2))
            scores = (reads @ first.weight.T + first.bias).tanh() @ second.weight.T + second.bias
        else:
            centres = part.gate_proj.weight.view(6, 8, 32).mean(1)
            scores = torch.nn.functional.cosine_similarity(reads[:, None], centres[None], dim=-1)
        best = scores.argsort(descending=True)[:, :2]
        got = part(reads.view(4, 10, 32)).view(40, 32)
        assert off(got, plain(part, reads, best)) < 1e-5
        # A router that is off by one expert is another model, and so is one token's choice for all.
        assert (got - plain(part, reads, (best + 1) % 6)).abs().max() > 1e-3
        assert (got - plain(part, reads, best[:1].expand(40, -1))).abs().max() > 1e-3
        # Batch independence: a token alone, and no tokens at all.
        assert off(part(reads[7:8]), got[7:8]) < 1e-5
        assert part(reads[:0]).shape == (0, 32)


def test_the_gradient_of_experts_is_that_of_the_masked_whole(llama: Checkpoint) -> None:
    part = feed(moefied(llama).load(), 1)
    torch.manual_seed(2)
    reads = torch.randn(24, 32)
    chosen = part.chosen(reads)
    wanted = torch.autograd.grad(plain(part, reads, chosen).square().sum(), part.gate_proj.weight)[0]
    got = torch.autograd.grad(part(reads).square().sum(), part.gate_proj.weight)[0]
    assert off(got, wanted) < 1e-5
    assert (wanted.abs().sum(1) > 0).any()


def test_what_is_computed_is_what_is_counted(llama: Checkpoint, data: FeedInputs) -> None:
    for ck in (moefied(llama), moefied(llama, router="oracle"), moefied(llama, data, router="mlp", steps=1)):
        part = feed(ck.load(), 2)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            part(torch.randn(30, 32))
        router = {"similarity": 32 * 6, "oracle": 2 * 48 * 32, "mlp": 32 * 6 + 36}[part.split.router]
        assert counter.get_total_flops() == 30 * 2 * (48 * 32 * 3 * 2 / 6 + router)
        dense = 3 * 48 * 32
        less = (llama.cost().flops - ck.cost().flops) / 6
        assert less == pytest.approx(2 * (dense - dense / 3 - router))
        assert ck.cost().params == sum(each.numel() for each in ck.load().parameters())


def test_the_native_form_is_stored_opened_and_written_again(
    llama: Checkpoint, data: FeedInputs, tmp_path: Path
) -> None:
    ck = moefied(llama.apply("0-4 3 5"), read(llama.apply("0-4 3 5")), router="mlp", layers=[1, 3], steps=3)
    assert ck.save(tmp_path / "split").form == "native"
    stated = json.loads((tmp_path / "split" / "config.json").read_text())["experts"]
    assert stated == {"text": {str(at): {"experts": 6, "active": 2, "router": "mlp"} for at in (1, 3)}}
    again = deepen.open(tmp_path / "split")
    assert torch.equal(outputs(again), outputs(ck))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "split")
    inputs = tiny_inputs(model, tokens=16)
    assert torch.equal(output_of(model, inputs), outputs(ck))
    assert off(step_by_step(model, inputs, 4), output_of(model, inputs)) < 1e-5
    model.save_pretrained(tmp_path / "written")
    assert torch.equal(outputs(deepen.open(tmp_path / "written")), outputs(ck))
    # Other programs keep the experts of each layer, and renumber them.
    fewer = again.apply("0 3 1 2")
    fewer.save(tmp_path / "fewer")
    stated = json.loads((tmp_path / "fewer" / "config.json").read_text())["experts"]["text"]
    assert sorted(stated) == ["1", "2"]
    assert torch.equal(outputs(deepen.open(tmp_path / "fewer")), outputs(fewer))


def test_commands_take_models_of_experts(llama: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepen.activate(moefied(llama, layers=[1, 2]), 6).save(tmp_path / "whole")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--data", str(tmp_path / "text.txt"), "--context", "16", "--tokens", "64", "--json"]
    found = []
    for folder in (llama.where, str(tmp_path / "whole")):
        assert main(["eval", folder, "0-5", *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["results"][0]["nll"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert main(["run", str(tmp_path / "whole"), "0-5", "--prompt", "the", "--tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_baking_writes_all_experts_as_a_plain_model(family: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family)
    split = moefied(ck, read(ck), experts=8, router="mlp", steps=3)
    with pytest.raises(SaveError, match=r"layer 0 runs 2 of 8 experts.*deepen\.activate"):
        split.save(tmp_path / "no", bake=True)
    told = deepen.activate(split, 8).save(tmp_path / "baked", bake=True)
    assert "6 feed-forwards of experts are written whole" in " ".join(told.notes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "baked")
    assert not any(isinstance(each, Experts) for each in model.modules())
    assert off(output_of(model, tiny_inputs(model, tokens=16)), outputs(ck)) < 1e-5


def test_clusters_are_equal_and_no_exchange_makes_them_better() -> None:
    torch.manual_seed(0)
    rows = torch.randn(48, 10)
    gram = rows @ rows.T
    order = clusters(gram, 6)
    assert sorted(order.tolist()) == list(range(48))
    best = together(gram, order, 6)
    for one in range(48):
        for two in range(one + 1, 48):
            other = order.clone()
            other[[one, two]] = order[[two, one]]
            assert together(gram, other, 6) <= best + 1e-4
    assert best > max(together(gram, torch.randperm(48), 6) for _ in range(20))
    # Planted groups come back whole, each ascending and the groups by their first neuron.
    label = torch.arange(48).remainder(6)[torch.randperm(48)]
    found = label[clusters((label[:, None] == label).double(), 6)].view(6, 8)
    assert (found == found[:, :1]).all()
    assert torch.equal(clusters(gram, 1), torch.arange(48))


@pytest.mark.parametrize("by", ["coactivation", "weights"])
def test_planted_groups_are_found(by: Any, tmp_path: Path) -> None:
    """Neurons of four groups read along four directions: each expert is one group, and a token needs few of them."""
    group = torch.randperm(128, generator=torch.Generator().manual_seed(5)) % 4

    def plant(model: PreTrainedModel) -> None:
        keys = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(6)))[0][:4]
        for index in range(6):
            part: Any = layer(model, index).mlp
            part.c_fc.weight.copy_(9 * keys[group].T)
            part.c_fc.bias.zero_()

    ck = with_tokenizer(tmp_path / "gpt2", "gpt2", plant)
    split, told = deepen.moefy(ck, experts=4, active=2, data=read(ck), by=by, router="oracle")
    keys = split.source.read("transformer.h.2.mlp.c_fc.weight").T.view(4, 32, 32)
    assert (keys == keys[:, :1]).all()
    assert told.figures["recall"] > 0.9


def test_clusters_hold_more_of_the_score_than_chance(llama: Checkpoint, data: FeedInputs) -> None:
    tower = llama.family.tower("")
    shape = chosen_layers(llama, tower, [2], "test")[2]
    whole = measured(llama, tower, 2, shape, Split(6, 2, "oracle"))
    reads = data.reads[2]
    gram = moefication.coactivation(whole, reads)
    wrote = whole.hidden(reads).abs() * whole.maps()[-1].weight.norm(dim=0)
    shares = wrote / wrote.sum(-1, keepdim=True)
    assert torch.allclose(gram, shares.T @ shares)

    def recall(order: torch.Tensor) -> float:
        return shares[:, order].view(len(reads), 6, 8).sum(-1).topk(2).values.sum(-1).mean().item()

    chance = [recall(torch.randperm(48)) for _ in range(10)]
    assert recall(clusters(gram, 6)) > max(chance)


def test_a_trained_router_is_nearer_to_the_oracle(llama: Checkpoint, data: FeedInputs) -> None:
    _, few = deepen.moefy(llama, experts=6, active=2, data=data, router="mlp", layers=[2], steps=1)
    _, more = deepen.moefy(llama, experts=6, active=2, data=data, router="mlp", layers=[2], steps=300)
    assert few.figures["recall"] < more.figures["recall"] <= more.figures["oracle"] == few.figures["oracle"]
    _, best = deepen.moefy(llama, experts=6, active=2, data=data, router="oracle", layers=[2])
    assert best.figures["recall"] == pytest.approx(best.figures["oracle"])


def test_the_gate_is_found_by_what_it_does(llama: Checkpoint) -> None:
    tower = llama.family.tower("")
    shape = chosen_layers(llama, tower, [2], "test")[2]
    assert shape.inputs[0].endswith("gate_proj")
    part = measured(llama, tower, 2, shape, Split(6, 2, "oracle"))
    assert gate_of(part) == 0
    turned = measured(llama, tower, 2, replace(shape, inputs=shape.inputs[::-1]), Split(6, 2, "oracle"))
    assert gate_of(turned) == 1
    assert torch.equal(key_centres(turned), key_centres(part))


@pytest.mark.method("factor-llm")
def test_factors_are_the_neurons_as_they_lie_and_sum_to_the_whole(llama: Checkpoint, data: FeedInputs) -> None:
    whole, told = deepen.factor_llm(llama, data, experts=4, active=4, steps=2)
    assert torch.equal(*(ck.source.read("model.layers.2.mlp.up_proj.weight") for ck in (whole, llama)))
    assert off(outputs(whole), outputs(llama)) < 1e-5
    assert told.figures["agreement"] == 1
    half, told = deepen.factor_llm(llama, data, experts=4, active=2, steps=2)
    assert half.experts["text"][0] == Split(4, 2, "linear")
    assert half.source.infos["model.layers.0.mlp.router.bias"].shape == (4,)
    assert 0 < told.figures["error"] < 2
    assert off(outputs(half), outputs(llama)) > 1e-3


def test_the_labels_are_the_experts_nearest_to_their_share(llama: Checkpoint, data: FeedInputs) -> None:
    tower = llama.family.tower("")
    part = measured(llama, tower, 2, chosen_layers(llama, tower, [2], "test")[2], Split(4, 2, "oracle"))
    reads = data.reads[2][:50]
    labels = prior_labels(part, reads)
    assert labels.sum(-1).tolist() == [2.0] * 50
    assert not labels.requires_grad
    matrices: Any = {name: part.get_submodule(name).weight for name in ("gate_proj", "up_proj", "down_proj")}
    hidden = torch.nn.functional.silu(reads @ matrices["gate_proj"].T) * (reads @ matrices["up_proj"].T)
    whole = hidden @ matrices["down_proj"].T
    parts = torch.stack(
        [hidden[:, at : at + 12] @ matrices["down_proj"][:, at : at + 12].T for at in range(0, 48, 12)], 1
    )
    assert torch.allclose(expert_outputs(part, reads), parts, atol=1e-5)
    apart = (parts - whole[:, None] / 2).square().mean(-1)
    for row, chosen in zip(apart, labels.bool(), strict=True):
        assert row[chosen].max() <= row[~chosen].min()


def test_the_prior_loss_is_its_formula_and_reaches_scores_alone() -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(7, 4, requires_grad=True), torch.tensor([[1.0, 0, 1, 0]]).expand(7, 4)
    p, q = scores.softmax(-1), labels.softmax(-1)
    assert prior_loss(scores, labels).item() == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), abs=1e-6)
    # The order of the arguments matters.
    assert prior_loss(scores, labels).item() != pytest.approx((q * (q / p).log()).sum(-1).mean().item(), abs=1e-3)
    assert prior_loss(labels + 3.0, labels).item() == pytest.approx(0, abs=1e-6)
    top = p.detach().topk(2).values.sum(-1).mean().item() / 4
    assert balance_loss(scores, 2).item() == pytest.approx(top)
    both = router_loss(scores, labels, active=2, balance=0.5)
    assert both.item() == pytest.approx(prior_loss(scores, labels).item() + 0.5 * top)
    assert torch.autograd.grad(both, scores)[0].abs().sum() > 0


def test_a_router_learns_the_prior(llama: Checkpoint, data: FeedInputs) -> None:
    _, few = deepen.factor_llm(llama, data, layers=[2], steps=1)
    _, more = deepen.factor_llm(llama, data, layers=[2], steps=300)
    assert more.figures["agreement"] > few.figures["agreement"] + 0.02


BAD: list[tuple[Callable[[Checkpoint, FeedInputs], Any], type[DeepenError], str]] = [
    (lambda ck, data: deepen.moefy(ck, experts=7, active=2, data=data), UsageError,
     "layer 0: 48 neurons cannot be split into 7 experts.*divides the width, as 4, 6, 8"),
    (lambda ck, data: deepen.moefy(ck, experts=6, active=7, data=data), UsageError, "7 active of 6 experts"),
    (lambda ck, data: deepen.moefy(ck, experts=6, active=0, data=data), UsageError, "0 active of 6 experts"),
    (lambda ck, data: deepen.moefy(ck, experts=6, active=2), UsageError, r"coactivation need data.*feed_inputs"),
    (lambda ck, data: moefied(ck, router="mlp"), UsageError, "a router that is trained need"),
    (lambda ck, data: moefied(ck, by="weight"), UsageError, "did you mean 'weights'"),
    (lambda ck, data: moefied(ck, router="linear"), UsageError, "'linear' is unknown"),
    (lambda ck, data: moefied(ck, layers=[6]), ProgramError, "layer 6 does not exist"),
    (lambda ck, data: moefied(ck, layers=[]), UsageError, "no layers are named"),
    (lambda ck, data: moefied(ck.apply("0-3"), layers=[5]), UsageError, "layer 5 is not visited"),
    (lambda ck, data: moefied(ck.apply("0-3"), data), UsageError, "in `0-5`, not of .* in `0-3`"),
    (lambda ck, data: moefied(ck, replace(data, reads={})), UsageError, "the data holds 0 tokens"),
    (lambda ck, data: moefied(moefied(ck)), FamilyError, "is split into 6 experts already"),
    (lambda ck, data: deepen.narrow(moefied(ck), score="magnitude", multiple=8), FamilyError, "6 experts already"),
    (lambda ck, data: deepen.fuse(moefied(ck), 1, 2), FamilyError, "6 experts already"),
    (lambda ck, data: deepen.merge(moefied(ck), 1, 2), FamilyError, "expert by expert.*forwards last"),
    (lambda ck, data: deepen.tie(moefied(ck), 2, how="average"), FamilyError, "expert by expert.*forwards last"),
    (lambda ck, data: deepen.widen(moefied(ck), hidden=96), FamilyError, "experts of their own"),
    (lambda ck, data: deepen.to_stack(moefied(ck)), FamilyError, "experts or owned parameters"),
    (lambda ck, data: moefied(ck).apply("(0-2)*2[lora=2] 3-5").load(), FamilyError, "split into experts"),
    (lambda ck, data: deepen.activate(ck, 2), FamilyError, "any layer is not split into experts"),
    (lambda ck, data: deepen.activate(moefied(ck, layers=[1]), 2, layers=[2]), FamilyError, "layer 2 is not split"),
    (lambda ck, data: deepen.activate(moefied(ck), 9), UsageError, "9 active of 6 experts"),
    (lambda ck, data: deepen.factor_llm(ck, data, experts=5), UsageError, "48 neurons cannot be split into 5"),
    (lambda ck, data: deepen.factor_llm(ck, data, balance=-1), UsageError, "balance loss is 0 or more"),
    (lambda ck, data: deepen.factor_llm(ck, data, steps=0), UsageError, "at least 1 step, got 0"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_is_one_clear_error(llama: Checkpoint, data: FeedInputs, case: int) -> None:
    call, error, reason = BAD[case]
    with pytest.raises(error, match=reason):
        call(llama, data)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"text": {"9": {"experts": 6, "active": 2, "router": "similarity"}}}, "experts must give layers"),
        ({"text": {"1": {"experts": 6}}}, "experts must give layers"),
        ({"text": {"1": {"experts": 6, "active": 2.5, "router": "similarity"}}}, "experts must give layers"),
        ({"text": {"1": {"experts": 7, "active": 2, "router": "similarity"}}}, "48 neurons cannot be split into 7"),
        ({"text": {"1": {"experts": 6, "active": 2, "router": "similar"}}}, "no router 'similar'"),
        ({"text": {"1": {"experts": 6, "active": 2, "router": "mlp"}}}, "files do not hold: .*router.0.bias"),
        ({}, "router"),
    ],
)
def test_splits_that_fit_no_layer_are_refused(llama: Checkpoint, stated: Any, reason: str, tmp_path: Path) -> None:
    moefied(llama, layers=[1]).save(tmp_path / "split")
    path = tmp_path / "split" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "experts": stated}))
    with pytest.raises((CheckpointError, UsageError), match=reason):
        deepen.open(tmp_path / "split").load()


def test_adapters_stay_outside_of_experts(llama: Checkpoint, tmp_path: Path) -> None:
    from deepen.train.select import linears

    model = moefied(llama, layers=[1]).load()
    inside = [name for name in linears(model, ["model.layers.1."]) if "mlp" in name]
    assert inside == []
    assert any("mlp" in name for name in linears(model, ["model.layers.2."]))
    feed(model, 1).gate_proj = torch.nn.Sequential(feed(model, 1).gate_proj)
    with pytest.raises(FamilyError, match="a Sequential stands in a feed-forward of experts"):
        output_of(model, tiny_inputs(model, tokens=4))


@pytest.mark.slow
def test_all_experts_of_a_real_model_are_the_whole(tmp_path: Path) -> None:
    ck = deepen.open(smollm2_gguf())
    whole, _ = deepen.moefy(ck, experts=12, active=12, by="weights", router="similarity")
    model, split = ck.load(dtype="float32"), whole.load(dtype="float32")
    ids = tiny_inputs(model, tokens=24)
    assert off(output_of(split, ids), output_of(model, ids)) < 1e-5
    torch.manual_seed(0)
    reads = torch.randn(20, 576)
    for index in range(30):
        dense: Any = layer(model, index)
        with torch.no_grad():
            assert off(feed(split, index)(reads), dense.layer.mlp(reads)) < 1e-5
    # A quarter of the neurons is another model, and a trained router chooses better than chance.
    data = deepen.feed_inputs(ck, shakespeare_text()[:20000], tokens=1024)
    made, told = deepen.moefy(ck, experts=12, active=3, data=data, layers=[10, 20])
    assert 1.3 * 3 / 12 < told.figures["recall"] <= told.figures["oracle"]
    assert off(output_of(made.load(dtype="float32"), ids), output_of(model, ids)) > 1e-3
