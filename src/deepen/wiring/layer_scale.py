"""LayerScale: Pre-LN with a learned gain on each channel of each update.

    x' = x + gamma * F(norm(x))          gamma: (D) a site

    x ──┬── norm ── F ── (* gamma) ── + ── x'
        └─────────────────────────────┘

gamma begins at 0.1 up to 18 blocks, 1e-5 up to 24 and 1e-6 beyond, turns of loops counted (R). After training it folds
into the output matrices of layers that are visited once: `folded`.

Source: Touvron et al., Going Deeper with Image Transformers (CaiT), arXiv:2103.17239.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.program.site import Depth, Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring
from deepen.wiring.entries import SITE, Entries, numbered, rows


def by_depth(blocks: float) -> float:
    """What gains begin at."""
    return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6


@method(
    "layer-scale",
    family="wiring",
    source="arXiv:2103.17239",
    title="Going Deeper with Image Transformers",
    mechanism="x + gamma * F(norm(x)), a small gain for each channel",
    cost="D parameters and multiply-adds a site; none after folding",
)
class LayerScale(Wiring):
    """Gains on updates.

    Args:
        shape: what it is built for.
        value: of all gains at first; None chooses it by depth. 1 is Pre-LN.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation and the initial values",
        "N": "Pre-LN with gains of 1, the embedding with gains of 0, and the fold",
        "R": "a gain for each site, turns of loops included",
    }

    def __init__(self, shape: Shape, *, value: float | None = None) -> None:
        super().__init__(shape)
        self.given = value
        self.value = by_depth(shape.blocks) if value is None else value
        self.gains = nn.Parameter(torch.empty(len(shape.sites), shape.width))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        return rows(numbered(SITE, len(self.shape.sites)), "gains")

    def reset(self) -> None:
        nn.init.constant_(self.gains, self.value)

    def constants(self) -> Mapping[str, str]:
        return {} if self.given is not None else {"blocks": "gains began at a value that follows from depth"}

    def rescaled(self, before: Depth) -> Mapping[str, float]:
        return {"gains": self.value / by_depth(before.blocks)}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + self.gains[site.index] * y

    def folded(self, layers: Sequence[nn.Module] | nn.ModuleList) -> dict[str, torch.Tensor]:
        """The output matrices and biases of the bank with the gains in them: the same function under Pre-LN.

        Returns:
            New values by name in the stack's state.

        Raises:
            UsageError: a layer is visited more than once, with gains of its own each time.
        """
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for site in self.shape.sites:
                part: Any = layers[site.key.layer].get_submodule(f"{site.part}.sublayer")
                place = f"layers.{site.key.layer}.{site.part}.sublayer"
                # the axis of the stream in each parameter that the output is linear in
                outputs = part.outputs if site.part == "f" else {"out.weight": 0, "out.bias": 0}
                if any(f"{place}.{name}" in found for name in outputs):
                    raise UsageError(
                        f"layer {site.key.layer} is visited more than once, with gains of its own each time; "
                        "gains fold into the weights of layers that are visited once"
                    )
                for name, value in part.named_parameters():
                    if name in outputs:
                        gain = self.gains[site.index].view(-1, *[1] * (value.ndim - 1 - outputs[name]))
                        found[f"{place}.{name}"] = value * gain
        return found
