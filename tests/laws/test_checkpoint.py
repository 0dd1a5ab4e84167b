"""The laws of DESIGN over random programs on tiny models: a, e, f, g, h, i, j, k, l, and the meaning of a program."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.family import Family, known_families
from deepen.checkpoint.layer_cost import layer_costs
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import DeepenError, ProgramError
from deepen.program import Ends, Key, Loop, Program
from deepen.program import cost as plan_cost
from deepen.program.format import format_node
from deepen.program.tree import Node, rebuild
from deepen.sublayers.owned import Joined, Lora, TokenFactor
from tests.laws.programs import random_program
from tests.laws.semantics import with_meaning

ARCHITECTURES = ("llama", "gemma2", "gpt2", "gpt_neox", "qwen3_moe", "opt", "mamba", "bart")
# One mask for all layers, so that `Meaning` can pass on the one it is given.
ONE_MASK = ("llama", "gpt2", "gpt_neox", "qwen3_moe")
TOY = 1e-5
CACHED = 2e-4
PROGRAMS = 4


class Case:
    """A tiny model on disk, its checkpoint and some inputs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.model = tiny_checkpoint(folder, name)
        self.checkpoint: Checkpoint = deepen.open(folder)
        self.family: Family = known_families()[name]
        self.tower = self.family.towers[-1]
        self.inputs = tiny_inputs(self.model, tokens=16)
        self.depth = self.checkpoint.depth[self.tower.name]
        self.prefix = f"{self.tower.name}: " if len(self.family.towers) > 1 else ""

    def program(self, seed: int, **kinds: bool) -> str:
        parts = self.tower.parts
        allowed = {
            "parts": parts.kind in ("serial", "parallel"),
            "zero": not parts.post_norm,
            "kv": parts.kind != "single",
        }
        return self.prefix + random_program(Random(seed), self.depth, **{**allowed, **kinds})

    def run(self, program: str) -> torch.Tensor:
        return output_of(self.checkpoint.apply(program).load(), self.inputs)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("laws") / request.param)


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    return (one - two).abs().max().item() / max(1.0, two.abs().max().item())


def test_a_identity_is_the_original_bit_for_bit(case: Case) -> None:
    assert torch.equal(output_of(case.checkpoint.load(), case.inputs), output_of(case.model, case.inputs))


@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.parametrize("case", ONE_MASK, indirect=True, scope="module")
def test_program_means_its_tree(case: Case, seed: int) -> None:
    text = case.program(seed, kv=False)
    tree = Program.parse(text).tree()
    meant = with_meaning(case.model, case.tower.container, tree, case.tower.parts, {case.tower.depth: 1})
    with torch.no_grad():
        expected = meant(**case.inputs, use_cache=False).logits
    assert difference(case.run(text), expected) <= TOY, text


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_e_cached_is_uncached(case: Case, seed: int) -> None:
    text = case.program(100 + seed)
    model = case.checkpoint.apply(text).load()
    full = output_of(model, case.inputs)
    assert difference(step_by_step(model, case.inputs, 5), full) <= CACHED, text


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_f_save_and_load_is_exact(case: Case, seed: int, tmp_path: Path) -> None:
    text = case.program(200 + seed)
    changed = case.checkpoint.apply(text)
    told = changed.save(tmp_path / "saved")
    again = deepen.open(tmp_path / "saved")
    assert torch.equal(output_of(again.load(), case.inputs), output_of(changed.load(), case.inputs)), text
    assert "!" not in json.dumps(json.loads((tmp_path / "saved/config.json").read_text()).get("program", "")), told


@pytest.mark.parametrize("seed", range(2))
def test_g_drop_and_put_back_is_the_identity(case: Case, seed: int) -> None:
    identity = case.checkpoint.program
    there = case.checkpoint.apply(case.program(300 + seed))
    assert torch.equal(output_of(there.apply(identity).load(), case.inputs), output_of(case.model, case.inputs))


