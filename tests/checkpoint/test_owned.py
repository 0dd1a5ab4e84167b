"""Parameters that a program owns: names, initial values, what they compute, files, baking, training, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import deepen
import deepen.hf
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import CheckpointError, FamilyError, ProgramError, SaveError
from deepen.program import Program
from deepen.program.owned import owned
from deepen.program.stored import stored_text

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "bert", "bart", "qwen3")


def opened(folder: Path, family: str = "llama") -> Checkpoint:
    tiny_checkpoint(folder, family)
    return deepen.open(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(tmp_path_factory.mktemp("owned") / "llama")


def outputs(model: PreTrainedModel) -> torch.Tensor:
    return output_of(model, tiny_inputs(model, tokens=16))


def owned_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the program owns, by their names behind `owned.`."""
    return {name.split(".owned.")[1]: each for name, each in model.named_parameters() if ".owned." in name}


def perturb(model: nn.Module, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(owned_of(model).items()):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def trained(ck: Checkpoint, folder: Path) -> Checkpoint:
    """The checkpoint as it is after every parameter of its program has moved."""
    model = ck.load()
    perturb(model)
    model.save_pretrained(folder)
    return deepen.open(folder)


def hooked(ck: Checkpoint, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What the original model gives when `change` acts on the stream between layers 0 and 1."""
    model = ck.load()

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return change(args[0], out)

    model.get_submodule("model.layers.0").register_forward_hook(hook)
    return outputs(model)


@pytest.mark.parametrize("attrs", ["lora=3", "emb", "gate=scalar", "gate=vector", "inject=e:concat"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_set_changes_nothing(family: str, attrs: str, tmp_path: Path) -> None:
    ck = opened(tmp_path / family, family)
    name = ck.family.towers[-1].name
    prefix = f"{name}: " if len(ck.family.towers) > 1 else ""
    with_sets = ck.apply(f"{prefix}0 @e (1-2)*2[{attrs}]")
    model = with_sets.load()
    assert owned_of(model)
    plain = outputs(ck.apply(f"{prefix}0 (1-2)*2").load())
    assert (outputs(model) - plain).abs().max() <= 1e-5
    perturb(model)
    assert (outputs(model) - plain).abs().max() > 1e-3


def test_two_loads_are_equal_and_sets_differ_from_each_other(llama: Checkpoint) -> None:
    one, two = (owned_of(llama.apply("0 (1-2)*2[lora=4]").load()) for _ in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    firsts = [value for name, value in one.items() if name.endswith("q_proj.A")]
    assert len(firsts) == 4
    assert all(not torch.equal(a, b) for at, a in enumerate(firsts) for b in firsts[:at])
    bound = firsts[0].shape[1] ** -0.5
    assert firsts[0].abs().max().item() <= bound
    assert firsts[0].std().item() == pytest.approx(bound / 3**0.5, rel=0.3)


def test_a_loop_has_one_set_a_turn_and_shares_the_sets_of_its_body(llama: Checkpoint) -> None:
    def adapters(text: str) -> set[str]:
        return {name.split(".self_attn_")[0] for name in owned_of(llama.apply(text).load()) if "q_proj.A" in name}

    assert adapters("0 (1-3)*3[lora=8]") == {f"lora.{use}.{turn}" for use in range(3) for turn in range(3)}
    assert adapters("0 (1-3)[lora=8]*3") == {f"lora.{use}.0" for use in range(3)}
    assert adapters("((1)*2[lora=8])*3") == {"lora.0.0", "lora.0.1"}


@pytest.mark.parametrize(
    "text",
    [
        "0 (1-2)*2[lora=4,emb] 3[gate=vector]",
        "(5)*0[emb] 2[emb] (1)*2[norm]",
        "(0-1)*!2[lora=4,norm] 1[lora=2]",
        "(3[lora=4,gate=token])*!2 (3)*2[emb]",
        "@e 4 (2-3 (1)*2[lora=2])*2[inject=e:concat] {0[emb]|1[lora=3]}",
    ],
)
def test_names_and_shapes_stay_when_a_program_is_stored(llama: Checkpoint, text: str, tmp_path: Path) -> None:
    ck = llama.apply(text)
    plan = ck.plan()
    again = Program.parse(stored_text(plan)).plan(len(plan.keys), ["af"] * len(plan.keys))
    assert [own.name for own in plan.owned.values()] == [own.name for own in again.owned.values()]
    assert [own.name for own in owned(again.root).values()]
    ready = trained(ck, tmp_path / "trained")
    model = ck.load()
    perturb(model)
    assert torch.equal(outputs(ready.load()), outputs(model))


def test_lora_adds_its_product_to_every_matrix_of_its_turn(llama: Checkpoint) -> None:
    model = llama.apply("0 (1-2)*2[lora=3] 3").load()
    perturb(model)
    by_hand = llama.apply("0 (1-2)*!2 3").load()
    sets = owned_of(model)
    with torch.no_grad():
        for (use, turn), child in {(0, 0): 1, (1, 0): 2, (0, 1): 3, (1, 1): 4}.items():
            for path, module in by_hand.get_submodule(f"model.layers.{child}").named_modules():
                if isinstance(module, nn.Linear):
                    a, b = (sets.pop(f"lora.{use}.{turn}.{path.replace('.', '_')}.{letter}") for letter in "AB")
                    module.weight += 2 * b @ a
    assert not sets
    assert (outputs(model) - outputs(by_hand)).abs().max() <= 1e-5


def test_a_part_has_adapters_of_its_own_matrices_only(llama: Checkpoint) -> None:
    names = owned_of(llama.apply("0 1.a[lora=2] 2.f[lora=2]").load())
    assert {name.split(".")[3].split("_")[0] for name in names if name.startswith("lora.0.")} == {"self"}
    assert {name.split(".")[3].split("_")[0] for name in names if name.startswith("lora.1.")} == {"mlp"}


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


STREAM: dict[str, Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "@s 0 (1-5)[emb]": lambda own, s, x: x + own["emb.0.0.value"],
    "@s 0 (1-5)[norm]": lambda own, s, x: rms(x) * own["norm.0.0.gain"],
    "@s 0 (1-5)[inject=s]": lambda own, s, x: x + s,
    "@s 0 (1-5)[inject=s:concat]": lambda own, s, x: torch.cat((x, s), -1) @ own["inject.0.0.weight"].T,
    "@s 0 (1-5)[norm,emb]": lambda own, s, x: rms(x + own["emb.0.0.value"]) * own["norm.0.0.gain"],
    "(0)[gate=scalar] 1-5": lambda own, s, x: s + own["gate.0.0.value"] * (x - s),
    "(0)[gate=vector] 1-5": lambda own, s, x: s + own["gate.0.0.value"] * (x - s),
    "(0)[gate=vector,scale=1/2] 1-5": lambda own, s, x: s + 0.5 * own["gate.0.0.value"] * (x - s),
    "(0)[gate=token] 1-5": lambda own, s, x: (
        s + torch.sigmoid((s * own["gate.0.0.weight"]).sum(-1, keepdim=True) + own["gate.0.0.bias"]) * (x - s)
    ),
}


@pytest.mark.parametrize("text", STREAM)
def test_what_acts_on_the_stream_is_as_written(llama: Checkpoint, text: str) -> None:
    model = llama.apply(text).load()
    perturb(model, 0.5)
    own = {name: each.detach() for name, each in owned_of(model).items()}
    expected = hooked(llama, lambda s, x: STREAM[text](own, s, x))
    assert (outputs(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected - outputs(llama.load())).abs().max() > 1e-3


def test_initial_values(llama: Checkpoint) -> None:
    own = owned_of(llama.apply("@s 0[gate=token] 1[norm] 2[inject=s:concat] 3[gate=vector] 4[emb]").load())
    width = own["norm.0.0.gain"].numel()
    assert torch.equal(own["norm.0.0.gain"], torch.ones(width))
    assert torch.equal(own["gate.0.0.weight"], torch.zeros(width))
    assert own["gate.0.0.bias"].tolist() == [4.0]
    assert torch.equal(own["gate.1.0.value"], torch.ones(width))
    assert torch.equal(own["emb.0.0.value"], torch.zeros(width))
    assert torch.equal(own["inject.0.0.weight"], torch.eye(width, 2 * width))


TEXT = "0 @e (1-2)*2[lora=3,emb,norm,inject=e:concat,gate=vector] 3[gate=token,lora=2]"


def test_every_parameter_gets_a_gradient_also_with_checkpointing(llama: Checkpoint) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = llama.apply(TEXT).load().train()
        perturb(model)
        if checkpointing:
            model.activation_checkpointing_enable()
        model(**tiny_inputs(model, tokens=16), use_cache=False).logits.square().mean().backward()
        gradients.append({name: each.grad for name, each in owned_of(model).items()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


def test_training_one_turn_changes_no_other(llama: Checkpoint) -> None:
    model: Any = llama.apply("0 (1-2 ?e)*3[lora=3] 3").load()
    inputs = tiny_inputs(model, tokens=16)
    perturb(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora." in name and name.split(".lora.")[1].split(".")[1] == "1")
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    output_of(model, inputs)
    marks = dict(model.deepen.marks)
    optimizer = torch.optim.AdamW(chosen, lr=1e-2)
    model(**inputs, use_cache=False).logits.square().mean().backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".lora.0.1." in name or ".lora.1.1." in name}
    output_of(model, inputs)
    assert torch.equal(model.deepen.marks["e.0"], marks["e.0"])
    assert not torch.equal(model.deepen.marks["e.1"], marks["e.1"])


@pytest.mark.parametrize("text", [TEXT, "0 (1-2)*1..2[lora=3,emb] 3"])
def test_files_hold_them_and_transformers_loads_them(llama: Checkpoint, text: str, tmp_path: Path) -> None:
    ck = trained(llama.apply(text), tmp_path / "one")
    told = ck.save(tmp_path / "two")
    assert told.form == "native"
    assert not told.computed
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert torch.equal(outputs(auto), outputs(ck.load()))
    fresh = llama.apply(text).save(tmp_path / "fresh")
    assert torch.equal(outputs(deepen.open(tmp_path / "fresh").load()), outputs(llama.apply(text).load())), fresh


def test_damaged_files_are_refused_by_the_name_of_the_tensor(llama: Checkpoint, tmp_path: Path) -> None:
    trained(llama.apply("0 (1)*2[lora=3] 2[emb]"), tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    whole = load_file(path)
    name = "model.layers.owned.lora.0.1.mlp_up_proj.B"
    for damage, message in (
        ({key: value for key, value in whole.items() if key != name}, f"the tensor {name} is missing"),
        ({**whole, name: whole[name][:3].clone()}, rf"{name} has the shape \[3, 3\]"),
        ({**whole, "model.layers.owned.emb.7.0.value": torch.zeros(2)}, r"owned.emb.7.0.value belongs to nothing"),
    ):
        save_file(damage, path, metadata={"format": "pt"})
        for action in (lambda: deepen.open(tmp_path / "model").load(), lambda: deepen.open(tmp_path / "model").cost()):
            with pytest.raises(CheckpointError, match=message):
                action()


def test_another_program_starts_anew_and_says_what_it_leaves_out(llama: Checkpoint, tmp_path: Path) -> None:
    ck = trained(llama.apply("0 (1)*2[lora=3] 2"), tmp_path / "model")
    other = ck.apply("0 (1)*2 2[lora=3]")
    assert torch.equal(outputs(other.load()), outputs(ck.apply("0 (1)*2 2").load()))
    told = other.changes()
    for notes in (told.notes, other.changes(bake=True).notes, ck.apply("0-2").changes().notes):
        assert any("28 tensors that belong to the program 0 1*2[lora=3] 2 are left out" in note for note in notes)
    assert sum(".owned." in name for name in told.dropped) == 28
    back = other.apply("0 (1)*2[lora=3] 2")
    assert torch.equal(outputs(back.load()), outputs(ck.load()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_baking_folds_adapters_into_each_visit(family: str, tmp_path: Path) -> None:
    ck = trained(
        opened(tmp_path / family, family).apply("0 (1-2)*2[lora=3,kv=own] 3.f[lora=2,scale=1/2]"), tmp_path / "t"
    )
    told = ck.save(tmp_path / "baked", bake=True)
    assert told.form == "baked"
    assert "visit 3: the adapters lora.0.1 are folded into layer 1" in told.notes
    baked = AutoModelForCausalLM.from_pretrained(tmp_path / "baked")
    assert (outputs(baked) - outputs(ck.load())).abs().max() <= 1e-4
    assert not owned_of(baked)


def test_baking_leaves_out_what_changes_nothing_and_refuses_the_rest(llama: Checkpoint, tmp_path: Path) -> None:
    fresh = llama.apply("0 @e (1)[emb,gate=vector,inject=e:concat] 2")
    told = fresh.save(tmp_path / "fresh", bake=True)
    assert "emb at visit 1 (layer 1) changes nothing and is left out" in told.notes
    assert torch.equal(outputs(deepen.open(tmp_path / "fresh").load()), outputs(llama.apply("0-2").load()))
    for attrs, visit in (("norm", "visit 1"), ("gate=token", "visit 1"), ("inject=e", "visit 1")):
        with pytest.raises(SaveError, match=rf"bake: {attrs.split('=')[0]} at {visit} \(layer 1\) changes the stream"):
            llama.apply(f"0 @e (1)[{attrs}] 2").save(tmp_path / "no", bake=True)
    for attrs in ("emb", "gate=scalar", "inject=e:concat"):
        ck = trained(llama.apply(f"0 @e (1)[{attrs}] 2"), tmp_path / attrs)
        with pytest.raises(SaveError, match=r"at visit 1 \(layer 1\) changes the stream"):
            ck.save(tmp_path / "no", bake=True)
    assert not (tmp_path / "no").exists()


# of peft's own call, which this version of transformers has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_of_peft_on_the_layers_works_beside_them(llama: Checkpoint) -> None:
    model = llama.apply("0 (1)*2[lora=3] 2").load()
    before = outputs(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["up_proj"], r=2, init_lora_weights=False))
    assert not any(".owned." in name and each.requires_grad for name, each in adapted.named_parameters())
    inputs = tiny_inputs(model, tokens=16)
    alone = llama.apply("0 (1)*2 2").load()
    twin = get_peft_model(alone, LoraConfig(target_modules=["up_proj"], r=2, init_lora_weights=False))
    twin.load_state_dict({name: value for name, value in adapted.state_dict().items() if ".owned." not in name})
    with torch.no_grad():
        got, expected = (each(**inputs).logits for each in (adapted, twin))
    assert (got - expected).abs().max() <= 1e-5
    assert (got - before).abs().max() > 1e-3


def test_refusals(llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"lora=99 on layer 1: no matrix has this rank; expected at most"):
        llama.apply("0 1[lora=99]").load()
    with pytest.raises(ProgramError, match="'norm' is not executed"):
        llama.apply("0 ?e[norm=own] 1").load()
    with pytest.raises(FamilyError, match="stacks the matrices of its experts"):
        opened(tmp_path / "moe", "qwen3_moe").apply("0 1[lora=2]").load()
    with pytest.raises(FamilyError, match="its kernels read matrices without calling their maps"):
        opened(tmp_path / "mamba", "mamba").apply("0 1[lora=2]").changes()


def test_half_precision(llama: Checkpoint, tmp_path: Path) -> None:
    ck = trained(llama.apply(TEXT), tmp_path / "model")
    exact, rough = outputs(ck.load()), outputs(ck.load(dtype="bfloat16"))
    plain = llama.apply("0 (1-2)*2 3")
    usual = (outputs(plain.load()) - outputs(plain.load(dtype="bfloat16"))).abs().mean()
    assert (exact - rough).abs().mean() <= 4 * usual
    told = ck.save(tmp_path / "half", dtype="BF16")
    stored = load_file(tmp_path / "half/model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}, told
