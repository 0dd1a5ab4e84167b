"""Examines a family: builds a tiny model and compares every operation with models made by hand.

Each operation ends as `right`, `refused` (with the reason) or `wrong`. The parity suite asserts that nothing is wrong,
and `docs/families.md` is made from the same verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.family import Tower, known_families
from deepen.checkpoint.load import quiet
from deepen.checkpoint.open import open_checkpoint
from deepen.checkpoint.reference import renumber_reads, step_by_step, unrolled
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.checkpoint.visit import VisitList
from deepen.errors import DeepenError, FamilyError

# Largest difference, relative to the largest output, between two ways to compute the same numbers.
SAME = 1e-5
# The same between cached and uncached passes, which sum in another order.
CACHED = 1e-4


@dataclass(frozen=True)
class Verdict:
    """What became of one operation on one tower."""

    tower: str
    operation: str
    outcome: Literal["right", "refused", "wrong"]
    detail: str = ""


@dataclass(frozen=True)
class Subject:
    """A tiny model of a family, as transformers has it and as deepen opened it."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    inputs: dict[str, torch.Tensor]
    output: torch.Tensor
    folder: Path


class Wrong(AssertionError):
    """An operation gave another model than it should have."""


def examine(model_type: str, folder: Path, operations: Collection[str] = (), **changes: Any) -> list[Verdict]:
    """Tries every operation on a tiny model of `model_type`, saved under `folder`.

    Args:
        model_type: a registered family.
        folder: an empty folder for the model and what is saved from it.
        operations: which to try; all when empty.
        changes: config fields that differ from the tiny config.
    """
    with quiet():
        model = tiny_checkpoint(folder / "original", model_type, **changes)
        inputs = tiny_inputs(model, tokens=14)
        subject = Subject(model, open_checkpoint(folder / "original"), inputs, output_of(model, inputs), folder)
        checks = {name: check for name, check in CHECKS.items() if not operations or name in operations}
        towers = known_families()[model_type].towers
        return [verdict for tower in towers for verdict in _examine_tower(subject, tower, checks)]


def _examine_tower(
    subject: Subject, tower: Tower, checks: Mapping[str, Callable[[Subject, Tower], str | None]]
) -> Iterator[Verdict]:
    for operation, check in checks.items():
        try:
            detail = check(subject, tower)
        except Wrong as error:
            yield Verdict(tower.name, operation, "wrong", str(error))
        except DeepenError as error:
            yield Verdict(tower.name, operation, "refused", str(error).replace(f"{subject.checkpoint.where}: ", ""))
        else:
            if detail is not None:
                yield Verdict(tower.name, operation, "right", detail)


def _last(subject: Subject, tower: Tower) -> int:
    return subject.checkpoint.depth[tower.name] - 1


def _apply(subject: Subject, tower: Tower, text: str) -> Checkpoint:
    return subject.checkpoint.apply(f"{tower.name}: {text}")


def _output(subject: Subject, tower: Tower, text: str, dtype: str | None = None) -> torch.Tensor:
    model = _apply(subject, tower, text).load(dtype=dtype)
    if dtype == "float64":
        # The grouped kernels of a mixture of experts have no fp64.
        model.set_experts_implementation("eager")
    inputs = {
        name: value.to(model.dtype) if value.is_floating_point() else value for name, value in subject.inputs.items()
    }
    usual = torch.get_default_dtype()
    # Some models make constants of the default type.
    torch.set_default_dtype(model.dtype)
    try:
        return output_of(model, inputs)
    finally:
        torch.set_default_dtype(usual)