@pytest.mark.parametrize("seed", range(3))
def test_h_untying_keeps_the_outputs(case: Case, seed: int) -> None:
    text = case.program(400 + seed, kv=False).removeprefix(case.prefix)

    def untie(node: Node) -> Node:
        node = rebuild(node, untie)
        if isinstance(node, Loop) and node.low == node.high > 1 and not node.fresh:
            return Loop(node.body, node.low, node.high, fresh=True, attrs=node.attrs)
        return node

    text = text.replace("1..2", "2")
    untied = format_node(untie(Program.parse(text).tree()))
    assert torch.equal(case.run(case.prefix + untied), case.run(case.prefix + text)), (text, untied)


# The two towers of BART see different tokens, so one count a token does not measure them.
@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.parametrize("case", [name for name in ARCHITECTURES if name != "bart"], indirect=True, scope="module")
def test_i_counted_cost_is_measured(case: Case, seed: int) -> None:
    text = case.program(500 + seed)
    checkpoint = case.checkpoint.apply(text)
    model = checkpoint.load()
    tokens = case.inputs["input_ids"].shape[1]
    cost, plan = checkpoint.cost(tokens), checkpoint.plan()
    visits, flops = [0], [0.0]
    bank = model.get_submodule(checkpoint.skeleton.container(case.tower))
    for layer in bank.children():
        layer.register_forward_hook(lambda *_: visits.__setitem__(0, visits[0] + 1))

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        flops[0] += 2.0 * weight.numel() * (args[0].numel() // args[0].shape[-1]) / args[0].shape[:-1].numel()

    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)) and case.name not in ("qwen3_moe", "mamba"):
            module.register_forward_hook(count)
    with torch.no_grad():
        out = model(**case.inputs, use_cache=plan.slots > 0)
    assert visits[0] == cost.visits == len(plan.visits), text
    assert cost.params == sum(parameter.numel() for parameter in model.parameters()), text
    cache = out.get("cache", out.get("past_key_values", out.get("cache_params")))
    if plan.slots:
        assert len(cache.layers) == cost.slots == plan.slots, text
        assert sum(_bytes(layer) for layer in cache.layers) == cost.cache_bytes * case.inputs["input_ids"].shape[0], (
            text
        )
    if case.name not in ("qwen3_moe", "mamba"):
        layers = layer_costs(checkpoint, case.tower)
        mixers = [layers[visit.key.layer] for visit in plan.visits if "a" in visit.parts]
        attention = sum(layer.flops_per_key * layer.keys(tokens) for layer in mixers)
        assert flops[0] == pytest.approx(cost.flops - attention, rel=1e-9), text


def _bytes(layer: object) -> int:
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for name in ("conv_states", "recurrent_states"):
        tensors += (getattr(layer, name, None) or {}).values()
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def test_j_samples_do_not_touch_each_other(case: Case) -> None:
    model = case.checkpoint.apply(case.program(600)).load()
    together = output_of(model, case.inputs)
    alone = torch.cat(
        [output_of(model, {name: value[row : row + 1] for name, value in case.inputs.items()}) for row in (0, 1)]
    )
    assert difference(together, alone) <= TOY


@pytest.mark.parametrize("seed", range(3))
def test_l_no_position_sees_a_later_one(case: Case, seed: int) -> None:
    model = case.checkpoint.apply(case.program(700 + seed)).load()
    name = "decoder_input_ids" if "decoder_input_ids" in case.inputs else "input_ids"
    changed = case.inputs[name].clone()
    changed[:, 12:] = (changed[:, 12:] + 7) % 90 + 4
    before, after = output_of(model, case.inputs), output_of(model, {**case.inputs, name: changed})
    assert difference(after[:, :12], before[:, :12]) <= TOY
    assert difference(after[:, 12:], before[:, 12:]) > 1e-3


