"""Linear maps that are stored as two factors, as a low-rank approximation leaves them.

    y = W x + b          W [out, in]                          out x in values
    y = L (R x) + b      L [out, r], R [r, in]                r (out + in) values, and as many products a token

The config of the native form names them and their ranks: `"factors": {"text": {"3": {"self_attn.q_proj": 12}}}`. The
plain format of a family has no place for factors, so a baked checkpoint holds the product L R.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepen.checkpoint.computed import Computed
from deepen.checkpoint.recipes import Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.errors import CheckpointError, FamilyError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.layout import NewLayer


class Factored(nn.Module):
    """A linear map of rank at most `rank`; its values are left unset.

    Attributes:
        right: R, from what is read to the rank.
        left: L, from the rank to what is given, with the bias.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        with torch.device("meta"):
            self.right = nn.Linear(linear.in_features, rank, bias=False, dtype=linear.weight.dtype)
            self.left = nn.Linear(rank, linear.out_features, bias=linear.bias is not None, dtype=linear.weight.dtype)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for factor in (self.right, self.left):
            for name, parameter in list(factor.named_parameters()):
                setattr(factor, name, nn.Parameter(torch.empty(parameter.shape, **place)))

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self.left(self.right(read))


def factored(layer: nn.Module, ranks: Mapping[str, int] | None, where: str) -> nn.Module:
    """The layer itself, or a copy in which the linear maps of these paths are factored.

    Raises:
        FamilyError: a path is no linear map, or the rank is larger than its matrix; named.
    """
    if not ranks:
        return layer
    made = copy.deepcopy(layer)
    for path, rank in ranks.items():
        above, _, name = path.rpartition(".")
        try:
            linear = made.get_submodule(path)
        except AttributeError:
            linear = None
        if type(linear) is not nn.Linear:
            kind = "nothing" if linear is None else f"a {type(linear).__name__}"
            raise FamilyError(f"{where}: {path} of a {type(layer).__name__} is {kind}; only a linear map has factors")
        if not 1 <= rank <= min(linear.in_features, linear.out_features):
            raise FamilyError(
                f"{where}: rank {rank} of {path} is not from 1 to {min(linear.in_features, linear.out_features)}, the "
                f"smaller side of its matrix of {linear.out_features} x {linear.in_features}"
            )
        setattr(made.get_submodule(above), name, Factored(linear, rank))
    return made


def stored_factors(ck: Checkpoint, layers: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The ranks as the native config states them, by the place of each stored layer in `layers`; empty if none."""
    found = {
        name: {str(at): dict(ck.factors[name][layer]) for at, layer in enumerate(stored) if layer in ck.factors[name]}
        for name, stored in layers.items()
        if name in ck.factors
    }
    return {"factors": found} if any(found.values()) else {}


def read_factors(
    raw: Mapping[str, Any], banks: Mapping[str, Sequence[int]], where: str
) -> dict[str, dict[int, dict[str, int]]]:
    """The ranks that a native config states.

    Raises:
        CheckpointError: they are not ranks of linear maps of stored layers.
    """
    given = raw.get("factors", {})
    found: dict[str, dict[int, dict[str, int]]] = {}
    try:
        for name, layers in given.items():
            found[name] = {
                range(len(banks[name]))[int(layer)]: {str(path): int(rank) for path, rank in ranks.items()}
                for layer, ranks in layers.items()
            }
            if any(rank < 1 for ranks in found[name].values() for rank in ranks.values()):
                raise ValueError
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise CheckpointError(
            f"{where}: factors must give linear maps of layers of a tower ({', '.join(banks)}) a rank, such as "
            f'{{"text": {{"3": {{"self_attn.q_proj": 12}}}}}}, got {json.dumps(given)}'
        ) from None
    return found


def needs_factors(ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]]) -> str | None:
    """Why the plain format would lose the factors of these layers, or None."""
    for name, chosen in layers.items():
        for at, new in enumerate(chosen):
            if path := next(iter(ck.factors.get(name, {}).get(new.stored, {})), None):
                return f"native form: {path} of layer {at} is stored as two factors"
    return None


def multiplied_out(
    ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]], tensors: Mapping[str, Recipe], notes: list[str]
) -> dict[str, Recipe]:
    """The tensors with each pair of factors replaced by its product; `notes` says how many there were."""
    made, count = dict(tensors), 0
    for name, chosen in layers.items():
        for at, new in enumerate(chosen):
            for path in ck.factors.get(name, {}).get(new.stored, {}):
                stem = f"{ck.disk[name].prefix}.{at}.{path}"
                left, right = made.pop(f"{stem}.left.weight"), made.pop(f"{stem}.right.weight")
                shape = (left.shape[0], right.shape[1])
                made[f"{stem}.weight"] = Computed(
                    TensorInfo(left.dtype, shape), (left, right), torch.matmul, f"multiplying the factors of {stem}"
                )
                if f"{stem}.left.bias" in made:
                    made[f"{stem}.bias"] = made.pop(f"{stem}.left.bias")
                count += 1
    if count:
        notes.append(f"{count} linear maps are written as the product of their two factors, at full size")
    return dict(sorted(made.items()))
