"""What linear maps read on a text: the statistics by which channels are ranked and matrices are weighted.

    x_j    value j that a linear map reads            s_j = mean over tokens of x_j^2
    a      hidden values of a feed-forward, [m]       mean of a,  mean of a a' [m, m],  mean of |a_j dL/da_j|

`deepen.activations` makes them; all are means over the tokens of every visit of a layer, in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepen.errors import UsageError

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint

# What stands for the mean square of a value that was zero on every token (LoRAP).
SILENT = 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class Activations:
    """Statistics of one tower, by stored layer.

    Attributes:
        program: the program they were read under.
        tower: the tower.
        tokens: tokens read.
        squares: mean square of each value that each linear map of a layer reads, [in], by its path in the layer.
        means: mean of the hidden values of the feed-forward, [m].
        grams: mean product of each two hidden values, [m, m]; empty unless asked for.
        effects: mean of |a_j dL/da_j| of the hidden values, [m]; empty unless asked for.
    """

    program: str
    tower: str
    tokens: int
    squares: Mapping[int, Mapping[str, torch.Tensor]]
    means: Mapping[int, torch.Tensor]
    grams: Mapping[int, torch.Tensor]
    effects: Mapping[int, torch.Tensor]

    def require(self, ck: Checkpoint, tower: str, what: str) -> None:
        """Refuses statistics of another program or tower.

        Raises:
            UsageError: names both.
        """
        if (self.program, self.tower) != (str(ck.program), tower):
            raise UsageError(
                f"{what}: the activations are of the {self.tower} tower in `{self.program}`, not of the {tower} tower "
                f"in `{ck.program}`; read them again"
            )

    def square(self, layer: int, path: str) -> torch.Tensor:
        """Mean square of what a linear map reads, [in]; what was always zero counts as `SILENT`.

        Raises:
            UsageError: the map read nothing.
        """
        import torch

        found = self.squares.get(layer, {}).get(path)
        if found is None:
            raise UsageError(
                f"layer {layer} has no activations of {path}: that part of it is never visited in `{self.program}`"
            )
        return torch.where(found == 0, SILENT, found)
