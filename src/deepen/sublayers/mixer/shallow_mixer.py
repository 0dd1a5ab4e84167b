"""A shallow feed-forward over the whole sequence in the place of attention.

    [u_1 .. u_L], one row of L D values, zeros where there is no token
       ── norm ── W_up ── leaky relu ── norm ── W_out ──┬── [y_1 .. y_L]     a sequence that is seen as a whole
                                                        ╰── y_t             causal: once for each t, u_1 .. u_t alone

L is fixed, the longest input of the model. A position is the number of tokens before it, padding left out; the outputs
of padding are 0. In generation a cache keeps the inputs, D numbers a token. `deepen.train.replace_attention` makes one
of a trained attention by distillation.

Source: Bozic et al., Rethinking Attention: Exploring Shallow Feed-Forward Neural Networks as an Alternative to
Attention Layers in Transformers, arXiv:2311.10642 (its ALR: the residual stays outside).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.linear import linear
from deepen.sublayers.mixer.base import Heads, Mixer


@method(
    "shallow-mixer",
    family="mixer",
    source="arXiv:2311.10642",
    title="Rethinking Attention: Exploring Shallow Feed-Forward Neural Networks as an Alternative to Attention Layers",
    mechanism="y = W_out norm(leaky_relu(W_up norm([u_1 .. u_L]))), the positions of a sequence in one row",
    cost="2 L D h parameters, where attention has 4 D^2; causal L D h + h D products a token",
)
class ShallowMixer(Mixer):
    """A feed-forward of all positions together.

    Args:
        sizes: what it is built from; the longest input is L.
        inner: h, the width between the maps. The paper's sizes, over L D: 1/256, 1/128, 1/8, 1/2 and 2.
    """

    marks: ClassVar[dict[str, str]] = {
        "C": "the maps and norms in this order, the mask on the output, the causal form",
        "N": "a causal output has nothing of later tokens; outputs of padding are 0; 339,275 parameters",
        "R": "positions do not count padding; the cache",
    }  # fmt: skip

    def __init__(self, sizes: Heads, *, inner: Annotated[int, Field(ge=1)] = 256) -> None:
        super().__init__(sizes)
        if sizes.window is not None:
            raise UsageError(f"a shallow mixer reads all {sizes.context} positions at once; it takes no window")
        row = sizes.context * sizes.width
        self.norm = nn.LayerNorm(row)
        self.up = nn.Linear(row, inner)
        self.inner_norm = nn.LayerNorm(inner)
        self.out = nn.Linear(inner, sizes.width if sizes.causal else row)

    def forward(self, read: Read, context: Context) -> Out:
        if context.on_keys is not None or context.beside is not None or read.k is not None or read.v is not None:
            raise UsageError(
                "the wiring changes keys and values, which a shallow mixer has none of; use another wiring"
            )
        u, valid = self._tokens(read.u, context)
        batch, held, width = u.shape
        new, longest = read.u.shape[1], self.sizes.context
        if held > longest:
            raise UsageError(f"{held} tokens, but the mixer has {longest} positions; give it fewer")
        place = (valid.long().cumsum(-1) - 1).clamp(min=0)
        at = place.unsqueeze(-1).expand(-1, -1, width)
        placed = u.new_zeros(batch, longest, width).scatter_add(1, at, u * valid.unsqueeze(-1))
        kept = valid[:, held - new :].unsqueeze(-1)
        if not self.sizes.causal:
            y = self._maps(placed.flatten(1), context).view_as(placed).gather(1, at[:, held - new :])
            return Out(y * kept)
        before = torch.arange(longest, device=u.device) <= place[:, held - new :, None]
        rows = (placed.unsqueeze(1) * before.unsqueeze(-1)).flatten(2)
        return Out(self._maps(rows, context) * kept)

    def _tokens(self, u: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of all tokens so far, (B, S, D), and which of them are no padding, (B, S)."""
        new = torch.ones_like(u[..., 0], dtype=torch.bool) if context.valid is None else context.valid.bool()
        if context.slot is None:
            return u, new
        if context.slot.writes:
            # the slot of keys keeps inputs, that of values nothing
            held = context.slot.update(u.unsqueeze(1), u.unsqueeze(1)[..., :0])[0].squeeze(1)
        else:
            held = context.slot.read()[0].squeeze(1)
        past = held.shape[1] - u.shape[1]
        mask, _ = context.masks(None)
        if context.valid is None or mask is None:
            return held, torch.cat([new.new_ones(len(new), past), new], dim=1)
        return held, torch.cat([mask[:, 0, -1, :past].expand(len(new), -1), new], dim=1)

    def _maps(self, rows: torch.Tensor, context: Context) -> torch.Tensor:
        inner = F.leaky_relu(linear(self, "up", self.norm(rows), context))
        return linear(self, "out", self.inner_norm(inner), context)

    def flops(self, tokens: int) -> float:
        return 2.0 * (self.up.weight.numel() + self.out.weight.numel()) * (tokens if self.sizes.causal else 1)

    @property
    def per_key(self) -> float:
        return 0.0

    @property
    def kept(self) -> int:
        return self.sizes.width

    @property
    def kept_flops(self) -> float:
        return 0.0
