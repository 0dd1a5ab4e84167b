"""The norm that a layer's feed-forward reads through: found by following what the model itself passes on.

    stream --> norm --> feed-forward --> stream

A pass on the meta device shows which norm's output the feed-forward takes and that no other module takes what the
feed-forward gives. How the norm uses its gain, g or 1 + g, is seen from what it makes of a gain of zero.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepen.checkpoint.family import Tower
from deepen.checkpoint.tiny import tiny_inputs
from deepen.errors import FamilyError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class Norm:
    """A norm before a feed-forward.

    Attributes:
        name: its path inside the layer.
        gain: whether it has a gain.
        bias: whether it has a bias.
        offset: what it adds to its gain before it multiplies.
    """

    name: str
    gain: bool
    bias: bool
    offset: float


def norms_before(ck: Checkpoint, tower: Tower, layers: list[int], module: str) -> list[Norm]:
    """For each of these stored layers, the norm whose output its feed-forward reads, and nothing else does.

    Args:
        ck: the checkpoint.
        tower: the tower.
        layers: stored layers.
        module: the path of the feed-forward inside a layer.

    Raises:
        FamilyError: the feed-forward reads the stream itself, or a norm stands behind it; the layer is named.
    """
    config = copy.deepcopy(ck.skeleton.config)
    config._attn_implementation = "eager"
    with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ck.skeleton.model_class(config).eval()
        container: Any = model.get_submodule(ck.skeleton.container(tower))
        origins = [ck.banks[tower.name][layer] for layer in layers]
        flows = {origin: _Flow(container[origin], module) for origin in set(origins)}
        model(**{name: value.to("meta") for name, value in tiny_inputs(model, tokens=2, batch=1).items()})
    found = []
    for layer, origin in zip(layers, origins, strict=True):
        flow = flows[origin]
        if flow.source is None or flow.behind is not None or not _plain(flow.layer.get_submodule(flow.source)):
            why = (
                f"{flow.behind} stands behind it" if flow.behind else "no norm with a gain of its own stands before it"
            )
            raise FamilyError(f"{ck.where}: the feed-forward of layer {layer} cannot be fused: {why}")
        norm = flow.layer.get_submodule(flow.source)
        weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
        offset = _offset(norm) if weight is not None else 0.0
        found.append(Norm(flow.source, weight is not None, bias is not None, offset))
    return found


class _Flow:
    """What one layer passes from module to module in a pass."""

    def __init__(self, layer: nn.Module, module: str) -> None:
        self.layer = layer
        self.source: str | None = None
        self.behind: str | None = None
        self._given: dict[str, torch.Tensor] = {}
        for name, child in layer.named_children():
            child.register_forward_hook(self._hook(name, module), with_kwargs=True)

    def _hook(self, name: str, module: str) -> Any:
        def seen(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            taken = args[0] if args else next(iter(kwargs.values()))
            for other, given in self._given.items():
                if taken is given and name == module:
                    self.source = other
                elif taken is given and other == module:
                    self.behind = name
            if isinstance(out, torch.Tensor):
                self._given[name] = out

        return seen


def _plain(norm: nn.Module) -> bool:
    """Whether a module owns nothing but one gain and one bias."""
    names = {name for name, _ in norm.named_parameters()}
    return names <= {"weight", "bias"} and not list(norm.children())


def _offset(norm: nn.Module) -> float:
    """1 for a norm that multiplies by 1 + gain, 0 for one that multiplies by its gain."""
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.zero_()
        given = torch.linspace(-1, 2, probe.get_parameter("weight").numel())[None, None]
        return 1.0 if probe(given).abs().max() > 0 else 0.0
