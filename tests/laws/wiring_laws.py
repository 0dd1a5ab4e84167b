"""The laws of wirings as functions: each takes a case and a program, and fails where a wiring breaks the law.

Models are tiny, in double precision, with norms of eps = 0 and random gains, and weights large enough that every
branch matters. `at_first` has the initial values of the wiring, `changed` random ones.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import nn

from deepen.errors import ProgramError
from deepen.program import Program, Run
from deepen.registry import lookup
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.stack.table import require
from tests.laws.programs import random_program

DEPTH, WIDTH, VOCABULARY = 3, 16, 29
PLAIN, LOOPED, GROUP = "0-2", "0 (1-2)*2", "0 {1|2} 0"
# A stretch of a program for each feature: a wiring refuses it, or every law holds with all of these in one program.
FEATURES = {
    "loop": "(1)*2",
    "n..m": "(1-2)*1..2",
    "group": "{1 2|1|_}[comb=mean]",
    "scale": "(1)[scale=1/2]",
    "gate": "(1)[gate=scalar] (2)[gate=token] (1)[gate=vector]",
    "entry": "(2)[emb,norm]",
    "inject": "(2)[inject=e] (1)[inject=e:concat]",
    "lora": "1[lora=2]",
    "kv": "(2)*2[kv=first]",
}
# What owns parameters that change nothing at first, and the same without them.
NEUTRAL = {"gate": "(1)[gate=scalar] (2)[gate=vector]", "entry": "(2)[emb]", "inject": "(1)[inject=e:concat]"}
NEUTRAL["lora"] = "1[lora=2]"
BARE = {"gate": "1 2", "entry": "2", "inject": "1", "lora": "1"}
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """A wiring with options; `equal` says whether it then equals Pre-LN at first."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    equal: bool = False

    @property
    def kind(self) -> Any:
        return lookup(self.name).implementation

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])


CASES = (
    Case("attention-residuals", equal=True),
    Case("attention-residuals", {"block": 2}, equal=True),
    Case("cross-layer-attention"),
    Case("cross-layer-attention", {"share": 1}, equal=True),
    Case("cross-layer-attention", {"share": 3}),
    Case("deep-cross-attention", equal=True),
    Case("deep-cross-attention", {"keep": 1}, equal=True),
    Case("deep-delta", {"start": 0.5}),
    Case("deep-delta", {"value": "linear"}),
    Case("deep-delta", {"value": "sigmoid"}),
    Case("deep-delta-matrix", {"start": 1.5}),
    Case("deep-delta-matrix", {"values": 2}),
    Case("deeploop"),
    Case("deeploop", {"p": 0.25}),
    Case("deepnorm"),
    Case("deepnorm", {"side": "encoder", "others": 6}),
    Case("denseformer", equal=True),
    Case("denseformer", {"period": 2, "dilation": 2}, equal=True),
    Case("depth-scaled-sandwich"),
    Case("depth-scaled-sandwich", {"attention": 1.0, "feed_forward": 1.0}),
    Case("elc-bert"),
    Case("elc-bert", {"variant": "zero", "weighted_output": True}),
    Case("elc-bert", {"variant": "normalized"}),
    Case("highway"),
    Case("highway", {"bias": 0.5}),
    Case("hyper-connections", equal=True),
    Case("hyper-connections", {"streams": 3}, equal=True),
    Case("hyper-connections", {"streams": 2, "dynamic": False}, equal=True),
    Case("identity-hyper-connections", equal=True),
    Case("identity-hyper-connections", {"streams": 2, "readout": "sum"}, equal=True),
    Case("layer-drop", equal=True),
    Case("layer-drop", {"drop": 0.5}, equal=True),
    Case("layer-scale"),
    Case("layer-scale", {"value": 1.0}, equal=True),
    Case("lime"),
    Case("lime", {"past": "zero"}, equal=True),
    Case("looped-scaling", {"strength": 2.0}),
    Case("manifold-hyper-connections", equal=True),
    Case("manifold-hyper-connections", {"streams": 2, "iters": 5, "readout": "sum"}, equal=True),
    Case("orthogonal-hyper-connections", equal=True),
    Case("orthogonal-hyper-connections", {"readout": "sum"}, equal=True),
    Case("moda"),
    Case("moda", {"feed_forward": False, "rotated": False}),
    Case("muddformer", equal=True),
    Case("muddformer", {"ways": 1}, equal=True),
    Case("post-ln"),
    Case("pre-ln", equal=True),
    Case("prores"),
    Case("prores", {"schedule": "stagewise-L", "base": 400}),
    Case("random-cross-layer-attention", equal=True),
    Case("random-cross-layer-attention", {"p_cross": 0.9, "keep": (0, 2)}),
    Case("rezero"),
    Case("rezero", {"per": "site"}),
    Case("sandwich"),
    Case("short-swa", equal=True),
    Case("short-swa", {"window": 3}, equal=True),
    Case("skipinit"),
    Case("stochastic-depth", equal=True),
    Case("stochastic-depth", {"last": 0.8, "form": "paper", "per": "batch"}),
    Case("vertical-attention"),
)


