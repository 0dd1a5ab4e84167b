"""Parametrisations: identities of the factors, initial values, and what does not go together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepen.checkpoint.stack_weights import save_stack
from deepen.errors import FamilyError, UsageError
from deepen.registry import methods
from deepen.stack.config import StackConfig
from deepen.stack.init_report import Initial, init_report
from deepen.stack.parametrisation import WITHOUT_DEPTH, Kind, Place, Record, Scale, places, records
from deepen.stack.parametrisations.completep import CompleteP
from deepen.stack.parametrisations.depth_mup import DepthMuP
from deepen.stack.parametrisations.meta_principled import MetaPrincipled, strength
from deepen.stack.stack import Stack

SIZE = {"layers": 4, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 32, "context": 16}
TOKENS = torch.arange(12).view(2, 6) % 32
RULES = [each.name for each in methods("parametrisation")]
LOOP = "0 (1-2)*3 3"


def stack(parametrisation: Any = "standard", **more: Any) -> Stack:
    return Stack(StackConfig.read({**SIZE, "parametrisation": parametrisation, **more})).double()


def logits(model: Stack) -> torch.Tensor:
    return model(TOKENS).logits


def outputs(model: Stack) -> list[str]:
    return [name for name, place in places(model).items() if place.kind == "output"]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("program", [None, LOOP])
@pytest.mark.parametrize(
    "parametrisation",
    [
        pytest.param({"name": "depth-mup"}, marks=pytest.mark.method("depth-mup")),
        pytest.param({"name": "depth-mup", "optimiser": "sgd"}, marks=pytest.mark.method("depth-mup")),
        pytest.param({"name": "completep"}, marks=pytest.mark.method("completep")),
        pytest.param({"name": "completep", "alpha": 0.7}, marks=pytest.mark.method("completep")),
        pytest.param({"name": "meta-principled", "s": 0.3}, marks=pytest.mark.method("meta-principled")),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_nothing_changes_at_the_base(parametrisation: dict[str, Any], program: str | None) -> None:
    """The base depth counts the turns of loops."""
    base = {**parametrisation}
    if parametrisation["name"] != "meta-principled":
        base["base_depth"] = 8 if program else 4
    if parametrisation.get("optimiser") != "sgd":
        base["base_width"] = 16
    model, plain = stack(base, tied=False, program=program), stack(init="normal", tied=False, program=program)
    assert set(records(model).values()) == {Record()}
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.method("depth-mup")
@pytest.mark.method("completep")
@pytest.mark.parametrize("program", [None, LOOP, "0 {1|2} 3"])
@pytest.mark.parametrize(
    ("parametrisation", "exponent", "a"),
    [({"name": "depth-mup", "a": 1.5}, 0.5, 1.5), ({"name": "completep", "alpha": 0.8}, 0.8, 1.0)],
)
def test_the_factor_of_branches_is_one_of_output_matrices(
    parametrisation: dict[str, Any], exponent: float, a: float, program: str | None
) -> None:
    more: dict[str, Any] = {"program": program, "tied": False}
    model = stack({**parametrisation, "base_depth": 2}, **more)
    plain = stack(init="normal", **more)
    unrolled = 8 if program == LOOP else 4
    with torch.no_grad():
        for name in outputs(plain):
            plain.get_parameter(name).mul_(a * (unrolled / 2) ** -exponent)
    assert apart(logits(model), logits(plain)) < 1e-13
    assert apart(logits(model), logits(stack(init="normal", **more))) > 1e-3


@pytest.mark.method("layernorm-scaling")
def test_layernorm_scaling_is_one_of_the_norms_before_branches() -> None:
    model, plain = stack("layernorm-scaling"), stack()
    with torch.no_grad():
        for block in (1, 2, 3, 4):
            for part in "af":
                plain.get_parameter(f"layers.{block - 1}.{part}.norm.weight").div_(math.sqrt(block))
    assert apart(logits(model), logits(plain)) < 1e-13
    assert apart(logits(model), logits(stack())) > 1e-3


@pytest.mark.method("layernorm-scaling")
def test_turns_of_a_loop_are_blocks_of_their_own() -> None:
    looped = stack("layernorm-scaling", layers=1, program="0*3")
    plain = stack("layernorm-scaling", layers=3)
    for layer in plain.layers:
        layer.load_state_dict(looped.layers[0].state_dict())
    plain.load_state_dict({**plain.state_dict(), "embedding.weight": looped.embedding.weight})
    assert torch.equal(logits(looped), logits(plain))


@pytest.mark.method("completep")
def test_the_width_part_of_completep() -> None:
    """Four times the base width: hidden matrices begin at half the deviation, logits are divided by 4."""
    wide = {"name": "completep", "base_width": 4, "base_depth": 4}
    model, plain = stack(wide, tied=False), stack(init="normal", tied=False)
    for name, factor in (
        ("layers.1.a.sublayer.qkv", 2),
        ("layers.1.f.sublayer.down", 2),
        ("embedding", 1),
        ("head", 1),
    ):
        assert torch.equal(model.get_parameter(f"{name}.weight") * factor, plain.get_parameter(f"{name}.weight")), name
    result = model(TOKENS)
    assert apart(result.logits, result.stream @ model.head.weight.T / 4) < 1e-13


@pytest.mark.method("completep")
def test_the_table_of_completep() -> None:
    rule = CompleteP(Scale(width=64, depth=24), alpha=0.75, base_depth=3, base_width=16)
    rate, branch = 8**-0.25, 8**-0.75
    expected: dict[Kind, Record] = {
        "matrix": Record(init=0.5, lr=rate / 4, weight_decay=4, eps=branch / 4),
        "output": Record(init=0.5, forward=branch, lr=rate / 4, weight_decay=4, eps=branch / 4),
        "vector": Record(lr=rate, eps=branch / 4),
        "norm": Record(lr=rate, eps=branch / 4),
        "embedding": Record(eps=1 / 4),
        "final": Record(eps=1 / 4),
        "head": Record(forward=1 / 4),
    }
    for kind, record in expected.items():
        assert vars(rule.record(Place(kind=kind, block=1))) == pytest.approx(vars(record)), kind
    constant = CompleteP(Scale(width=64, depth=24), base_depth=3)
    assert {constant.record(Place(kind=kind, block=1)).lr for kind in expected} == {1.0}


@pytest.mark.method("depth-mup")
def test_the_rates_of_depth_mup_are_those_of_the_optimiser() -> None:
    scale, place = Scale(width=8, depth=16), Place(kind="output", block=1)
    assert DepthMuP(scale, a=2, base_depth=4).record(place) == Record(forward=1.0, lr=0.5, eps=0.5)
    assert DepthMuP(scale, a=2, base_depth=4, optimiser="sgd").record(place) == Record(forward=1.0)


@pytest.mark.method("depth-mup")
def test_initial_values_do_not_depend_on_depth() -> None:
    short, long = stack("depth-mup"), stack("depth-mup", layers=9)
    for one, other in zip(short.layers, long.layers, strict=False):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    more: dict[str, Any] = {"init": "small", "width": 64, "hidden": 64}
    sizes = [logits_input(stack("depth-mup", layers=layers, **more)) for layers in (2, 8, 32)]
    plain = [logits_input(stack(layers=layers, **more)) for layers in (2, 8, 32)]
    assert max(sizes) / min(sizes) < 1.5
    assert plain[-1] / plain[0] > 2


def logits_input(model: Stack) -> float:
    """The size of the last stream, before the final norm."""
    sizes: list[float] = []
    model.on_site(lambda site, what, x: sizes.append(x.square().mean().sqrt().item()) if what == "stream" else None)
    model(TOKENS)
    return sizes[-1]


def by_name(model: Stack) -> dict[tuple[int | None, str], Initial]:
    return {(row.layer, row.name): row for row in init_report(model)}


@pytest.mark.method("ds-init")
def test_deviations_of_ds_init() -> None:
    model = Stack(StackConfig(layers=3, width=256, heads=8, parametrisation={"name": "ds-init", "a": 0.5}))
    rows = by_name(model)
    for block in (1, 2, 3):
        for name in ("q", "k", "v", "out"):
            row = rows[block - 1, f"a.sublayer.{name}.weight"]
            assert row.expected == pytest.approx(0.02 * 0.5 / math.sqrt(block), rel=1e-6)
            assert row.measured == pytest.approx(row.expected, rel=0.02)
        assert rows[block - 1, "f.sublayer.up.weight"].measured == pytest.approx(0.01 / math.sqrt(block), rel=0.02)
    assert rows[None, "embedding.weight"].expected == pytest.approx(0.02, rel=1e-6)


def test_the_report_shows_which_kinds_a_recipe_or_wiring_changes() -> None:
    """Queries and keys are those of the recipe; DeepNorm's beta is (8 L)^(-1/4)."""
    beta = 32**-0.25
    scaled = by_name(Stack(StackConfig(layers=4, width=256, heads=8, kv_heads=2)))
    deepnorm = by_name(Stack(StackConfig(layers=4, width=256, heads=8, kv_heads=2, init="normal", wiring="deepnorm")))
    expected = {"q": (1, 1), "k": (1, 1), "v": (1, beta), "out": (8**-0.5, beta)}
    for name, (by_recipe, by_wiring) in expected.items():
        for rows, factor in ((scaled, by_recipe), (deepnorm, by_wiring)):
            row = rows[2, f"a.sublayer.{name}.weight"]
            assert row.expected == pytest.approx(0.02 * factor, rel=1e-6), name
            assert row.measured == pytest.approx(row.expected, rel=0.02), name


