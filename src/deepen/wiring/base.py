"""The contract of a wiring, and what wirings of one stream share.

    state = wiring.init(x, earlier)                x: (B, T, D), the embedding
    read  = wiring.read(state, site)               what the sublayer sees, before its norm
    state = wiring.write(state, site, read, y, norm)
    x     = wiring.finish(state)                   before the final norm

A state is never written to: each call returns a new one, so a visit can be computed again in the backward pass. Where a
wiring has parameters, they belong to sites (visit and part), unless its file says otherwise.

`before` and `after` name the parts of a layer that have a norm there: the one before is applied to what is read, the
one after is handed to `write`. They belong to the layer, so turns of a loop share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn

from deepen.program import Plan
from deepen.program.site import Depth, Site
from deepen.sublayers.contract import Beside, OnKeys, Read, Slot
from deepen.wiring.entries import Entries

# A tensor or a nest of named tuples of tensors; each wiring has its own.
State: TypeAlias = Any
Norm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


# What a program can ask of a wiring, in words.
FEATURES = {
    "loop": "a layer visited more than once",
    "n..m": "loop counts chosen at run time",
    "group": "branches that read one stream, `{P|Q}`",
    "scale": "a damped update, `[scale=s]`",
    "gate": "an update weighed by a parameter, `[gate=...]`",
    "entry": "`emb` and `norm`, which act on the stream where a node begins",
    "inject": "`inject`, which adds a recorded stream",
    "lora": "adapters of single visits",
    "kv": "cache slots that visits share, `kv=first` and others",
}


class Earlier(NamedTuple):
    """What a wiring that looks back along the tokens needs to know of them.

    Attributes:
        valid: (B, T), which tokens of this pass are no padding; None when all are.
        held: by site, what it kept of the tokens before this pass.
        kept: by site, where it puts what the next pass will need; None when there is no cache.
    """

    valid: torch.Tensor | None = None
    held: Mapping[int, torch.Tensor] = {}
    kept: dict[int, torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a wiring is built for.

    Attributes:
        width: D.
        sites: in execution order, every loop at its maximum.
        layers: layers of the bank.
        visits: visits, every loop at its maximum.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_width: width of a head.
        eps: of the norms.
        depth: what constants of depth count: the program, or one before a change of it.
    """

    width: int
    sites: Sequence[Site]
    layers: int
    visits: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float
    depth: Depth

    @property
    def blocks(self) -> float:
        """Blocks of two sites, every turn of a loop counted: what constants that depend on depth are made of."""
        return self.depth.blocks


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in single precision at least, for what half precision would spoil."""
    return x if x.dtype == torch.float64 else x.float()


class Wiring(nn.Module):
    """One stream x: (B, T, D), which is the state; the base of every wiring.

    Class attributes:
        before: the parts whose input is normalised.
        after: the parts that have a second norm, which `write` applies.
        final: whether the stack normalises what `finish` gives.
        equals: how it equals the Pre-LN model of the same layers at initialisation; empty when it does not.
        refuses: those of `FEATURES` that it cannot carry, each with the reason.
        dead: parameters that can have no gradient, as a pattern of names with the reason; `name.3` is row 3 of `name`.
        marks: how far each piece is backed: C in a public source, K general knowledge of the method, N an identity that
            the tests check with numbers, R reconstructed or chosen here.
    """

    before: ClassVar[str] = "af"
    after: ClassVar[str] = ""
    final: ClassVar[bool] = True
    equals: ClassVar[str] = ""
    refuses: ClassVar[Mapping[str, str]] = {}
    dead: ClassVar[Mapping[str, str]] = {}
    marks: ClassVar[Mapping[str, str]] = {}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def reset(self) -> None:
        """Gives its parameters their initial values; called once they have memory."""

    def set_step(self, step: int) -> None:
        """Tells it how many steps of training are done; only schedules listen."""

    def initialise(self, layers: Mapping[int, nn.Module]) -> None:
        """Changes the initial values of the layers, after the recipe has set them."""

    def constants(self) -> Mapping[str, str]:
        """The fields of `Depth` that its constants depend on, each with the constants in words."""
        return {}

    def rescaled(self, before: Depth) -> Mapping[str, float]:
        """Factors of trained values that began at a constant of the depth `before` and would begin at another now.

        By the name of a parameter, of its own or in a layer, such as `a.after.weight`.
        """
        return {}

    def entries(self) -> Mapping[str, Entries]:
        """By parameter, which sites and visits its entries belong to, for a change of the program."""
        return {}

    def plan(self, plan: Plan) -> Plan:
        """The plan with the cache slots that this wiring gives its visits."""
        return plan

    def init(self, x: torch.Tensor, earlier: Earlier) -> State:
        """The state before the first site."""
        return x

    def read(self, state: State, site: Site) -> Read:
        """What the sublayer at this site sees."""
        return Read(state)

    def write(self, state: State, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> State:
        """The state with the output y: (B, T, D) of the site; `norm` is the layer's second norm for this part."""
        raise NotImplementedError

    def readout(self, state: State) -> torch.Tensor:
        """The stream (B, T, D) that marks, gates and hooks see, at any place of the program."""
        return state

    def finish(self, state: State) -> torch.Tensor:
        """The stream that the final norm and the head see."""
        return self.readout(state)

    def on_keys(self, state: State, site: Site, read: Read) -> OnKeys | None:
        """A hook on queries, keys and values of this site, or None; what it keeps goes to `write` in `read.carry`."""
        return None

    def beside(self, state: State, site: Site) -> Beside | None:
        """Keys and values that each token of this site has of its own, beside those of the sequence."""
        return None

    def slot(self, state: State, site: Site, read: Read) -> Slot | None:
        """In a pass without a cache: what takes this site's keys and values and says which it attends to."""
        return None

    def change(self, state: State, function: Callable[[torch.Tensor], torch.Tensor]) -> State:
        """The state with a function of (..., D) applied to each stream: loop embeddings, norms, injection."""
        return function(state)

    def combine(self, states: Sequence[State], weights: Sequence[float | torch.Tensor]) -> State:
        """states[0] + sum over the others of weight (state - states[0]), stream by stream: groups, scales and gates."""
        first, *others = states
        updates = [weight * (other - first) for weight, other in zip(weights, others, strict=True)]
        return first + sum(updates[1:], updates[0])