def _same(got: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = SAME) -> None:
    difference = (got - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    if not difference <= tolerance:
        raise Wrong(f"{what}: off by {difference:.2g}")


def _by_hand(subject: Subject, tower: Tower, order: Sequence[int]) -> torch.Tensor:
    return output_of(_unrolled(subject, tower, order), subject.inputs)


def _unrolled(subject: Subject, tower: Tower, order: Sequence[int]) -> PreTrainedModel:
    model = unrolled(subject.model, tower.container, order, tower.depth_attributes)
    family, depth = subject.checkpoint.family, subject.checkpoint.depth[tower.name]
    for field in (name for name, fed in {**family.features, **family.taps}.items() if fed == tower.name):
        renumber_reads(model, field, depth, order, layers=field in family.taps)
    return model


def _identity(subject: Subject, tower: Tower) -> str:
    if not torch.equal(output_of(subject.checkpoint.load(), subject.inputs), subject.output):
        raise Wrong("the identity program is not bit-equal to the original")
    return ""


def _ordered(subject: Subject, tower: Tower, text: str, order: Sequence[int]) -> str:
    _same(_output(subject, tower, text), _by_hand(subject, tower, order), text)
    return ""


def _drop(subject: Subject, tower: Tower) -> str:
    last = _last(subject, tower)
    _ordered(subject, tower, f"0 2-{last}" if last > 2 else "0 2", [0, *range(2, last + 1)])
    return _ordered(subject, tower, f"1-{last}", range(1, last + 1))


def _reorder(subject: Subject, tower: Tower) -> str:
    text, order = _reordered(subject, tower)
    _ordered(subject, tower, text, order)
    return "" if order[0] else "except layers that reuse keys and values"


def _reordered(subject: Subject, tower: Tower) -> tuple[str, list[int]]:
    """Backwards; where later layers reuse the keys and values of earlier ones, the first layers only."""
    last = _last(subject, tower)
    try:
        _apply(subject, tower, f"{last}-0").require_executable()
    except FamilyError:
        return f"0 2-1 3-{last}", [0, 2, 1, *range(3, last + 1)]
    return f"{last}-0", list(range(last, -1, -1))


def _repeat(subject: Subject, tower: Tower) -> str:
    _every_visit(subject, tower, _looped(subject, tower))
    return _ordered(subject, tower, _looped(subject, tower), _looped_order(subject, tower))


def _every_visit(subject: Subject, tower: Tower, text: str) -> None:
    """A class that runs fewer layers than it has does so for the model made by hand, too; calls tell."""
    model = _apply(subject, tower, text).load()
    calls: list[None] = []
    visits = next(each for each in model.modules() if isinstance(each, VisitList) and each.tower is tower)
    for layer in visits.children():
        layer.register_forward_hook(lambda *_: calls.append(None))
    output_of(model, subject.inputs)
    if not calls:
        raise Wrong(f"{text}: no layer of this tower runs on the inputs that deepen makes, so nothing is known of it")
    if len(calls) % len(visits):
        ran = f"{len(calls)} layers ran for {len(visits)} visits"
        raise Wrong(f"{text}: {ran}; the forward of its class leaves some out")


def _looped(subject: Subject, tower: Tower) -> str:
    return " ".join(["0 (1-2)*2", *(str(layer) for layer in range(3, _last(subject, tower) + 1))])


def _looped_order(subject: Subject, tower: Tower) -> list[int]:
    return [0, 1, 2, 1, 2, *range(3, _last(subject, tower) + 1)]


def _copy(subject: Subject, tower: Tower) -> str:
    last = _last(subject, tower)
    return _ordered(subject, tower, f"0 1 1! 2-{last}", [0, 1, 1, *range(2, last + 1)])


def _zero(subject: Subject, tower: Tower) -> str:
    last = _last(subject, tower)
    _same(_output(subject, tower, f"0 0!zero 1-{last} {last}!zero"), subject.output, "zero copies")
    return ""


def _parts(subject: Subject, tower: Tower) -> str | None:
    last = _last(subject, tower)
    if tower.parts.kind == "single":
        return None
    text = "{1.a|1.f}" if tower.parts.kind == "parallel" else "1.a 1.f"
    _same(_output(subject, tower, f"0 {text} 2-{last}"), subject.output, text)
    if torch.equal(_output(subject, tower, f"0 1.a 2-{last}"), subject.output):
        raise Wrong("leaving out a feed-forward changes nothing")
    _parts_alone(subject, tower, (text, "1.a", "1.f"))
    return tower.parts.kind


def _parts_alone(subject: Subject, tower: Tower, texts: Sequence[str]) -> None:
    """One sample at a time: a part that is left out must give as many values as it would, not one for each sample."""
    if any(value.shape[0] != 2 for value in subject.inputs.values()):
        return
    last = _last(subject, tower)
    for text in texts:
        model = _apply(subject, tower, f"0 {text} 2-{last}").load()
        both = output_of(model, subject.inputs)
        if both.ndim > 1 and both.shape[0] == 2:
            one = output_of(model, {name: value[:1] for name, value in subject.inputs.items()})
            _same(one, both[:1], f"{text} on one sample", CACHED)


def _group(subject: Subject, tower: Tower) -> str:
    last = _last(subject, tower)
    # In fp64, so that x + (y - x) is y for a model that blows rounding up, too.
    output = lambda text: _output(subject, tower, text, "float64")  # noqa: E731
    _same(output(f"0 {{1|_}} 2-{last}"), output(f"0-{last}"), "{1|_} is not 1")
    one, other = (output(f"0 {{{pair}}}[comb=mean] 1-{last}") for pair in ("1|2", "2|1"))
    _same(one, other, "{1|2} is not {2|1}")
    _same(output(f"0 (1)[scale=0] 2-{last}"), output(f"0 2-{last}"), "scale=0 is not a drop")
    return ""


def _save(subject: Subject, tower: Tower) -> str:
    last = _last(subject, tower)
    forms = []
    for text, order in (
        (f"0 2-{last}", [0, *range(2, last + 1)]),
        (_looped(subject, tower), _looped_order(subject, tower)),
    ):
        changed = _apply(subject, tower, text)
        target = subject.folder / f"save-{tower.name}-{len(forms)}"
        told = changed.save(target)
        expected = _by_hand(subject, tower, order)
        _same(output_of(open_checkpoint(target).load(), subject.inputs), expected, f"{text} saved and opened")
        if told.form == "plain":
            _reload_plain(subject, target, expected, f"{text} saved and loaded by transformers")
        forms.append(told.form)
    return ", ".join(forms)


def _bake(subject: Subject, tower: Tower) -> str:
    target = subject.folder / f"bake-{tower.name}"
    _apply(subject, tower, _looped(subject, tower)).save(target, bake=True)
    expected = _by_hand(subject, tower, _looped_order(subject, tower))
    _reload_plain(subject, target, expected, "baked and loaded by transformers")
    return ""


def _reload_plain(subject: Subject, folder: Path, expected: torch.Tensor, what: str) -> None:
    model, info = type(subject.model).from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise Wrong(f"{what}: {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:3]}")
    _same(output_of(model.eval(), subject.inputs), expected, what)


def _cache(subject: Subject, tower: Tower) -> str | None:
    if not tower.caches:
        return None
    programs = (_reordered(subject, tower), (_looped(subject, tower), _looped_order(subject, tower)))
    for text, order in programs:
        model = _apply(subject, tower, text).load()
        stepped = step_by_step(model, subject.inputs, 5)
        if _steps_agree(subject):
            expected = output_of(model, subject.inputs)
        else:
            expected = step_by_step(_unrolled(subject, tower, order), subject.inputs, 5)
        _same(stepped, expected, f"{text} step by step", CACHED)
    return ""


def _steps_agree(subject: Subject) -> bool:
    """Whether the original itself gives with its cache what it gives without (a prefix language model does not)."""
    stepped = step_by_step(subject.model, subject.inputs, 5)
    return bool((stepped - subject.output).abs().max() <= CACHED * max(1.0, subject.output.abs().max().item()))


def _kv_first(subject: Subject, tower: Tower) -> str | None:
    if not tower.caches or not _steps_agree(subject):
        return None
    last = _last(subject, tower)
    model = _apply(subject, tower, f"0 (1)*3[kv=first] 2-{last}").load()
    full = output_of(model, subject.inputs)
    _same(step_by_step(model, subject.inputs, 5), full, "kv=first step by step", CACHED)
    if torch.equal(full, _output(subject, tower, f"0 (1)*3 2-{last}")):
        raise Wrong("kv=first changes nothing")
    return ""


CHECKS: Mapping[str, Callable[[Subject, Tower], str | None]] = {
    "identity": _identity,
    "drop": _drop,
    "reorder": _reorder,
    "repeat": _repeat,
    "copy": _copy,
    "zero": _zero,
    "parts": _parts,
    "group": _group,
    "save": _save,
    "bake": _bake,
    "cache": _cache,
    "kv=first": _kv_first,
}


def page_rows(model_type: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The rows of `docs/families.md` for one family: a table row a tower, then a line for each refusal."""
    rows = []
    for tower in dict.fromkeys(verdict.tower for verdict in verdicts):
        found = {verdict.operation: verdict for verdict in verdicts if verdict.tower == tower}
        cells = [_cell(found.get(operation)) for operation in CHECKS]
        rows.append(f"| {model_type} | {tower} | {' | '.join(cells)} |")
    return rows


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    return f"right ({verdict.detail})" if verdict.outcome == "right" and verdict.detail else verdict.outcome


def page_refusals(model_type: str, verdicts: Sequence[Verdict]) -> list[str]:
    return [
        f"- `{model_type}` {verdict.tower}, {verdict.operation}: {verdict.detail}"
        for verdict in verdicts
        if verdict.outcome == "refused"
    ]
