"""What this back end refuses of a program, by name, before any weight is touched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from deepen.checkpoint.family import Tower
from deepen.errors import FamilyError, ProgramError
from deepen.program import Plan


def refuse_attributes(plan: Plan, tower: Tower, family: str) -> None:
    """Refuses what this back end does not execute yet, by name and column; nothing is ignored.

    Raises:
        ProgramError: an attribute or value that is parsed but not executed.
        FamilyError: a part or a zero copy that the family cannot have.
    """
    executed = {"scale", "comb", "kv", "lora", "emb", "norm", "gate", "inject"}
    for use in plan.uses:
        if use.name not in executed or use.where == "mark":
            raise ProgramError(f"{use.name!r} is not executed on checkpoints yet", plan.text, use.column)
        if use.name == "kv" and use.value not in ("own", "first"):
            raise ProgramError(
                f"kv={use.value} is not executed on checkpoints yet; kv=own and kv=first are", plan.text, use.column
            )
        if use.name == "kv" and use.value == "first" and not tower.caches:
            raise FamilyError(f"kv=first needs a cache, and the {tower.name} tower of {family} keeps none")
        if use.name == "kv" and use.value == "first" and tower.parts.kind == "single":
            raise FamilyError(f"kv=first shares keys and values between turns, which not every layer of {family} has")
        if use.name == "comb" and use.value not in ("sum", "mean"):
            raise ProgramError(
                f"comb={use.value} is not executed on checkpoints yet; sum and mean are", plan.text, use.column
            )
    parts = tower.parts
    for key, init in plan.inits.items():
        if init == "rand":
            raise ProgramError(f"the copy {key} with initial value 'rand' is not executed on checkpoints yet")
        if init == "zero" and not parts.outputs:
            raise FamilyError(f"{key} cannot be a zero copy: {parts.reason}")
        if init == "zero" and parts.post_norm:
            raise FamilyError(
                f"{key} cannot be a zero copy: a layer of {family} changes the stream even where its parts add nothing "
                "(a norm or a factor outside them)"
            )
    for visit in plan.visits:
        if len(visit.parts) < len(parts.letters) and parts.kind == "whole":
            raise FamilyError(f"visit {visit.index} asks for part {visit.parts!r} of layer {visit.key}, but a layer of "
                              f"{family} is one piece: {parts.reason}")  # fmt: skip


def refuse_sharing(plan: Plan, layers: nn.ModuleList, bank: Sequence[int], where: str) -> None:
    """Refuses a layer that reuses keys and values which no visit before it keeps (Gemma 3n).

    Raises:
        FamilyError: names the visit, its layer, and the layers that keep what it needs.
    """
    roles = {key: _sharing(layers[bank[key.layer]]) for key in plan.keys}
    kept: set[str] = set()
    for visit in plan.visits:
        role, kind = roles[visit.key]
        if role == "reuse" and kind not in kept:
            keepers = [str(index) for index, origin in enumerate(bank) if _sharing(layers[origin]) == ("store", kind)]
            raise FamilyError(
                f"{where}: visit {visit.index} of layer {visit.key} reuses the keys and values that a {kind} layer "
                f"keeps, and no visit before it keeps them; visit layer {' or '.join(keepers) or '(none has them)'} "
                "first"
            )
        if role == "store":
            kept.add(kind)


def _sharing(layer: nn.Module) -> tuple[str, str]:
    """Whether a layer keeps its keys and values for later ones or reuses them, and for which kind of layer."""
    attention = getattr(layer, "self_attn", None)
    reuse, store = (getattr(attention, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv"))
    return "reuse" if reuse else "store" if store else "own", getattr(attention, "layer_type", "")