def test_shared_layer_gets_the_sum_of_the_gradients_of_its_clones(case: Case) -> None:
    shared = case.checkpoint.apply(f"{case.prefix}0 (1)*3 2").load()
    untied = case.checkpoint.apply(f"{case.prefix}0 (1)*!3 2").load()
    gradients = []
    for model in (shared, untied):
        out = model(**case.inputs, use_cache=False)
        (out.logits if "logits" in out else out.last_hidden_state).float().pow(2).mean().backward()
        bank = model.get_submodule(case.checkpoint.skeleton.container(case.tower))
        gradients.append([{name: p.grad for name, p in child.named_parameters()} for child in bank.children()])
    # The untied bank holds 0, 1, 1!1, 1!2, 2 in order of first use.
    for name, gradient in gradients[0][1].items():
        if gradient is not None:
            total = sum(gradients[1][copy][name] for copy in (1, 2, 3))
            assert torch.allclose(gradient, total, rtol=1e-4, atol=1e-5 * gradient.abs().max().item()), name


def test_copies_own_their_memory(case: Case) -> None:
    model = case.checkpoint.apply(f"{case.prefix}0 1 1! 2").load()
    bank = model.get_submodule(case.checkpoint.skeleton.container(case.tower))
    original, clone = bank._modules["1"], bank._modules["2"]
    assert original is not None
    assert clone is not None
    before = {name: p.clone() for name, p in original.named_parameters()}
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in original.named_parameters())


