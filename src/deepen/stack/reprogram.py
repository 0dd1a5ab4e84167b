"""Another program for a trained stack: what each of its parameters becomes.

    shorter, report = reprogram(stack, "0-3 6-7")
    deeper, report = reprogram(stack, "0-2 (3-4)*3 5-7", constants="keep")

Layers, embedding, norms and head are carried, and of the wiring what belongs to sites that survive: the n-th run of a
part of a layer is the same site in both programs. A visit survives with all its parts. Copies begin as their layer and
have sites of their own. What is new has the initial values of the wiring; a new source of a surviving visit has the
weight 0 where weights add up. The report names all of it.

Some wirings and parametrisations have constants that follow from depth, such as alpha of DeepNorm. Where the program
changes what they count, `constants` decides: `keep` those of the trained model, for which a new site takes the place of
the surviving one before it, or `rescale` to those of the new program, along with trained values that began at such a
constant. Neither is right by itself, so without a choice the change is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from deepen.errors import UsageError
from deepen.program import Program
from deepen.program.site import Depth, Site
from deepen.program.tree import Key
from deepen.stack.init import silence
from deepen.stack.stack import Stack
from deepen.wiring.entries import FIXED, SITE, SOURCE, VISIT, Entries, Label

WORDS = {"ranks": "the places of sites", "places": "the places of visits", "rounds": "how often layers run"}


@dataclass(frozen=True, kw_only=True)
class Reprogrammed:
    """What became of a stack.

    Attributes:
        sites: sites of the new program.
        survived: how many of them the old program has too.
        carried: parameters of the wiring and the program that are carried whole.
        partly: those that have new entries beside the carried ones.
        new: those that have their initial values, layers of `!rand` copies among them.
        gone: parameters of the old stack of which nothing is left.
        constants: what was done to constants of depth; None where none changes.
    """

    sites: int
    survived: int
    carried: tuple[str, ...]
    partly: tuple[str, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    constants: str | None

    def __str__(self) -> str:
        lines = [f"{self.survived} of {self.sites} sites survive"]
        for what in ("partly", "new", "gone"):
            if names := getattr(self, what):
                lines.append(f"{what}: {', '.join(names)}")
        return "\n".join([*lines, *([f"constants of depth: {self.constants}"] if self.constants else [])])


@torch.no_grad()
def reprogram(
    stack: Stack,
    program: str | Program,
    *,
    constants: Literal["keep", "rescale"] | None = None,
    seed: int | None = 0,
) -> tuple[Stack, Reprogrammed]:
    """A stack that runs another program over the layers of this one, which stays as it is.

    Args:
        stack: the trained stack.
        program: over its bank, whose layers are those of `stack.config.program`.
        constants: what to do where constants that follow from depth change.
        seed: of what is new.

    Raises:
        ProgramError: a program that does not fit the layers or the wiring.
        UsageError: constants of depth change and no choice is made.
    """
    config = stack.config.model_copy(update={"program": str(program), "depth": None})
    made = Stack(config, seed)
    pairs = _pairs(stack, made)
    before, kept = stack.wiring.shape.depth, _kept(stack, made, pairs)
    changed = list(_changed(made, before, kept))
    if changed and constants is None:
        raise UsageError(
            f"{changed[0]}; choose constants='keep' for those of the trained stack, or constants='rescale' for those "
            "of the new program"
        )
    if changed and constants == "keep":
        made = Stack(config.model_copy(update={"depth": kept}), seed)
    factors = made.wiring.rescaled(before) if changed and constants == "rescale" else {}
    weight = next(stack.parameters())
    made = made.to(weight.device, weight.dtype).train(stack.training)
    made.checkpointing = stack.checkpointing
    random = _carry_layers(stack, made, factors)
    carried, partly, new, used = _carry_wiring(stack, made, pairs, factors)
    return made, Reprogrammed(
        sites=len(made.wiring.shape.sites),
        survived=len(pairs),
        carried=carried,
        partly=partly,
        new=(*random, *new),
        gone=tuple(f"wiring.{name}" for name in stack.wiring.entries() if name not in used),
        constants=constants if changed else None,
    )


def _pairs(old: Stack, new: Stack) -> dict[int, int]:
    """The sites of the new stack that the old one has too, by their indices."""
    known = dict(_runs(old.wiring.shape.sites, [Key(layer) for layer in range(len(old.layers))]))
    runs = _runs(new.wiring.shape.sites, new.written.keys)
    return {index: known[place] for place, index in runs if place in known}


def _runs(sites: Sequence[Site], keys: Sequence[Key]) -> Iterator[tuple[tuple[Key, str, int], int]]:
    """Each site as the n-th run of a part of a layer, the layers called by these keys; and its index."""
    times: Counter[tuple[Key, str]] = Counter()
    for site in sites:
        place = keys[site.key.layer], site.part
        yield (*place, times[place]), site.index
        times[place] += 1


def _kept(old: Stack, new: Stack, pairs: Mapping[int, int]) -> Depth:
    """What constants of depth count when they stay those of the old stack."""
    before, own = old.wiring.shape.depth, new.wiring.shape.depth
    rounds = {(site.key.layer, site.part): before.rounds[site.index] for site in old.wiring.shape.sites}
    # the place of each site there; a new one has that of the surviving one before it
    origins, origin = [], 0
    for site in new.wiring.shape.sites:
        origin = pairs.get(site.index, origin)
        origins.append(origin)
    times = tuple(
        rounds.get((new.written.keys[site.key.layer].layer, site.part), own.rounds[site.index])
        for site in new.wiring.shape.sites
    )
    ranks, places = (tuple(of[origin] for origin in origins) for of in (before.ranks, before.places))
    return Depth(before.blocks, before.layers, before.visits, ranks, places, times)


def _changed(new: Stack, before: Depth, kept: Depth) -> Iterator[str]:
    """What has constants that the new program changes, in words."""
    own, factors = new.wiring.shape.depth, new.wiring.rescaled(before)
    wiring, rule = new.config.wiring_options[0], new.config.parametrisation_options[0]
    reasons = {field: f"the wiring {wiring}: {words}" for field, words in new.wiring.constants().items()}
    if factors and all(factor == 1 for factor in factors.values()):
        reasons = {}
    if new.rule.deep:
        words = f"the parametrisation {rule}: its factors follow from depth"
        reasons = {"blocks": words, "ranks": words, **reasons}
    for field, words in reasons.items():
        if getattr(own, field) != getattr(kept, field):
            change = f", from {getattr(kept, field):g} to {getattr(own, field):g}" if field not in WORDS else ""
            yield f"{words}, and the program changes {WORDS.get(field, f'the number of {field}')}{change}"


def _carry_layers(old: Stack, new: Stack, factors: Mapping[str, float]) -> list[str]:
    """Copies all but wiring and program; returns the names of layers with random values."""
    random = []
    values = old.state_dict()
    for name, tensor in new.state_dict(keep_vars=True).items():
        if not name.startswith(("layers.", "wiring.", "owned.")):
            tensor.copy_(values[name])
    for index, (layer, key) in enumerate(zip(new.layers, new.written.keys, strict=True)):
        init = new.written.inits.get(key)
        if init == "rand":
            random.append(f"layers.{index}")
            continue
        layer.load_state_dict(old.layers[key.layer].state_dict())
        for name, parameter in layer.named_parameters():
            parameter *= factors.get(name, 1.0)
        if init == "zero":
            silence(layer)
    return random


class _Translation:
    """Labels of the new stack as those of the old one."""

    def __init__(self, old: Stack, new: Stack, pairs: Mapping[int, int]) -> None:
        visits = {site.index: site.visit for site in old.wiring.shape.sites}
        whole: dict[int, set[int]] = {}
        for index, visit in visits.items():
            whole.setdefault(visit, set()).add(index)
        found: dict[int, set[int | None]] = {}
        for site in new.wiring.shape.sites:
            found.setdefault(site.visit, set()).add(pairs.get(site.index))
        same: dict[frozenset[int | None], int] = {frozenset(parts): visit for visit, parts in whole.items()}
        # a visit is the same when all its parts are
        by_visit = {visit: same[frozenset(parts)] for visit, parts in found.items() if frozenset(parts) in same}
        sources = {0: 0, **{visit + 1: before + 1 for visit, before in by_visit.items()}}
        self.tables: dict[str, Mapping[int, int]] = {SITE: pairs, VISIT: by_visit, SOURCE: sources}

    def __call__(self, label: Label) -> Label | None:
        """The label there, None where the old stack has no such thing."""
        kind, number, *rest = label
        if kind == FIXED:
            return label
        place = self.tables[str(kind)].get(int(number))
        return None if place is None else (kind, place, *rest)


def _carry_wiring(
    old: Stack, new: Stack, pairs: Mapping[int, int], factors: Mapping[str, float]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], set[str]]:
    """Copies what the wiring and the program own; names of what is carried whole, partly, not; old names used."""
    translate, values = _Translation(old, new, pairs), old.state_dict()
    theirs, ours = old.wiring.entries(), new.wiring.entries()
    places = {(each.group, each.owner): name for name, each in theirs.items()}
    carried, partly, missing, used = [], [], [], set()
    sites = len(new.wiring.shape.sites)
    unchanged = len(old.wiring.shape.sites) == sites and pairs == dict(enumerate(range(sites)))
    for name, tensor in new.wiring.state_dict(keep_vars=True).items():
        entries = ours.get(name)
        if entries is None:
            # a step of training; a parameter of a wiring that does not say where it belongs
            if unchanged or not isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(values[f"wiring.{name}"])
            else:
                missing.append(f"wiring.{name}")
            continue
        owner = None if entries.owner is None else translate(entries.owner)
        source = None if owner is None and entries.owner is not None else places.get((entries.group, owner))
        if source is None:
            missing.append(f"wiring.{name}")
            continue
        used.add(source)
        share = _copy(tensor, values[f"wiring.{source}"] * factors.get(name, 1.0), entries, theirs[source], translate)
        (carried if share == 1 else partly if share else missing).append(f"wiring.{name}")
    same = _owns_the_same(old, new, pairs)
    for name, tensor in new.owned.state_dict(keep_vars=True).items():
        if same:
            tensor.copy_(values[f"owned.{name}"])
        (carried if same else missing).append(f"owned.{name}")
    return tuple(carried), tuple(partly), tuple(missing), used


def _owns_the_same(old: Stack, new: Stack, pairs: Mapping[int, int]) -> bool:
    """Whether both programs own the same sets in the same places, adapters at the same sites."""
    adapters = {site.index: visit.lora for visit in old.plan.visits for site in old.sites[visit.index]}
    return old.plan.owned == new.plan.owned and all(
        visit.lora is None or adapters.get(pairs.get(site.index, -1)) == visit.lora
        for visit in new.plan.visits
        for site in new.sites[visit.index]
    )


def _copy(
    tensor: torch.Tensor, value: torch.Tensor, entries: Entries, theirs: Entries, translate: _Translation
) -> float:
    """Copies the entries that both have; returns which share of the tensor they are."""
    to: list[torch.Tensor] = []
    from_: list[torch.Tensor] = []
    for axis, size in enumerate(tensor.shape):
        labels = entries.axes[axis] if axis < len(entries.axes) else None
        held = theirs.axes[axis] if axis < len(theirs.axes) else None
        if labels is None or held is None:
            found = [(place, place) for place in range(size)]
        else:
            known = {label: place for place, label in enumerate(held)}
            moved = [(place, translate(label)) for place, label in enumerate(labels)]
            found = [(place, known[label]) for place, label in moved if label in known]
        to.append(torch.tensor([place for place, _ in found], dtype=torch.long, device=tensor.device))
        from_.append(torch.tensor([place for _, place in found], dtype=torch.long, device=tensor.device))
    if entries.fresh is not None:
        tensor.fill_(entries.fresh)
    tensor[torch.meshgrid(*to, indexing="ij")] = value[torch.meshgrid(*from_, indexing="ij")]
    return math.prod(len(places) for places in to) / tensor.numel()
