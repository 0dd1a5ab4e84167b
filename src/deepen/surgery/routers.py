"""Routers that learn which experts a token needs, from what the feed-forward reads; experts are never changed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from deepen.errors import UsageError

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.experts import Experts

# Tokens of a step, and the rate of Adam, which falls along a cosine.
BATCH, RATE = 256, 3e-3
# Bounds of a probability in the prior-approximate loss.
LEAST = 1e-7

Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def trained(
    kind: str, reads: torch.Tensor, targets: torch.Tensor, loss: Loss, *, steps: int, seed: int
) -> dict[str, torch.Tensor]:
    """The tensors of a router after training.

    What it reads is scaled to a mean square of 1 first, and the scale is folded into its first matrix.

    Args:
        kind: `linear` or `mlp`.
        reads: what the feed-forward reads, [n, d].
        targets: what the loss compares scores with, [n, E].
        loss: of scores and targets, each [b, E].
        steps: of Adam.
        seed: of the initial values and of the order of the tokens.

    Raises:
        UsageError: fewer than one step.
    """
    import torch

    from deepen.checkpoint.experts import router

    if steps < 1:
        raise UsageError(f"a router is trained for at least 1 step, got {steps}")
    draw = torch.Generator().manual_seed(seed)
    made = router(kind, reads.shape[1], targets.shape[1])
    for parameter in made.parameters():
        bound = reads.shape[1] ** -0.5 if parameter.ndim > 1 else 0.0
        parameter.data.uniform_(-bound, bound, generator=draw)
    scale = reads.square().mean().sqrt().clamp_min(torch.finfo(reads.dtype).tiny)
    optimiser = torch.optim.Adam(made.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with torch.enable_grad():
        for _ in range(steps):
            at = torch.randint(len(reads), (min(BATCH, len(reads)),), generator=draw)
            optimiser.zero_grad()
            loss(made(reads[at] / scale), targets[at]).backward()
            optimiser.step()
            schedule.step()
    tensors = {name: value.detach() for name, value in made.named_parameters()}
    first = next(iter(tensors))
    return {**tensors, first: tensors[first] / scale}


def share_loss(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the router with the shares of the oracle's scores (MoEfication)."""
    return -(shares * scores.log_softmax(-1)).sum(-1).mean()


def prior_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL(softmax(scores), softmax(labels)), labels 1 for the experts that come nearest to the whole (FactorLLM)."""
    own, prior = (each.softmax(-1).clamp(LEAST, 1 - LEAST) for each in (scores, labels))
    return (own * (own.log() - prior.log())).sum(-1).mean()


def balance_loss(scores: torch.Tensor, active: int) -> torch.Tensor:
    """Mean of the probabilities of the chosen experts, the others counted as 0: it speaks against sure choices."""
    own = scores.softmax(-1)
    chosen = own.topk(active).indices
    return own.gather(-1, chosen).sum(-1).mean() / own.shape[-1]


def prior_labels(experts: Experts, reads: torch.Tensor) -> torch.Tensor:
    """1 for the k experts whose output is nearest to k / E of that of all, 0 for the others, [n, E]."""
    import torch

    count, active = experts.split.experts, experts.split.active
    labels = []
    for rows in reads.split(BATCH):
        parts = expert_outputs(experts, rows)
        apart = (parts - parts.sum(1, keepdim=True) * active / count).square().mean(-1)
        labels.append(torch.zeros_like(apart).scatter_(-1, apart.topk(active, largest=False).indices, 1.0))
    return torch.cat(labels)


def expert_outputs(experts: Experts, reads: torch.Tensor) -> torch.Tensor:
    """What each expert writes, without the bias of all, [n, E, d]."""
    import torch
    from torch import nn

    hidden = experts.hidden(reads).unflatten(-1, (experts.split.experts, -1))
    output = experts.maps()[-1]
    values = output.weight.T if isinstance(output, nn.Linear) else output.weight
    return torch.einsum("new,ewd->ned", hidden, values.unflatten(0, (experts.split.experts, -1)))


def key_centres(experts: Experts) -> torch.Tensor:
    """The mean key of each expert, at length 1, [E, d]: their products with a token order experts as cosines do."""
    from torch import nn

    gate = experts.maps()[gate_of(experts)]
    keys = gate.weight if isinstance(gate, nn.Linear) else gate.weight.T
    centres = keys.unflatten(0, (experts.split.experts, -1)).mean(1)
    return centres / centres.norm(dim=-1, keepdim=True).clamp_min(LEAST)


def gate_of(experts: Experts) -> int:
    """Which of the maps that read the stream the activation is applied to, found by trying."""
    import torch

    count = len(experts.maps()) - 1
    given = torch.linspace(-2, 2, 24).unflatten(0, (count, -1))
    plain = experts.between(*given)
    for at in range(count):
        twice = [each * 2 if index == at else each for index, each in enumerate(given)]
        if not torch.allclose(experts.between(*twice), 2 * plain, atol=1e-5):
            return at
    return 0


def figures(
    experts: Experts, router: str, tensors: Mapping[str, torch.Tensor], reads: torch.Tensor
) -> dict[str, float]:
    """How well a router chooses, on tokens that it was not fitted to.

    Args:
        experts: the feed-forward, its neurons expert by expert.
        router: the kind of the router.
        tensors: its tensors.
        reads: what the feed-forward reads, [n, d].

    Returns:
        `recall`, the share of the oracle's score that the chosen experts have; `oracle`, that of the best ones;
        `error`, |y - y of all|^2 / |y of all|^2, without the bias of all.
    """
    import torch
    from torch import nn

    masses = experts.masses(reads)
    chosen = chosen_by(experts, router, tensors, reads)
    # A token for which nothing fires loses nothing.
    total = masses.sum(-1).clamp_min(torch.finfo(masses.dtype).tiny)
    mask = torch.zeros_like(masses).scatter_(-1, chosen, 1.0)
    unused = experts.split.experts - experts.split.active
    output = experts.maps()[-1]
    values = output.weight.T if isinstance(output, nn.Linear) else output.weight
    hidden = experts.hidden(reads)
    whole = hidden @ values
    lost = (hidden.unflatten(-1, (experts.split.experts, -1)) * (1 - mask)[..., None]).flatten(1) @ values
    return {
        "recall": 1 - ((masses * (1 - mask)).sum(-1) / total).mean().item(),
        "oracle": 1 - (masses.topk(unused, largest=False).values.sum(-1) / total).mean().item(),
        "error": (lost.square().sum() / whole.square().sum().clamp_min(torch.finfo(lost.dtype).tiny)).item(),
    }


def chosen_by(experts: Experts, kind: str, tensors: Mapping[str, torch.Tensor], reads: torch.Tensor) -> torch.Tensor:
    """The experts that a router chooses, [n, k]."""
    from deepen.checkpoint.experts import router

    if kind == "oracle":
        return experts.chosen(reads)
    made = router(kind, experts.stream, experts.split.experts)
    made.load_state_dict(dict(tensors))
    return made(reads).topk(experts.split.active).indices.detach()


def mean_figures(layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means over layers."""
    return {name: fmean(each[name] for each in layers) for name in (layers[0] if layers else {})}
