r"""MoEfication and FactorLLM of a native stack: its dense feed-forwards become `moefied` ones.

    stack, tokens ── what each feed-forward reads ── order of its neurons ── router ── stack of experts

The neurons, clusters, routers and figures are those of `deepen.moefy` and `deepen.factor_llm`; the stack is of another
configuration (`feed_forward: {name: moefied, ...}`), which every wiring and program run, and which is saved and opened
like any other. With all experts active its logits are those of the dense stack.

Zhang et al., MoEfication, arXiv:2110.01786; Zhao et al., FactorLLM, arXiv:2408.11855.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from deepen.errors import DataError, UsageError, nearest
from deepen.surgery.clusters import clusters
from deepen.surgery.expert_layers import reordered
from deepen.surgery.factor_llm import prior_router
from deepen.surgery.feed_inputs import FeedInputs
from deepen.surgery.moefy import ROUTERS, STEPS, WAYS, By, Router, coactivation, router_of, row_gram
from deepen.surgery.routers import figures, mean_figures

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deepen.checkpoint.experts import Experts, Split
    from deepen.stack.stack import Stack
    from deepen.sublayers.ffn.dense import Dense

Method = Literal["moefication", "factor-llm"]
WORDS = {"method": ("moefication", "factor-llm"), "by": WAYS, "router": ROUTERS}
# The names of an mlp router's tensors: as the routers are trained, and in the stack.
NAMES = {"0.weight": "inner", "0.bias": "inner_bias", "2.weight": "weight", "2.bias": "bias"}


@dataclass(frozen=True, kw_only=True)
class SplitStack:
    """A stack whose feed-forwards are split, and how well that went.

    Attributes:
        stack: of the new configuration, in eval mode.
        figures: means over layers, on the fifth of the tokens that nothing was fitted to; see `deepen.moefy`.
    """

    stack: Stack
    figures: Mapping[str, float]


def split_experts(
    stack: Stack,
    batches: Iterable[torch.Tensor],
    *,
    experts: int,
    active: int,
    method: Method = "moefication",
    by: By = "coactivation",
    router: Router = "mlp",
    steps: int = STEPS,
    seed: int = 0,
) -> SplitStack:
    """Splits the feed-forwards of all layers into experts.

        split = deepen.split_experts(stack, [tokens], experts=8, active=2)

    Args:
        stack: with dense feed-forwards; it stays as it is.
        batches: inputs of the stack, such as token ids [b, t].
        experts: E; it divides the hidden width.
        active: k, the experts that a token runs.
        method: `moefication`, or `factor-llm`: neurons as they lie, and a linear router trained on the prior.
        by: of MoEfication, which neurons belong together.
        router: of MoEfication, what chooses.
        steps: of the training of a router.
        seed: of the clusters and of the router.

    Raises:
        UsageError: numbers that do not fit the width, an unknown word, another feed-forward than a dense one, or
            fewer than five tokens for a layer.
        DataError: values that are not finite.
    """
    from deepen.checkpoint.experts import Split
    from deepen.stack.config import StackConfig
    from deepen.stack.stack import Stack
    from deepen.sublayers.ffn.dense import Dense

    for field, word in (("method", method), ("by", by), ("router", router)):
        if word not in WORDS[field]:
            known = ", ".join(WORDS[field])
            raise UsageError(
                f"split_experts: {field} {word!r} is unknown{nearest(word, WORDS[field])}; there are {known}"
            )
    if hasattr(batches, "shape"):
        raise UsageError("split_experts: expected batches, such as [tokens]; got one tensor")
    factor = method == "factor-llm"
    split = Split(experts, active, "linear" if factor else router)
    split.require(stack.config.inner, "split_experts")
    dense: list[Any] = [layer.get_submodule("f.sublayer") for layer in stack.layers]
    if not isinstance(dense[0], Dense):
        raise UsageError(
            f"split_experts: the feed-forward {stack.config.feed_forward!r} is not a dense one of two maps, such as "
            "swiglu or gelu; only the neurons of those can be grouped"
        )
    table = {"name": "moefied", "experts": experts, "top": active, "router": split.router, "form": dense[0].name}
    config = StackConfig.read(
        {**stack.config.model_dump(mode="json"), "feed_forward": table, "hidden": stack.config.inner}
    )
    reads = _reads(stack, dense, batches)
    state = {name: value for name, value in stack.state_dict().items() if ".f.sublayer." not in name}
    told = []
    for layer, each in enumerate(dense):
        fitted, held = reads.halves(layer, "split_experts")
        made = _split(each, split, fitted, held, factor=factor, by=by, steps=steps, seed=seed)
        told.append(made.figures)
        state |= {f"layers.{layer}.f.sublayer.{name}": value for name, value in made.tensors.items()}
    new = Stack(config, seed=seed).to(next(stack.parameters()))
    new.load_state_dict(state)
    new.checkpointing = stack.checkpointing
    return SplitStack(stack=new.eval(), figures=mean_figures(told))


def active_experts(stack: Stack, active: int) -> Stack:
    """A copy of a stack of `split_experts` in which a token runs so many experts.

    Raises:
        UsageError: not such a stack, or more experts than it has.
    """
    from deepen.stack.config import StackConfig
    from deepen.stack.stack import Stack

    table = stack.config.feed_forward
    if not isinstance(table, dict) or table.get("name") != "moefied":
        raise UsageError(
            f"active_experts: the feed-forward is {table!r}, not one of experts that deepen.split_experts made"
        )
    config = StackConfig.read({**stack.config.model_dump(mode="json"), "feed_forward": {**table, "top": active}})
    new = Stack(config).to(next(stack.parameters()))
    new.load_state_dict(stack.state_dict())
    return new.train(stack.training)


def _reads(stack: Stack, dense: list[Dense], batches: Iterable[torch.Tensor]) -> FeedInputs:
    """What the feed-forward of each layer reads, at all its visits."""
    import torch

    kept: list[list[torch.Tensor]] = [[] for _ in dense]
    handles = [each.register_forward_pre_hook(partial(_keep, own)) for each, own in zip(dense, kept, strict=True)]
    training = stack.training
    try:
        stack.eval()
        with torch.no_grad():
            for batch in batches:
                stack(batch)
    finally:
        stack.train(training)
        for handle in handles:
            handle.remove()
    reads = {at: torch.cat(pieces) for at, pieces in enumerate(kept) if pieces}
    for at, each in reads.items():
        if not bool(each.isfinite().all()):
            raise DataError(f"split_experts: what the feed-forward of layer {at} reads is not finite")
    return FeedInputs(program=str(stack.config.program), tower="", reads=reads)


def _keep(pieces: list[torch.Tensor], module: nn.Module, given: tuple[Any, ...]) -> None:
    """Keeps what a feed-forward reads, [n, d]."""
    pieces.append(given[0].u.detach().flatten(0, -2).float().cpu())


@dataclass(frozen=True)
class _New:
    """The tensors of a moefied feed-forward by their names in it, and what was measured."""

    tensors: Mapping[str, torch.Tensor]
    figures: Mapping[str, float]


def _split(
    dense: Dense, split: Split, fitted: torch.Tensor, held: torch.Tensor, *, factor: bool, by: By, **training: int
) -> _New:
    import torch

    count = split.experts
    whole, at = _measured(dense, replace(split, router="oracle")), torch.arange(dense.sizes.hidden)
    if factor:
        tensors = prior_router(whole, fitted, **training)
    else:
        at = clusters(row_gram(whole) if by == "weights" else coactivation(whole, fitted), count, training["seed"])
        tensors = router_of(reordered(whole, at), cast(Router, split.router), fitted, **training)
    told = figures(whole, split.router, tensors, held)

    def rows(of: torch.Tensor) -> torch.Tensor:
        """The rows of each expert, those of its gate first."""
        pieces = of.detach().chunk(2 if dense.form.gated else 1)
        return torch.cat([piece[at].unflatten(0, (count, -1)) for piece in pieces], dim=1)

    found = {
        "experts.up": rows(dense.up.weight),
        "experts.down": dense.down.weight.detach()[:, at].unflatten(1, (count, -1)).transpose(0, 1),
    }
    if dense.sizes.bias:
        found |= {"experts.up_bias": rows(dense.up.bias), "bias": dense.down.bias.detach()}
    names = NAMES if split.router == "mlp" else {}
    return _New(found | {f"router.{names.get(name, name)}": each for name, each in tensors.items()}, told)


def _measured(dense: Dense, split: Split) -> Experts:
    """A dense feed-forward in fp32 as the surgery of checkpoints measures one."""
    import torch
    from torch import nn

    from deepen.checkpoint.experts import Experts
    from deepen.checkpoint.widths import FeedForward

    values = {name: each.float().cpu() for name, each in dense.state_dict().items()}
    names = ("gate", "value") if dense.form.gated else ("up",)
    given = {name: values[f"up.{name}"].chunk(len(names)) for name in ("weight", "bias") if f"up.{name}" in values}

    class Whole(nn.Module):
        """The maps with the form of the feed-forward between them."""

        def __init__(self) -> None:
            super().__init__()
            for at, name in enumerate(names):
                self.add_module(name, _linear(**{kind: pieces[at] for kind, pieces in given.items()}))
            self.down = _linear(values["down.weight"], values.get("down.bias"))

        def forward(self, u: torch.Tensor) -> torch.Tensor:
            rows = torch.cat([self.get_submodule(name)(u) for name in names], dim=-1)
            return self.down(dense.form(rows, dense.sizes.gelu))

    shape = FeedForward("", names, "down", dense.sizes.hidden, dense.sizes.width)
    return Experts(Whole(), shape, split).requires_grad_(False).eval()


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A map with these values."""
    from torch import nn

    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, False)
    if bias is not None:
        made.bias = nn.Parameter(bias, False)
    return made