def test_the_report_knows_copies_and_leaves_the_stack_alone() -> None:
    model = stack("ds-init", program="0 1!zero 2!rand 3", tied=False, positions="learned")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    rows = init_report(model)
    zero = model.written.keys.index(next(key for key, kind in model.written.inits.items() if kind == "zero"))
    found = {(row.layer, row.name): (row.expected, row.measured) for row in rows}
    assert found[zero, "a.sublayer.out.weight"] == (0, 0)
    assert found[zero, "a.sublayer.q.weight"][0] > 0
    assert {name for layer, name in found if layer is None} == {"embedding.weight", "positions.weight", "head.weight"}
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_each_parameter_is() -> None:
    more = {"qk_norm": True, "bias": True, "tied": False, "wiring": "layer-scale", "program": "0 (1-2)*2 3"}
    found = places(stack(norm="layer", **more))
    expected: dict[str, Place] = {
        "embedding.weight": Place(kind="embedding"),
        "layers.1.a.norm.weight": Place(kind="norm", block=2),
        "layers.1.a.norm.bias": Place(kind="vector", block=2),
        "layers.3.a.sublayer.qkv.weight": Place(kind="matrix", block=6),
        "layers.3.a.sublayer.q_norm.weight": Place(kind="vector", block=6),
        "layers.0.f.sublayer.up.weight": Place(kind="matrix", block=1),
        "layers.2.f.sublayer.down.weight": Place(kind="output", block=3),
        "layers.2.f.sublayer.down.bias": Place(kind="vector", block=3),
        "wiring.gains": Place(kind="vector"),
        "norm.weight": Place(kind="final"),
        "head.weight": Place(kind="head"),
    }
    assert {name: found[name] for name in expected} == expected


