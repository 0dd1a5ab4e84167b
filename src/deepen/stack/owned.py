"""The parameters that a program owns beside its layers: adapters, loop embeddings, norms, gates and injections.

| set | parameters | at first |
|---|---|---|
| `lora=r` | a: (r, in) and b: (out, r) for each linear map of the visit; y + 2 (x a^T) b^T | b = 0: no change |
| `emb` | e: (D); x + e | 0: no change |
| `norm` | gain: (D); RMS norm | 1 |
| `gate=scalar`, `vector` | g: (1) or (D); x + g (P(x) - x) | 1: no change |
| `gate=token` | w: (D), b: (1); the same with g = sigmoid(x w + b) | w = 0, b = 4 |
| `inject=L:concat` | W: (D, 2 D); W [x; s] | [I, 0]: no change |

They are called `owned.<kind>.<use>.<turn>`; see `deepen.program.owned`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program import Own, Plan
from deepen.sublayers.contract import Adapter

# alpha / r of every adapter.
SCALE = 2.0
# Linear maps of queries, keys and values in one matrix count as one.
TOKEN_BIAS = 4.0


class Owned(nn.Module):
    """The sets of a plan.

    Args:
        plan: of the stack.
        layers: the bank, in the order of the plan's keys.
        width: D.
        eps: of the norms.
    """

    def __init__(self, plan: Plan, layers: Sequence[nn.Module] | nn.ModuleList, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        for visit in plan.visits:
            if visit.lora is not None:
                maps = {part: dict(linears(layers[visit.key.layer].get_submodule(part))) for part in visit.parts}
                self._add_adapters(visit.lora, maps)
        for own in dict.fromkeys(plan.owned.values()):
            if own.kind != "lora" and not (own.kind == "inject" and own.value[1] == "add"):  # pyright: ignore
                self._place(own).update(_parameters(own, width))
        self.reset()

    def reset(self) -> None:
        """Gives every parameter its initial value."""
        for name, parameter in self.named_parameters():
            kind, _, _, *rest = name.split(".")
            if kind == "lora" and rest[-1] == "a":
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            elif kind == "norm" or (kind == "gate" and rest[-1] == "g"):
                nn.init.ones_(parameter)
            elif kind == "inject":
                nn.init.eye_(parameter)
            elif kind == "gate" and rest[-1] == "b":
                nn.init.constant_(parameter, TOKEN_BIAS)
            else:
                nn.init.zeros_(parameter)

    def adapters(self, own: Own | None, part: str) -> Mapping[str, Adapter]:
        """The adapters of a visit for the linear maps of one part, by their names."""
        if own is None:
            return {}
        held = self._modules["lora"]._modules[str(own.use)]._modules[str(own.turn)]._modules[part]  # pyright: ignore
        return {name: Adapter(pair["a"], pair["b"], SCALE) for name, pair in held.items()}  # pyright: ignore

    def entry(self, own: Own, marks: Mapping[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """What `emb`, `norm` or `inject` does to a stream (..., D)."""
        if own.kind == "inject":
            label, how = own.value  # pyright: ignore[reportGeneralTypeIssues]
            stream = marks[label]
            if how == "add":
                return lambda x: x + stream
            joint = self._set(own)["w"]
            return lambda x: F.linear(torch.cat([x, stream], dim=-1), joint)
        if own.kind == "emb":
            embedding = self._set(own)["e"]
            return lambda x: x + embedding
        gain = self._set(own)["gain"]
        return lambda x: F.rms_norm(x, gain.shape, gain, self.eps)

    def factor(self, own: Own, x: torch.Tensor) -> torch.Tensor:
        """The factor (1), (D) or (..., 1) of an update of the stream x: (..., D)."""
        held = self._set(own)
        if "g" in held:
            return held["g"]
        return torch.sigmoid(x @ held["w"] + held["b"]).unsqueeze(-1)

    def _set(self, own: Own) -> nn.ParameterDict:
        found = self.get_submodule(own.name)
        assert isinstance(found, nn.ParameterDict)
        return found

    def _place(self, own: Own) -> nn.ParameterDict:
        """The set of this name, made when there is none yet."""
        held = self._made(self, own.kind)
        held = self._made(held, str(own.use))
        if str(own.turn) not in held._modules:
            held.add_module(str(own.turn), nn.ParameterDict())
        return held._modules[str(own.turn)]  # pyright: ignore[reportReturnType]

    def _add_adapters(self, own: Own, maps: Mapping[str, Mapping[str, nn.Linear]]) -> None:
        assert isinstance(own.value, int)
        held = self._made(self._made(self._made(self, own.kind), str(own.use)), str(own.turn))
        for part, linears_of_part in maps.items():
            place = self._made(held, part)
            for name, map_ in linears_of_part.items():
                rank = min(own.value, map_.in_features, map_.out_features)
                place.add_module(name, nn.ParameterDict({
                    "a": nn.Parameter(torch.empty(rank, map_.in_features)),
                    "b": nn.Parameter(torch.empty(map_.out_features, rank)),
                }))  # fmt: skip

    @staticmethod
    def _made(parent: nn.Module, name: str) -> nn.Module:
        if name not in parent._modules:
            parent.add_module(name, nn.ModuleDict())
        return parent._modules[name]  # pyright: ignore[reportReturnType]


def linears(part: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear maps of a part of a layer, by their names in the sublayer."""
    for name, module in part.get_submodule("sublayer").named_children():
        if isinstance(module, nn.Linear):
            yield name, module


def _parameters(own: Own, width: int) -> dict[str, nn.Parameter]:
    shapes: dict[str, tuple[int, ...]]
    match own.kind, own.value:
        case "emb", _:
            shapes = {"e": (width,)}
        case "norm", _:
            shapes = {"gain": (width,)}
        case "gate", "scalar":
            shapes = {"g": (1,)}
        case "gate", "vector":
            shapes = {"g": (width,)}
        case "gate", _:
            shapes = {"w": (width,), "b": (1,)}
        case _:
            shapes = {"w": (width, 2 * width)}
    return {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
