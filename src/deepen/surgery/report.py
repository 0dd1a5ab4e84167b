"""What a transform did to a checkpoint, and whether it kept the function where it claims to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deepen.errors import DataError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

# Tokens of the random input that two models are compared on.
TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a transform did.

    Attributes:
        method: the transform.
        tower: the tower that it changed.
        before: the program of that tower before.
        after: the program of that tower now.
        note: what was done, in words.
        dropped: stored layers that were visited and no longer are.
        copied: copies of layers that the program makes.
        shared: layers that are visited more than once.
        merged: new layers, and the stored layers whose weights each was made of.
        folded: tensors of new layers into which something was multiplied.
        renumbered: stored layers whose number a save changes, old to new.
        same_as: the program whose function the result claims to have; None when it claims none.
        max_logit_difference: largest absolute difference of the outputs to that program's; None when not measured.
        figures: what else was measured, by name.
    """

    method: str
    tower: str
    before: str
    after: str
    note: str
    dropped: tuple[int, ...]
    copied: tuple[str, ...]
    shared: tuple[str, ...]
    merged: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    renumbered: Mapping[int, int]
    same_as: str | None = None
    max_logit_difference: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return asdict(self)


def report(old: Checkpoint, new: Checkpoint, tower: str, method: str, note: str, **more: Any) -> Report:
    """Compares the plans of two checkpoints and refuses a result that cannot be executed.

    Args:
        old: before.
        new: after; its bank begins with the bank of `old`.
        tower: the tower that changed.
        method: the transform.
        note: what was done.
        more: further fields of the report.

    Raises:
        ProgramError: the new program asks for something that is not executed on checkpoints.
        FamilyError: the family cannot do what it asks for.
    """
    new.require_executable()
    before, after = old.plan(tower), new.plan(tower)
    visited = [visit.key for visit in after.visits]
    still = {key.layer for key in visited}
    return Report(
        method=method,
        tower=tower,
        before=str(old.program),
        after=str(new.program),
        note=note,
        dropped=tuple(sorted({visit.key.layer for visit in before.visits} - still)),
        copied=tuple(str(key) for key in after.keys if key.copy is not None),
        shared=tuple(str(key) for key in after.keys if visited.count(key) > 1),
        renumbered={key.layer: at for at, key in enumerate(after.keys) if key.copy is None and key.layer != at},
        **more,
    )


def logit_difference(one: Checkpoint, two: Checkpoint) -> float:
    """Largest absolute difference of the outputs of two checkpoints on one random input, in fp32.

    Raises:
        DataError: an output is not finite.
    """
    import torch

    from deepen.checkpoint.tiny import output_of, tiny_inputs

    model = one.load(dtype="float32")
    inputs = tiny_inputs(model, tokens=TOKENS)
    first = output_of(model, inputs)
    del model
    second = output_of(two.load(dtype="float32"), inputs)
    if not bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise DataError(f"{one.where}: the outputs hold NaN or Inf; the weights are damaged or overflow")
    return (first - second).abs().max().item()