def options(name: str) -> set[str]:
    """What a wiring takes beside its shape."""
    return set(list(inspect.signature(lookup(name).implementation).parameters)[1:])


def carried(kind: Any, text: str) -> bool:
    """Whether the wiring carries the program."""
    try:
        require(Program.parse(text).plan(DEPTH, ["af"] * DEPTH), "it", kind)
    except ProgramError:
        return False
    return True


def at_first(case: Case, program: str | None, **settings: Any) -> Stack:
    """A stack with random layers, and the wiring as it begins."""
    fields: dict[str, Any] = {
        "layers": DEPTH,
        "width": WIDTH,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 24,
        "vocabulary": VOCABULARY,
    }
    fields |= {"window": (None, 4, None), "eps": 0.0, "context": 64, **settings}
    wiring = {"name": case.name, **case.options}
    stack = Stack(StackConfig(program=program, wiring=wiring, **fields)).double().eval()
    # what grows over training is on its way
    stack.wiring.set_step(1500)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer_parameters(stack):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            norm = ".norm." in name or ".after." in name or name.startswith("norm.") or "_norm." in name
            if norm and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise if name.startswith("embedding") else 0.3 * noise)
    return stack


def changed(case: Case, program: str | None, **settings: Any) -> Stack:
    """The same with random parameters of the wiring and of the program."""
    stack = at_first(case, program, **settings)
    generator = torch.Generator().manual_seed(2)
    # Without norms a stream grows as a power of its depth, and the last update would be all that counts.
    spread = 0.3 if case.kind.before or case.kind.after else 0.1
    with torch.no_grad():
        for parameter in (*stack.wiring.parameters(), *stack.owned.parameters()):
            parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return stack


