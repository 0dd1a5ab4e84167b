r"""MoEfication: the neurons of trained feed-forwards are grouped into experts, of which each token runs some.

    W_in, W_gate    rows    P W        P: a permutation that puts the neurons of an expert side by side
    W_out           columns W P'       a neuron is its rows in and its column out, so y stays

    coactivation    neurons that write for the same tokens:  G = mean over tokens of a a' / (sum of a)^2,
                    a_i = |h_i| |v_i|   (h hidden value, v column of the output matrix)
    weights         neurons whose rows point the same way:  G = R R',  R the rows of the input matrices, at length 1

Both maximise the sum of G inside experts of one size (`deepen.surgery.clusters`). Then a router is made: see
`deepen.checkpoint.experts`. With all experts active the model is the original, whatever the router.

The paper splits ReLU feed-forwards, whose hidden values are mostly zero, by |h_i|. Those of gated ones are not: less
can be left out, and |h_i| alone depends on how a neuron's size is shared between its two sides; |h_i| |v_i| does not.

Cost: k / E of the feed-forward's parameters and FLOPs a token, and the router. The oracle computes all hidden values to
choose; it bounds what a router can reach. Nothing is trained but the router; the choice has no gradient.

Zhang, Lin, Liu, Li, Sun, Zhou, MoEfication: Transformer Feed-forward Layers are Mixtures of Experts, arXiv:2110.01786.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from deepen.errors import UsageError, nearest
from deepen.registry import method
from deepen.surgery.clusters import clusters
from deepen.surgery.expert_layers import NewSplit, chosen_layers, measured, reordered, with_experts
from deepen.surgery.place import tower_key
from deepen.surgery.report import Report, report
from deepen.surgery.routers import figures, key_centres, mean_figures, share_loss, trained

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.experts import Experts
    from deepen.surgery.feed_inputs import FeedInputs

By = Literal["coactivation", "weights"]
Router = Literal["oracle", "mlp", "similarity"]
WAYS, ROUTERS = ("coactivation", "weights"), ("oracle", "mlp", "similarity")
STEPS = 600


@method(
    "moefication",
    family="surgery",
    source="arXiv:2110.01786",
    title="MoEfication: Transformer Feed-forward Layers are Mixtures of Experts",
    mechanism="neurons that act together become experts of one size; a router runs k of E for each token",
    cost="k / E of the feed-forward a token, and a router; no training but the router's",
)
def moefy(
    ck: Checkpoint,
    *,
    experts: int,
    active: int,
    data: FeedInputs | None = None,
    by: By = "coactivation",
    router: Router = "mlp",
    layers: Sequence[int] | None = None,
    steps: int = STEPS,
    seed: int = 0,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Splits the feed-forwards of the visited layers into experts.

        split, report = deepen.moefy(ck, experts=12, active=3, data=deepen.feed_inputs(ck, text))

    The report's figures are means over layers, on the fifth of the data that nothing was fitted to: `recall`, the share
    of the oracle's score that the chosen experts have; `oracle`, the share that the best ones have; `error`, the
    squared error of what the feed-forward writes as a share of its square.

    Args:
        ck: what to change.
        experts: E; it divides the width of every feed-forward.
        active: k, the experts that a token runs.
        data: from `deepen.feed_inputs`, for this program; only `weights` with a router that is not trained needs none.
        by: which neurons belong together: `coactivation` or `weights`.
        router: `oracle`, `mlp` or `similarity`.
        layers: stored layers to split; all that are visited where none are named.
        steps: of the training of an mlp router.
        seed: of the clusters and of the router.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: numbers that do not fit the width, an unknown word, or no data where some is needed.
        ProgramError: a layer that does not exist.
        FamilyError: feed-forwards that are not out(act(in x)) or down(act(gate x) * up x).
        CheckpointError: tensors whose values are codes.
    """
    from deepen.checkpoint.experts import Split

    found, _ = tower_key(ck, tower)
    for word, known in ((by, WAYS), (router, ROUTERS)):
        if word not in known:
            raise UsageError(f"moefy: {word!r} is unknown{nearest(word, known)}; expected one of {', '.join(known)}")
    if data is None and (by == "coactivation" or router == "mlp"):
        what = "clusters by coactivation" if by == "coactivation" else "a router that is trained"
        raise UsageError(f"moefy: {what} need data; give deepen.feed_inputs(ck, text)")
    if data is not None:
        data.require(ck, found.name, "moefy")
    split = Split(experts, active, router)
    shapes = chosen_layers(ck, found, layers, "moefy")
    for layer, shape in shapes.items():
        split.require(shape.width, f"{ck.where}: moefy: layer {layer}")
    made: dict[int, NewSplit] = {}
    for layer, shape in shapes.items():
        whole = measured(ck, found, layer, shape, split)
        fitted, held = data.halves(layer, "moefy") if data is not None else (None, None)
        gram = row_gram(whole) if by == "weights" or fitted is None else coactivation(whole, fitted)
        order = clusters(gram, experts, seed)
        grouped = reordered(whole, order)
        tensors = router_of(grouped, router, fitted, steps=steps, seed=seed)
        made[layer] = NewSplit(order, tensors, {} if held is None else figures(grouped, router, tensors, held))
    result = with_experts(ck, found, shapes, made, split)
    return result, report(
        ck, result, found.name, "moefication",
        f"split the feed-forwards of {len(made)} layers into {experts} experts by {by}, {active} of them active, "
        f"chosen by the router {router}",
        folded=tuple(f"{ck.disk[found.name].prefix}.{layer}.{shapes[layer].module}" for layer in made),
        same_as=str(ck.program) if active == experts else None,
        figures=mean_figures([each.figures for each in made.values()]),
    )  # fmt: skip


def router_of(
    grouped: Experts, router: Router, fitted: torch.Tensor | None, *, steps: int, seed: int
) -> dict[str, torch.Tensor]:
    """The tensors of a router for experts, trained where it is an mlp on what the feed-forward reads, [n, d]."""
    if router == "similarity":
        return {"weight": key_centres(grouped)}
    if router == "oracle" or fitted is None:
        return {}
    masses = grouped.masses(fitted)
    shares = masses / masses.sum(-1, keepdim=True).clamp_min(1e-30)
    return trained("mlp", fitted, shares, share_loss, steps=steps, seed=seed)


def coactivation(whole: Experts, reads: torch.Tensor) -> torch.Tensor:
    """How much two neurons write for the same tokens, [m, m]."""
    from torch import nn

    output = whole.maps()[-1]
    wrote = whole.hidden(reads).abs() * output.weight.norm(dim=0 if isinstance(output, nn.Linear) else 1)
    shares = wrote / wrote.sum(-1, keepdim=True).clamp_min(1e-30)
    return shares.T @ shares


def row_gram(whole: Experts) -> torch.Tensor:
    """Cosines of the rows of neurons, summed over the input matrices, [m, m]."""
    import torch
    from torch import nn

    total = torch.zeros(whole.width, whole.width)
    for matrix in whole.maps()[:-1]:
        rows = matrix.weight if isinstance(matrix, nn.Linear) else matrix.weight.T
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        total += rows @ rows.T
    return total
