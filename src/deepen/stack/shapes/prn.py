"""PRN, partial residual network: a shortcut that carries some of the channels, so that layers learn from more paths.

    x' = F(x) + m * x          m = 1 on the first `share` of the channels, 0 on the others

    x ──┬── F ─────────────────── + ── x'       [x_1 .. x_k | 0]
        └── first k channels ─────┘

In a residual network every block gets, through the shortcuts, the same gradient as the last one. Where a channel has no
shortcut, the gradient passes the convolutions, so that channels differ in the depth they learn from. Which channels
carry the shortcut is chosen here: the first, at every block (R).

`share=1` is a ResNet with padded shortcuts, `share=0` its plain control; all have the same parameters.

Source: Wang et al., Enriching Variety of Layer-wise Learning Information by Gradient Combination, ICCV Workshops 2019;
its design by gradient paths: arXiv:2211.04800.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deepen.registry import method
from deepen.stack.shapes.resnet import ResNet, ResNetConfig


class PRNConfig(ResNetConfig):
    """What a partial residual network is built from; the other fields are those of a ResNet.

    Attributes:
        share: of the channels that the shortcut carries.
    """

    shortcut: Literal["projection", "pad"] = "pad"
    share: float = Field(default=0.5, ge=0, le=1)

    def kept(self, channels: int) -> int:
        return round(self.share * super().kept(channels))


@method(
    "prn",
    family="shape",
    source="arXiv:2211.04800",
    title="Designing Network Design Strategies Through Gradient Path Analysis",
    mechanism="a shortcut for some of the channels alone",
    cost="less than a residual network: fewer channels are added",
)
class PRN(ResNet):
    """A ResNet whose shortcuts carry a share of the channels.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> import torch
        >>> PRN(PRNConfig(blocks=(1, 1), width=8))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: PRNConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