def layer_parameters(stack: Stack) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters but those of the wiring and of the program."""
    for name, parameter in stack.named_parameters():
        if not name.startswith(("wiring.", "owned.")):
            yield name, parameter


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert bool(b.isfinite().all())
    difference = float((a - b).abs().max() / b.abs().max())
    assert difference < tolerance, f"relative difference {difference:.2e}"


@torch.no_grad()
def equals_pre_ln(case: Case, program: str, **settings: Any) -> None:
    """b: at first it is the Pre-LN model of the same layers, with the same parameters of the program."""
    stack, plain = at_first(case, program, **settings), at_first(Case("pre-ln"), program, **settings)
    state = {name: value for name, value in stack.state_dict().items() if not name.startswith("wiring.")}
    plain.load_state_dict(state)
    ids = tokens()
    close(stack(ids).logits, plain(ids).logits)


def every_parameter_learns(case: Case, program: str) -> None:
    """c: each parameter of the layers and each row of a parameter of the wiring has a gradient, but for the dead."""
    stack = changed(case, program)
    ids = tokens(3, 9)
    nn.functional.cross_entropy(stack(ids).logits.flatten(0, 1), ids.roll(-1, dims=1).flatten()).backward()
    sizes: dict[str, float] = {}
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        if not name.startswith("wiring."):
            sizes[name] = float(parameter.grad.abs().max())
            continue
        rows = parameter.grad.reshape(len(parameter), -1).abs().amax(-1)
        for index, size in enumerate(rows.tolist()):
            sizes[f"{name.removeprefix('wiring.')}.{index}|{name.removeprefix('wiring.')}.{index - len(rows)}"] = size
    largest = max(sizes.values())
    for names, size in sizes.items():
        dead = any(fnmatch(name, pattern) for name in names.split("|") for pattern in case.kind.dead)
        if dead:
            assert size < 1e-12 * largest, f"{names} is declared dead, but its gradient is {size:.2e}"
        else:
            assert size > 1e-10 * largest, f"{names} has no gradient"


def gradients_are_right(case: Case, program: str) -> None:
    """d: moving the parameters of the wiring changes the output by as much as their gradients say."""
    stack = changed(case, program)
    ids = tokens(1, 5)
    direction = torch.randn(1, 5, VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def value() -> torch.Tensor:
        return (stack(ids).logits * direction).sum()

    value().backward()
    parameters = list(stack.wiring.parameters())
    generator = torch.Generator().manual_seed(4)
    steps = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in parameters]
    expected = 0.0
    for each, step in zip(parameters, steps, strict=True):
        assert each.grad is not None
        expected += float((each.grad * step).sum())
    measured, reach = 0.0, 1e-6
    with torch.no_grad():
        for sign in (1, -1):
            for each, step in zip(parameters, steps, strict=True):
                each += sign * reach * step
            measured += sign * float(value()) / (2 * reach)
            for each, step in zip(parameters, steps, strict=True):
                each -= sign * reach * step
    assert bool(parameters) == (abs(expected) > 1e-8)
    assert abs(measured - expected) < 1e-4 * max(1.0, abs(expected)), f"{measured} and {expected}"


@torch.no_grad()
def cached_equals_uncached(case: Case, program: str) -> None:
    """e: tokens in pieces over a cache give the logits of one pass."""
    stack = changed(case, program)
    ids = tokens(2, 11)
    whole = stack(ids).logits
    cache = stack.new_cache(room=4)
    pieces = [stack(piece, cache=cache).logits for piece in ids.split([3, 1, 2, 1, 4], dim=1)]
    close(torch.cat(pieces, dim=1), whole)


def random_programs(kind: Any, seed: int, count: int) -> list[str]:
    """Random programs that the wiring carries."""
    dice = Random(seed)
    drawn = (random_program(dice, DEPTH) for _ in range(400))
    return list(islice((text for text in drawn if carried(kind, text)), count))


def recomputed_equals_kept(case: Case, program: str) -> None:
    """A visit that is computed again in the backward pass, as checkpointing does, gives the same gradients."""
    recomputed(changed(case, program))


def recomputed(stack: Stack) -> None:
    """The same stack with checkpointing and without, in training."""
    stack = stack.train()
    other = copy.deepcopy(stack)
    other.checkpointing = True
    totals = []
    for model in (stack, other):
        # the same draws where something is drawn in training
        torch.manual_seed(6)
        result = model(tokens())
        totals.append(result.logits.square().mean() + sum(result.losses.values()))
        totals[-1].backward()
    assert torch.equal(*totals)
    for (name, kept), again in zip(stack.named_parameters(), other.parameters(), strict=True):
        if not kept.requires_grad:
            continue
        assert kept.grad is not None
        assert again.grad is not None
        assert float((kept.grad - again.grad).abs().max()) <= 1e-12 * float(kept.grad.abs().max()), name


@torch.no_grad()
def saved_equals_loaded(case: Case, program: str) -> None:
    """f: configuration and state make the same model again, bit for bit."""
    stack = changed(case, program)
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    config = StackConfig.read(stack.config.model_dump())
    loaded = Stack(config, seed=5).double().eval()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(tokens()).logits, stack(tokens()).logits)


@torch.no_grad()
def counts_are_right(case: Case, program: str) -> None:
    """i: as many sites run as the tape has, each once and in order; as many slots are filled as the plan has."""
    stack = changed(case, program)
    seen: list[int] = []
    remove = stack.on_site(lambda site, what, tensor: seen.append(site.index) if what == "update" else None)
    cache = stack.new_cache()
    stack(tokens(), cache=cache)
    remove()
    visits = [op.visit for op in stack.plan.tape() if isinstance(op, Run)]
    assert seen == list(range(sum(len(visit.parts) for visit in visits)))
    assert sum(keys is not None for keys in cache.keys) == stack.plan.slots == len({visit.slot for visit in visits})


@torch.no_grad()
def batches_are_independent(case: Case, program: str) -> None:
    """j: a sequence has the same logits in any company, at any place, and with padding before it, cached or not."""
    stack = changed(case, program)
    ids = tokens(3, 8)
    together = stack(ids).logits
    close(stack(ids[[2, 0, 1]]).logits, together[[2, 0, 1]])
    close(stack(ids[1:2]).logits, together[1:2])
    short = ids[1:2, 3:]
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, :3] = False
    alone = stack(short).logits
    close(stack(ids, valid=valid).logits[1:2, 3:], alone)
    cache = stack.new_cache()
    pieces = [stack(ids[:, :5], cache=cache, valid=valid[:, :5]).logits]
    pieces += [stack(ids[:, [place]], cache=cache).logits for place in (5, 6, 7)]
    close(torch.cat(pieces, dim=1)[1:2, 3:], alone)


@torch.no_grad()
def no_position_sees_a_later_one(case: Case, program: str) -> None:
    """l: changing a token leaves the logits before it as they were, and changes those from it on."""
    stack = changed(case, program)
    ids = tokens(1, 8)
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    before, after = stack(ids).logits, stack(other).logits
    close(after[:, :4], before[:, :4], 1e-13)
    assert bool(((after - before).abs().amax(-1)[:, 4:] > 1e-8).all())


def compiled_equals_eager(case: Case, program: str) -> None:
    """k: a compiler's trace of the whole model gives the same logits and gradients."""
    traced(changed(case, program))