def test_blocks_are_pairs_of_sites_whichever_visits_they_belong_to() -> None:
    model = stack("layernorm-scaling", program="0.a 0.f 1 2.f 3.f", bias=True)
    divided = [model.rule.factors(site)[0] ** -2 for own in model.sites for site in own]
    assert divided == pytest.approx([1, 1, 2, 2, 3, 3])
    found = places(model)
    assert found["layers.1.f.sublayer.up.weight"] == Place(kind="matrix", block=2)
    assert found["layers.3.f.sublayer.down.weight"] == Place(kind="output", block=3)
    assert {place.kind for name, place in found.items() if name.endswith("bias")} == {"vector"}


@pytest.mark.parametrize("wiring", sorted(WITHOUT_DEPTH))
def test_a_second_factor_of_depth_is_refused(wiring: str) -> None:
    for rule in ("depth-mup", "completep", "ds-init", "layernorm-scaling"):
        with pytest.raises(UsageError, match=f"stack: the parametrisation {rule} does not go with the wiring {wiring}"):
            stack(rule, wiring=wiring)
    stack("standard", wiring=wiring)


@pytest.mark.parametrize("wiring", sorted({each.name for each in methods("wiring")} - {*WITHOUT_DEPTH}))
def test_other_wirings_take_a_factor(wiring: str) -> None:
    """A factor of 0 takes every branch out, so that depth does not matter."""
    model = stack({"name": "depth-mup", "a": 1e-30}, wiring=wiring)
    assert model(TOKENS).logits.isfinite().all()
    updates: list[torch.Tensor] = []
    model.on_site(lambda site, what, x: updates.append(x) if what == "update" else None)
    model(TOKENS)
    assert len(updates) == 8
    assert max(update.abs().max().item() for update in updates) < 1e-20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parametrisation": "depth-mop"}, "no parametrisation 'depth-mop' .did you mean 'depth-mup'"),
        ({"parametrisation": {"name": "completep", "aplha": 1}}, "has no option 'aplha' .did you mean 'alpha'"),
        ({"parametrisation": {"name": "completep", "alpha": 2}}, "parametrisation.alpha: got 2, must be <= 1"),
        ({"parametrisation": "depth-mup", "init": "gpt2"}, "init gpt2 does not go with the parametrisation depth-mup"),
        ({"parametrisation": "completep", "init": "small"}, "init small does not go with .*; use init normal"),
        ({"parametrisation": "layernorm-scaling", "wiring": "post-ln"}, "post-ln, which has no norm before its branch"),
        ({"parametrisation": {"name": "depth-mup", "optimiser": "sgd", "base_width": 8}}, "leave base_width out"),
        ({"parametrisation": "meta-principled"}, "use tied: false"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stack(**fields)


def test_the_configuration_keeps_the_rule_and_takes_its_recipe() -> None:
    config = StackConfig.read({**SIZE, "parametrisation": {"name": "completep", "base_depth": 2}})
    assert config.init == "normal"
    assert StackConfig.read({**SIZE, "parametrisation": "layernorm-scaling"}).init == "gpt2"
    assert StackConfig.read(config.model_dump(mode="json")) == config
    assert StackConfig.read(config.model_dump(exclude_unset=True)) == config
    assert StackConfig.read({**SIZE, "parametrisation": {"name": "standard"}}).parametrisation == "standard"


def test_a_family_without_factors_is_no_place_for_them(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="llama cannot express parametrisation = 'depth-mup'"):
        save_stack(stack("depth-mup"), tmp_path / "out", "llama")
    assert not list(tmp_path.iterdir())


@pytest.mark.method("meta-principled")
@pytest.mark.parametrize("s", [0.0, 0.5, 1.0])
def test_a_step_of_sgd_in_the_meta_principled_family(s: float) -> None:
    """Width 64 to 512: the function moves by a constant, hidden values by width^((s - 1) / 2)."""
    widths = (64, 512)
    moved = [one_step(width, s) for width in widths]
    functions, hidden = (
        (math.log(last) - math.log(first)) / math.log(widths[-1] / widths[0])
        for first, last in zip(moved[0], moved[-1], strict=True)
    )
    assert abs(functions) < 0.1
    assert abs(hidden - (s - 1) / 2) < 0.1
    assert strength(8, 64, s) * 64 ** (1 - s) == 8


def one_step(width: int, s: float) -> tuple[float, float]:
    """The change of the output and of the second hidden layer of a network of tanh after a step of SGD."""
    rule = MetaPrincipled(Scale(width=width, depth=1, tied=False), s=s, base_width=1)
    kinds: tuple[Kind, ...] = ("embedding", "matrix", "head")
    generator = torch.Generator().manual_seed(0)
    functions, hidden = [], []
    for _ in range(16):
        maps = [nn.Linear(8, width, bias=False), nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False)]
        found = [rule.record(Place(kind=kind, block=1)) for kind in kinds]
        for map_, record in zip(maps, found, strict=True):
            nn.init.normal_(map_.weight, std=record.init, generator=generator)
        x = torch.randn(8, generator=generator)

        def forward(maps: list[nn.Linear] = maps, x: torch.Tensor = x) -> tuple[torch.Tensor, torch.Tensor]:
            z = maps[1](maps[0](x / math.sqrt(8)).tanh())
            return z, maps[2](z.tanh())

        groups: Any = [{"params": [m.weight], "lr": 0.01 * r.lr} for m, r in zip(maps, found, strict=True)]
        before, output = forward()
        # a loss of slope 1 at any output
        output.sum().backward()
        torch.optim.SGD(groups).step()
        after, changed = forward()
        functions.append((changed - output).square().mean())
        hidden.append((after - before).square().mean())
    return torch.stack(functions).mean().sqrt().item(), torch.stack(hidden).mean().sqrt().item()


@pytest.mark.method("standard")
def test_the_standard_parametrisation_multiplies_nothing() -> None:
    assert set(records(stack(tied=False)).values()) == {Record()}
    assert stack().rule.factors(stack().sites[3][1]) == (1.0, 1.0)
    assert {"standard", "depth-mup", "completep"} <= {*RULES}
