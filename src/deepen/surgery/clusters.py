r"""Equal clusters of neurons that belong together.

    maximise sum over clusters c of sum_{i, j in c} G_ij          G [m, m] symmetric, E clusters of m / E neurons

For G = R R' with rows R this is k-means with clusters of one size, since the means then count equally:
\|sum of R_i in c\|^2 summed over c. For the rows `shares of a token` it is the mean over tokens of the sum of squared
shares of the clusters: the fewer clusters hold what a token needs, the larger it is.

From a random partition, neurons of two clusters change places while that helps, as Kernighan and Lin do. No exchange
makes it worse, and it ends where no single exchange helps, or after `PASSES` rounds over all neurons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PASSES = 20


def clusters(gram: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """The neurons cluster by cluster, [m]; ascending inside each, the clusters by their first neuron.

    Args:
        gram: how much two neurons belong together, [m, m].
        count: how many clusters; it divides m.
        seed: of the partition it starts from.
    """
    import torch

    near = gram.double().numpy().copy()
    np.fill_diagonal(near, 0)
    size = len(near) // count
    label = np.random.default_rng(seed).permutation(np.arange(len(near)) // size)
    # What each neuron has in common with each cluster, [m, E].
    common = near @ np.eye(count)[label]
    scale = np.abs(near).max() * 1e-9
    for _ in range(PASSES if count > 1 else 0):
        if not _pass(near, label, common, scale):
            break
    members = sorted((np.flatnonzero(label == each) for each in range(count)), key=lambda each: each[0])
    return torch.from_numpy(np.concatenate(members))


def _pass(near: np.ndarray, label: np.ndarray, common: np.ndarray, least: float) -> int:
    """Exchanges each neuron with the one that gains most by it, where anything does; returns how many there were."""
    exchanged, everyone = 0, np.arange(len(near))
    own = common[everyone, label]
    for one in everyone:
        here = label[one]
        gain = common[one, label] - common[one, here] + common[:, here] - own - 2 * near[one]
        gain[label == here] = -np.inf
        other = int(gain.argmax())
        if gain[other] <= least:
            continue
        there = label[other]
        moved = near[:, other] - near[:, one]
        common[:, here] += moved
        common[:, there] -= moved
        label[one], label[other] = there, here
        own = common[everyone, label]
        exchanged += 1
    return exchanged


def together(gram: torch.Tensor, order: torch.Tensor, count: int) -> float:
    """The sum that `clusters` maximises, for neurons in this order, without the diagonal."""
    blocks = gram[order][:, order].double().unflatten(0, (count, -1)).unflatten(-1, (count, -1))
    whole = sum(blocks[each, :, each].sum().item() for each in range(count))
    return whole - gram.diagonal().double().sum().item()
