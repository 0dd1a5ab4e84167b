"""The executor of native stacks: what a program means in it, caches, gradients, hooks, weights."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
from torch import nn

from deepen.errors import ProgramError, UsageError
from deepen.program import Program
from deepen.program.site import Site
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from tests.laws.programs import random_program

TOKENS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def stack(program: str | None = None, *, seed: int = 0, **fields: object) -> Stack:
    """A small stack in fp64 whose parameters are all moved from their initial values."""
    sizes: dict[str, object] = {"layers": 4, "width": 16, "heads": 4, "kv_heads": 2, "vocabulary": 50}
    made = Stack(StackConfig.read({**sizes, "program": program, **fields}), seed=seed).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return made


def same_layers(program: str, like: Stack, **fields: object) -> Stack:
    """A stack of another program over the bank of `like`, whose program visits every layer of it in order."""
    made = stack(program, **fields)
    for child, key in enumerate(made.written.keys):
        made.layers[child].load_state_dict(like.layers[key.layer].state_dict())
    for name in ("embedding", "norm", "wiring", "head"):
        getattr(made, name).load_state_dict(getattr(like, name).state_dict())
    return made


def logits(model: Stack, tokens: torch.Tensor = TOKENS, **more: object) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **more).logits  # pyright: ignore[reportArgumentType]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(0-1)*2 2-3", "0-1 0-1 2-3"),
        ("0-3 (1-2)*0", "0-3"),
        ("{0-1} 2-3", "0-3"),
        ("0 {1|_} 2-3", "0-3"),
        ("0 {1|2} 3", "0 {2|1} 3"),
        ("0 (1-2)[scale=1] 3", "0-3"),
        ("0-3 (1-2)[scale=0]", "0-3"),
        ("0.a 0.f 1-3", "0-3"),
        ("0-3 2!zero", "0-3"),
        ("0 1! 2-3", "0-3"),
        ("0-3 ?e", "0-3"),
    ],
)
def test_programs_that_mean_the_same(one: str, other: str) -> None:
    model = stack("0-3")
    first, second = (same_layers(program, model) for program in (one, other))
    # a copy of 0 or of another layer holds what its layer holds
    for made in (first, second):
        for child, key in enumerate(made.written.keys):
            if made.written.inits.get(key) == "zero":
                for part in (made.layers[child].a.sublayer.out, made.layers[child].f.sublayer.down):
                    nn.init.zeros_(part.weight)
    assert apart(logits(first), logits(second)) < 1e-12


def test_a_group_adds_the_updates_of_its_branches() -> None:
    model = stack("0-3")
    state = model.embedding(TOKENS)
    _, pass_ = model._begin(TOKENS, None, 0, None)
    alone = [model._visit(visit, state, pass_)[0] - state for visit in model.plan.visits[:2]]
    group = same_layers("{0|1}", model)
    assert apart(group(TOKENS).logits, group.head(group.norm(state + alone[0] + alone[1]))) < 1e-12
    mean = same_layers("{0|1}[comb=mean]", model)
    assert apart(mean(TOKENS).logits, mean.head(mean.norm(state + (alone[0] + alone[1]) / 2))) < 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_cached_equals_uncached_for_random_programs(seed: int) -> None:
    model = stack(
        random_program(Random(seed), 4), seed=seed, qk_norm=bool(seed % 2), window=3 if seed % 3 == 0 else None
    )
    whole, cache = logits(model), model.new_cache(2)
    pieces = [logits(model, piece, cache=cache) for piece in TOKENS.split([4, 1, 1, 3], dim=1)]
    assert apart(torch.cat(pieces, dim=1), whole) < 1e-12
    assert cache.length == 9


@pytest.mark.parametrize(
    "program",
    [
        "0 (1-2)*3[kv=first] 3",
        "0[kv=x] 1 2[kv=x] 3",
        "0 (1-2)*2[kv=cyc:2] 3",
        "0 (1-2)*2[lora=2,emb,norm,gate=token] 3",
        "0 @e (1)*2[inject=e:concat,gate=vector] 2-3",
    ],
)
def test_cached_equals_uncached_with_attributes(program: str) -> None:
    model = stack(program)
    cache = model.new_cache()
    pieces = [logits(model, piece, cache=cache) for piece in TOKENS.split([5, 1, 2, 1], dim=1)]
    assert apart(torch.cat(pieces, dim=1), logits(model)) < 1e-12


def test_slots_that_turns_overwrite_drift() -> None:
    """kv=last is another model when cached; equal results would mean that the turns have slots of their own."""
    model = stack("0 (1-2)*2[kv=last] 3")
    cache = model.new_cache()
    pieces = [logits(model, piece, cache=cache) for piece in TOKENS.split(3, dim=1)]
    assert apart(torch.cat(pieces, dim=1), logits(model)) > 1e-3


def test_kv_first_runs_queries_alone_in_later_turns() -> None:
    model, own = stack("0 (1-2)*2[kv=first] 3"), stack("0 (1-2)*2 3")
    assert (model.plan.slots, own.plan.slots) == (4, 6)
    assert apart(logits(model), logits(own)) > 1e-3


def test_a_cropped_cache_goes_on_from_there() -> None:
    model = stack("0 (1-2)*2 3")
    cache = model.new_cache()
    logits(model, TOKENS, cache=cache)
    cache.crop(4)
    assert apart(logits(model, TOKENS[:, 4:], cache=cache), logits(model)[:, 4:]) < 1e-12
    with pytest.raises(UsageError, match="holds 9 tokens"):
        cache.crop(10)


def test_padding_changes_nothing() -> None:
    model = stack("0 (1-2)*2 3", window=4)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), TOKENS], dim=1)
    valid = torch.cat([torch.zeros(2, 3, dtype=torch.bool), torch.ones_like(TOKENS, dtype=torch.bool)], dim=1)
    assert apart(logits(model, padded, valid=valid)[:, 3:], logits(model)) < 1e-12
    cache = model.new_cache()
    first = logits(model, padded[:, :6], valid=valid[:, :6], cache=cache)
    assert apart(torch.cat([first, logits(model, padded[:, 6:], cache=cache)], dim=1)[:, 3:], logits(model)) < 1e-12


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
@pytest.mark.parametrize("causal", [True, False])
def test_what_a_token_sees(positions: str, causal: bool) -> None:
    model = stack(None, positions=positions, causal=causal, norm="layer", feed_forward="gelu", bias=True, qkv_bias=True)
    changed = TOKENS.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 50
    moved = (logits(model, changed) - logits(model)).abs().amax((0, 2)) > 1e-9
    assert moved.tolist() == [not causal or place >= 6 for place in range(9)]


def test_a_window_ends_what_a_token_sees() -> None:
    model = stack("0", layers=1, window=3)
    changed = TOKENS.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 50
    moved = (logits(model, changed) - logits(model)).abs().amax((0, 2)) > 1e-9
    assert moved.tolist() == [2 <= place < 5 for place in range(9)]


@pytest.mark.parametrize("program", ["0-3", "0 (1-2)*2 3", "{0|1} (2)[scale=1/2] 3", "0 (1-2)*2[lora=2,emb] 3"])
@pytest.mark.parametrize("wiring", ["pre-ln", "hyper-connections"])
def test_gradient_checkpointing_gives_equal_gradients(program: str, wiring: str) -> None:
    model = stack(program, wiring=wiring).train()
    found = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        model(TOKENS).logits.square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_shared_layer_gets_the_sum_of_the_gradients_of_its_turns() -> None:
    looped = stack("0 (1)*3 2")
    untied = same_layers("0 1 1! 1! 2", looped)
    for model in (looped, untied):
        model(TOKENS).logits.square().mean().backward()
    copies = [dict(untied.layers[child].named_parameters()) for child in (1, 2, 3)]
    for name, parameter in looped.layers[1].named_parameters():
        total = sum(copy_[name].grad for copy_ in copies)
        assert apart(parameter.grad, total) < 1e-12 * max(1, total.abs().max().item())


def test_turns_before_the_last_k_carry_no_gradient() -> None:
    cut, whole = stack("0 (1)*3[grad=1] 2"), stack("0 (1)*3 2")
    assert apart(logits(cut), logits(whole)) == 0
    cut(TOKENS).logits.square().mean().backward()
    assert cut.layers[0].a.sublayer.qkv.weight.grad is None
    # What is left is the gradient of the last turn alone, its input held fixed.
    alone = same_layers("0 1 1 1! 2", whole)
    alone(TOKENS).logits.square().mean().backward()
    last = dict(alone.layers[2].named_parameters())
    assert all(apart(parameter.grad, last[name].grad) < 1e-12 for name, parameter in cut.layers[1].named_parameters())
    kept = stack("0 (1)*3[grad=3] 2")
    kept(TOKENS).logits.square().mean().backward()
    assert kept.layers[0].a.sublayer.qkv.weight.grad is not None


def test_training_the_adapter_of_one_turn_changes_no_other() -> None:
    model = stack("0 (1-2)*2[lora=2] 3")
    # two layers, two linear maps in each of two parts, two turns, and A and B for each
    assert len(dict(model.owned.named_parameters())) == 2 * 4 * 2 * 2
    seen: list[torch.Tensor] = []
    away = model.on_site(lambda site, what, x: seen.append(x) if what == "stream" and site.visit == 2 else None)
    logits(model)
    before = [x.clone() for x in seen]
    with torch.no_grad():
        for name, parameter in model.owned.named_parameters():
            if name.split(".")[2] == "1":
                parameter += 1
    seen.clear()
    changed = logits(model)
    away()
    assert all(torch.equal(one, other) for one, other in zip(before, seen, strict=True))
    assert apart(changed, logits(stack("0 (1-2)*2[lora=2] 3"))) > 1e-3


@pytest.mark.parametrize("attribute", ["lora=2", "emb", "gate=scalar", "gate=vector", "inject=e:concat"])
def test_attributes_that_change_nothing_at_first(attribute: str) -> None:
    fields = {"layers": 4, "width": 16, "heads": 4, "vocabulary": 50}
    plain = Stack(StackConfig.read({**fields, "program": "0 (1-2)*2 3"}), seed=3).double()
    made = Stack(StackConfig.read({**fields, "program": f"0 @e (1-2)*2[{attribute}] 3"}), seed=3).double()
    assert apart(logits(made), logits(plain)) < 1e-12
    assert sum(parameter.numel() for parameter in made.parameters()) > sum(p.numel() for p in plain.parameters())


def test_hooks_see_every_site_and_may_change_what_is_written() -> None:
    model = stack("0 (1)*2 2.f")
    calls: list[tuple[int, str, str]] = []

    def watch(site: Site, what: str, x: torch.Tensor) -> torch.Tensor | None:
        calls.append((site.visit, site.part, what))
        return torch.zeros_like(x) if what == "update" and site.visit == 1 else None

    away = model.on_site(watch)
    changed = logits(model)
    away()
    sites = [(0, "a"), (0, "f"), (1, "a"), (1, "f"), (2, "a"), (2, "f"), (3, "f")]
    assert calls == [(visit, part, what) for visit, part in sites for what in ("read", "update", "stream")]
    assert apart(changed, logits(same_layers("0-1 2.f", model))) < 1e-12
    assert apart(logits(model), changed) > 1e-3


def test_run_time_loops() -> None:
    model = stack("0 (1-2)*1..3 3")
    for turns in (1, 2, 3):
        assert apart(logits(model, counts={0: turns}), logits(same_layers(f"0 (1-2)*{turns} 3", model))) < 1e-12
    with pytest.raises(ProgramError, match="takes 1 to 3"):
        model(TOKENS, counts={0: 4})
    cache = model.new_cache()
    logits(model, TOKENS[:, :4], cache=cache, counts={0: 2})
    assert apart(logits(model, TOKENS[:, 4:], cache=cache), logits(model, counts={0: 2})[:, 4:]) < 1e-12
    with pytest.raises(UsageError, match="start a new cache"):
        model(TOKENS[:, :1], cache=cache, counts={0: 3})


def test_drawn_counts_are_used_in_training_alone() -> None:
    model = stack("(0)*1..6[draw=uniform] 1")
    torch.manual_seed(0)
    model.train()
    seen = set()
    for _ in range(30):
        visits: list[int] = []
        away = model.on_site(lambda site, what, x, visits=visits: visits.append(site.visit))
        model(TOKENS)
        away()
        seen.add(len(set(visits)) - 1)
    assert seen == set(range(1, 7))
    model.eval()
    assert apart(logits(model), logits(model, counts={0: 6})) == 0


def test_marks_give_streams_and_exits_logits() -> None:
    model = stack("0 @early 1 ?main 2-3 ?late")
    result = model(TOKENS)
    shorter = same_layers("0-1", model)
    assert apart(result.logits, logits(shorter)) < 1e-12
    assert set(result.marks) == {"early", "main", "late"}
    assert apart(model.exit(result.marks, "late"), logits(same_layers("0-3", model))) < 1e-12
    with pytest.raises(UsageError, match="no mark 'nope'"):
        model.exit(result.marks, "nope")


def test_copies_become_layers_and_the_stored_program_says_so() -> None:
    model = Stack(StackConfig(layers=3, program="0 1! 1 2!zero", width=16, heads=4), seed=0)
    assert (model.config.layers, model.config.program) == (4, "0-3")
    assert torch.equal(model.layers[1].a.sublayer.qkv.weight, model.layers[2].a.sublayer.qkv.weight)
    assert model.layers[1].a.sublayer.qkv.weight.data_ptr() != model.layers[2].a.sublayer.qkv.weight.data_ptr()
    assert not model.layers[3].f.sublayer.down.weight.any()
    again = Stack(model.config, seed=1)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_the_seed_decides_the_initial_values() -> None:
    states = [stack("0 (1)*2[lora=2] 2").state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    Stack(StackConfig(layers=1, width=8, heads=1), seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("0-4", "layer 4 does not exist"),
        ("0-3[res=1/2]", "does not execute 'res'"),
        ("0 (1)[cap=1/2] 2", "does not execute 'cap'"),
        ("0 (1)*2[kv=mean] 2", "kv=mean"),
        ("{0|1}[comb=gate]", "comb=gate"),
        ("0-2 ?e[conf=0.9] 3", "'conf' of an exit"),
    ],
)
def test_what_no_stack_executes_is_refused(program: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        stack(program)


def test_deep_copies_are_apart() -> None:
    model = stack("0 (1-2)*2 3")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert logits(model).abs().max() > 0
    assert Program.parse(model.config.program or "") == Program.parse("0 (1-2)*2 3")