def traced(stack: Stack) -> None:
    """The same stack compiled and not; parameters without a gradient have none in both."""
    other = copy.deepcopy(stack)
    ids = tokens(1, 4)
    torch.compiler.reset()
    compiled: Any = torch.compile(other, backend="aot_eager", fullgraph=True)
    expected, found = stack(ids).logits, compiled(ids).logits
    close(found.detach(), expected.detach())
    for logits in (expected, found):
        logits.square().mean().backward()
    for (name, one), two in zip(stack.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None and two.grad is not None:
            assert float((one.grad - two.grad).abs().max()) < 1e-8, name


@torch.no_grad()
def half_precision_is_near(case: Case, program: str) -> None:
    """k: in bfloat16 the error is at most four times that of bfloat16 parameters in double precision.

    Each product rounds its output once more than it rounds its parameters, and some norms and sums round beside.
    """
    stack = changed(case, program)
    ids = tokens(4, 12)
    exact = stack(ids).logits
    stack = stack.to(torch.bfloat16)
    found, of_parameters = stack(ids).logits.double(), stack.double()(ids).logits
    error, allowed = (float((logits - exact).square().mean().sqrt()) for logits in (found, of_parameters))
    assert error < 4 * allowed, f"the error is {error / allowed:.1f} times that of the parameters"


@torch.no_grad()
def owned_parameters_begin_neutral(case: Case, feature: str) -> None:
    """What a program owns changes nothing at first: adapters, gates of 1, embeddings of 0, joints of weight 0."""
    owning, bare = (changed(case, f"0 @e {text[feature]} 2") for text in (NEUTRAL, BARE))
    owning.owned.reset()
    close(owning(tokens()).logits, bare(tokens()).logits)
    for parameter in owning.owned.parameters():
        parameter += 0.5
    assert float((owning(tokens()).logits - bare(tokens()).logits).abs().max()) > 1e-6


def all_features(kind: Any) -> str:
    """A program with everything that a wiring carries."""
    return " ".join(["0 @e", *(text for name, text in FEATURES.items() if name not in kind.refuses), "0"])
