"""What feed-forwards read on a text: from it follow their hidden values, and what a router has to learn.

`deepen.feed_inputs` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepen.errors import UsageError

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint

# The share of the tokens, at the end of the text, that nothing is fitted to: what is reported is measured on them.
HELD_OUT = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class FeedInputs:
    """What the feed-forwards of one tower read, token by token.

    Attributes:
        program: the program they were read under.
        tower: the tower.
        reads: by stored layer, [n, d] in fp32; a layer that is visited twice has the tokens of both visits.
    """

    program: str
    tower: str
    reads: Mapping[int, torch.Tensor]

    def require(self, ck: Checkpoint, tower: str, what: str) -> None:
        """Refuses what was read under another program or in another tower.

        Raises:
            UsageError: names both.
        """
        if (self.program, self.tower) != (str(ck.program), tower):
            raise UsageError(
                f"{what}: the data is of the {self.tower} tower in `{self.program}`, not of the {tower} tower in "
                f"`{ck.program}`; read it again with deepen.feed_inputs"
            )

    def halves(self, layer: int, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer reads: the tokens to fit to, and those held out.

        Raises:
            UsageError: the layer read too few.
        """
        found = self.reads.get(layer)
        held = 0 if found is None else int(HELD_OUT * len(found))
        if found is None or not held:
            raise UsageError(
                f"{what}: the data holds {0 if found is None else len(found)} tokens for the feed-forward of layer "
                f"{layer}; expected at least {round(1 / HELD_OUT)}: give more of the text"
            )
        return found[:-held], found[-held:]
