"""The parameters that a program owns beside the layers of a stack: `owned.<kind>.<use>.<turn>`.

What they are and what they start with: `deepen.sublayers.owned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from deepen.program import Own, Plan
from deepen.sublayers.owned import Lora, branches, start, stream_module


class Owned(nn.Module):
    """The sets of a plan.

    Args:
        plan: of the stack.
        layers: the bank, in the order of the plan's keys.
        width: D.
    """

    def __init__(self, plan: Plan, layers: Sequence[nn.Module] | nn.ModuleList, width: int) -> None:
        super().__init__()
        made: dict[str, nn.Module] = {}
        for own in dict.fromkeys(plan.owned.values()):
            if (module := stream_module(own, width)) is not None:
                made[own.name] = module
        for visit in plan.visits:
            if (own := visit.lora) is not None:
                assert isinstance(own.value, int)
                for part in visit.parts:
                    # part_map, since PEFT takes a name that ends in .map for the map itself
                    for name, map_ in linears(layers[visit.key.layer].get_submodule(part)):
                        made[f"{own.name}.{part}_{name}"] = Lora(own.value, map_.in_features, map_.out_features)
        for name, module in branches(made)._modules.items():
            self.add_module(name, module)

    def reset(self) -> None:
        """Gives every parameter its initial value."""
        for name, parameter in self.named_parameters():
            start(parameter, name)

    def adapters(self, own: Own | None, part: str) -> Mapping[str, Lora]:
        """The adapters of a visit for the linear maps of one part, by their names."""
        if own is None:
            return {}
        held, sign = self.get_submodule(own.name)._modules, f"{part}_"
        return {name.removeprefix(sign): each for name, each in held.items() if name.startswith(sign)}  # pyright: ignore

    def entry(self, own: Own, marks: Mapping[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """What `emb`, `norm` or `inject` does to a stream (..., D)."""
        if own.kind != "inject":
            return self.get_submodule(own.name)
        label, how = own.value  # pyright: ignore[reportGeneralTypeIssues]
        stream = marks[label]
        if how == "add":
            return lambda x: x + stream
        joined = self.get_submodule(own.name)
        return lambda x: joined(torch.cat([x, stream], dim=-1))

    def factor(self, own: Own, x: torch.Tensor) -> torch.Tensor:
        """The factor (1), (D) or (..., 1) of an update of the stream x: (..., D)."""
        return self.get_submodule(own.name)(x)


def linears(part: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear maps of a part of a layer, by their names in the sublayer."""
    for name, module in part.get_submodule("sublayer").named_children():
        if isinstance(module, nn.Linear):
            yield name, module
