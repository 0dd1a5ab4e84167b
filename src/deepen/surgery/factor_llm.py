r"""FactorLLM: the neurons of a trained feed-forward are cut into equal experts as they lie; a router learns a prior.

    y = b + sum of E_e(x) over the k experts with the highest W_r x + b_r         no weights, no rescaling
    r_e = mean over d of (E_e(x) - k / N (y_all - b))^2                           how far an expert is from its share
    label = 1 for the k experts of the smallest r, else 0
    loss = KL(softmax(W_r x + b_r), softmax(label)) + c mean over experts of (chosen * softmax(W_r x + b_r))

x is what the feed-forward reads in the original model, so the layers are trained one by one and apart from each other,
and the labels are constants: no gradient reaches an expert. The paper adds the loss of the language model, which the
choice of experts passes no gradient of to the router: `deepen.heal` of the saved result trains the experts with it.

With k = N it is the original model. Cost: k / N of the feed-forward's parameters and FLOPs a token, and d N + N values
for the router.

Zhao et al., FactorLLM: Factorizing Knowledge via Mixture of Experts for Large Language Models, arXiv:2408.11855. The
weights of the losses are not stated there; c is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from deepen.errors import UsageError
from deepen.registry import method
from deepen.surgery.expert_layers import NewSplit, chosen_layers, measured, with_experts
from deepen.surgery.place import tower_key
from deepen.surgery.report import Report, report
from deepen.surgery.routers import (
    balance_loss,
    chosen_by,
    figures,
    mean_figures,
    prior_labels,
    prior_loss,
    trained,
)

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.experts import Experts
    from deepen.surgery.feed_inputs import FeedInputs

BALANCE = 0.01
STEPS = 600


@method(
    "factor-llm",
    family="surgery",
    source="arXiv:2408.11855",
    title="FactorLLM: Factorizing Knowledge via Mixture of Experts for Large Language Models",
    mechanism="neurons become equal experts as they lie; a linear router learns which come nearest to their share",
    cost="k / N of the feed-forward a token, and a linear router",
)
def factor_llm(
    ck: Checkpoint,
    data: FeedInputs,
    *,
    experts: int = 4,
    active: int = 2,
    balance: float = BALANCE,
    layers: Sequence[int] | None = None,
    steps: int = STEPS,
    seed: int = 0,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Cuts the feed-forwards of the visited layers into experts and trains a router for each.

        split, report = deepen.factor_llm(ck, deepen.feed_inputs(ck, text), experts=4, active=2)

    The report's figures are those of `deepen.moefy`, and `agreement`, the share of the labels that the router chooses,
    on the fifth of the data that nothing was fitted to.

    Args:
        ck: what to change.
        data: from `deepen.feed_inputs`, for this program.
        experts: N; it divides the width of every feed-forward.
        active: k, the experts that a token runs.
        balance: c.
        layers: stored layers to split; all that are visited where none are named.
        steps: of the training of a router.
        seed: of the router.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: numbers that do not fit the width, or data of another program.
        ProgramError: a layer that does not exist.
        FamilyError: feed-forwards that are not out(act(in x)) or down(act(gate x) * up x).
        CheckpointError: tensors whose values are codes.
    """
    from deepen.checkpoint.experts import Split

    found, _ = tower_key(ck, tower)
    if balance < 0:
        raise UsageError(f"factor_llm: the weight of the balance loss is 0 or more, got {balance}")
    data.require(ck, found.name, "factor_llm")
    split = Split(experts, active, "linear")
    shapes = chosen_layers(ck, found, layers, "factor_llm")
    for layer, shape in shapes.items():
        split.require(shape.width, f"{ck.where}: factor_llm: layer {layer}")
    made: dict[int, NewSplit] = {}
    for layer, shape in shapes.items():
        whole = measured(ck, found, layer, shape, split)
        fitted, held = data.halves(layer, "factor_llm")
        tensors = prior_router(whole, fitted, balance=balance, steps=steps, seed=seed)
        chosen = chosen_by(whole, "linear", tensors, held)
        agreement = prior_labels(whole, held).gather(-1, chosen).mean().item()
        told = {**figures(whole, "linear", tensors, held), "agreement": agreement}
        made[layer] = NewSplit(None, tensors, told)
    result = with_experts(ck, found, shapes, made, split)
    return result, report(
        ck, result, found.name, "factor-llm",
        f"cut the feed-forwards of {len(made)} layers into {experts} experts, {active} of them active, chosen by a "
        "linear router that was trained on the prior of the whole ones",
        folded=tuple(f"{ck.disk[found.name].prefix}.{layer}.{shapes[layer].module}" for layer in made),
        same_as=str(ck.program) if active == experts else None,
        figures=mean_figures([each.figures for each in made.values()]),
    )  # fmt: skip


def prior_router(
    whole: Experts, fitted: torch.Tensor, *, balance: float = BALANCE, steps: int, seed: int
) -> dict[str, torch.Tensor]:
    """The tensors of a router that is trained on what the feed-forward reads, [n, d]."""
    loss = partial(router_loss, active=whole.split.active, balance=balance)
    return trained("linear", fitted, prior_labels(whole, fitted), loss, steps=steps, seed=seed)


def router_loss(scores: torch.Tensor, labels: torch.Tensor, *, active: int, balance: float) -> torch.Tensor:
    """The loss of a router, for scores and labels [n, N]."""
    return prior_loss(scores, labels) + balance * balance_loss(scores, active)