# One compilation takes half a minute; the slow set compiles more.
@pytest.mark.parametrize("case", ["llama"], indirect=True, scope="module")
def test_k_compiles_whole_and_agrees(case: Case) -> None:
    torch._dynamo.reset()
    model = case.checkpoint.apply("0 {1|2.a} (3)*2[kv=first]").load()
    expected = output_of(model, case.inputs, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert difference(output_of(compiled, case.inputs, use_cache=False), expected) <= TOY


@pytest.mark.slow
@pytest.mark.parametrize("text", ["0-1 (2-3)*2 4-5", "0 {1|2} 3.a 3.f 4-5", "0 (1)*2[kv=first] 2-5", "5-0"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_k_compiles_more(name: str, text: str, backend: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path / "model")
    torch._dynamo.reset()
    model = case.checkpoint.apply(text).load()
    expected = output_of(model, case.inputs, use_cache=False)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert difference(output_of(compiled, case.inputs, use_cache=False), expected) <= TOY


def test_k_bfloat16_agrees(case: Case) -> None:
    text = f"{case.prefix}0 (1)*2 2"
    exact = case.run(text)
    rough = output_of(case.checkpoint.apply(text).load(dtype="bfloat16"), case.inputs)
    plain = difference(
        output_of(case.checkpoint.load(dtype="bfloat16"), case.inputs), output_of(case.model, case.inputs)
    )
    assert difference(rough, exact) <= max(0.1, 4 * plain)


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    case = Case("llama", tmp_path / "model")
    gradients = []
    for switch in (False, True):
        model = case.checkpoint.apply("0 (1-2)*2 {3|4} 5.a 5.f").load().train()
        if switch:
            model.activation_checkpointing_enable()
        model(**case.inputs, use_cache=False).logits.float().pow(2).mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_kv_first_refuses_gradient_checkpointing(tmp_path: Path) -> None:
    case = Case("llama", tmp_path / "model")
    model = case.checkpoint.apply("0 (1)*2[kv=first]").load().train()
    model.activation_checkpointing_enable()
    with pytest.raises(DeepenError, match="gradient checkpointing"):
        model(**case.inputs, use_cache=False)


def test_counts_change_between_generations_only(tmp_path: Path) -> None:
    case = Case("llama", tmp_path / "model")
    model = case.checkpoint.apply("0 (1-2)*0..3 3-5").load()
    for count, text in ((0, "0 3-5"), (1, "0-5"), (3, "0 (1-2)*3 3-5")):
        model.deepen.set_counts(count)
        assert torch.equal(output_of(model, case.inputs), case.run(text))
        assert difference(step_by_step(model, case.inputs, 5), case.run(text)) <= CACHED
    ids = case.inputs["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).cache
        model.deepen.set_counts(1)
        with pytest.raises(DeepenError, match="in the middle of a generation"):
            model(ids[:, 8:], cache=cache)
    with pytest.raises(ProgramError):
        model.deepen.set_counts(4)


def test_marks_hold_the_stream(tmp_path: Path) -> None:
    case = Case("llama", tmp_path / "model")
    model = case.checkpoint.apply("@start 0-2 @middle 3-5 ?end").load()
    with torch.no_grad():
        hidden = model(**case.inputs, output_hidden_states=True).hidden_states
    assert torch.equal(model.deepen.marks["start"], hidden[0])
    assert torch.equal(model.deepen.marks["middle"], hidden[3])
    assert torch.equal(model.model.norm(model.deepen.marks["end"]), hidden[-1])


OWNING = "0 @e (1-2)*2[lora=3,emb,norm,gate=token,inject=e:concat] 3.f[lora=2] (4)[gate=vector,scale=1/2] 5"


def owning(case: Case) -> PreTrainedModel:
    """A model whose program owns parameters, after each of them has moved."""
    model = case.checkpoint.apply(OWNING).load()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".owned." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox"], indirect=True, scope="module")
def test_parameters_of_the_program_keep_the_laws(case: Case, tmp_path: Path) -> None:
    model = owning(case)
    full = output_of(model, case.inputs)
    assert difference(step_by_step(model, case.inputs, 5), full) <= CACHED
    alone = [output_of(model, {name: value[row : row + 1] for name, value in case.inputs.items()}) for row in (0, 1)]
    assert difference(torch.cat(alone), full) <= TOY
    changed = case.inputs["input_ids"].clone()
    changed[:, 12:] = (changed[:, 12:] + 7) % 90 + 4
    assert difference(output_of(model, {**case.inputs, "input_ids": changed})[:, :12], full[:, :12]) <= TOY
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(output_of(deepen.open(tmp_path / "saved").load(), case.inputs), full)
    model.train()(**case.inputs, use_cache=False).logits.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if ".owned." in name}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())
    assert difference(case.run(OWNING), full) > 1e-3


@pytest.mark.parametrize("case", ["llama", "gpt2"], indirect=True, scope="module")
def test_i_parameters_of_the_program_are_counted(case: Case) -> None:
    model = owning(case)
    tokens = case.inputs["input_ids"].shape[1]
    checkpoint = case.checkpoint.apply(OWNING)
    cost = checkpoint.cost(tokens)
    flops = [0.0]

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        values = sum(each.numel() for each in module.parameters(recurse=False) if each.ndim == 2)
        values += module.weight.numel() if isinstance(module, TokenFactor) else 0
        flops[0] += 2.0 * values * (args[0].numel() // args[0].shape[-1]) / args[0].shape[:-1].numel()

    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D, Lora, Joined, TokenFactor)):
            module.register_forward_hook(count)
    output_of(model, case.inputs)
    assert cost.params == sum(parameter.numel() for parameter in model.parameters())
    plain = plan_cost(checkpoint.plan(), layer_costs(checkpoint, case.tower), Ends(params=0, flops=0.0), tokens)
    own = sum(each.numel() for name, each in model.named_parameters() if ".owned." in name)
    kept = sum(layer_costs(checkpoint, case.tower)[key.layer].params[part] for key, part in _visited(checkpoint))
    assert plain.params - kept == own
    layers = layer_costs(checkpoint, case.tower)
    mixers = [layers[visit.key.layer] for visit in checkpoint.plan().visits if "a" in visit.parts]
    attention = sum(layer.flops_per_key * layer.keys(tokens) for layer in mixers)
    assert flops[0] == pytest.approx(cost.flops - attention, rel=1e-9)


def _visited(checkpoint: Checkpoint) -> set[tuple[Key, str]]:
    return {(visit.key, part) for visit in checkpoint.plan().visits for part in visit.parts}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama"], indirect=True, scope="module")
def test_k_parameters_of_the_program_compile(case: Case) -> None:
    torch._dynamo.reset()
    model = owning(case)
    expected = output_of(model, case.inputs, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert difference(output_of(compiled, case.inputs, use_cache=False), expected) <= TOY
