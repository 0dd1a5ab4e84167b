r"""Low-rank attention, narrower feed-forwards: every matrix by what it reads on a text.

    W ~ L R        L = U_r S_r^1/2,  R = S_r^1/2 V_r' D^-1          W D = U S V',  D = diag(root mean square read)

L R is the nearest matrix of rank r to W in |(W - L R) D|, which weighs each column by how large a value it multiplies;
what is left is the root of the sum of the squared singular values beyond r. With D = 1 it is the plain truncated SVD.

    share of the values of a matrix that its factors hold        p: `keep`, a = 3: `ratio`
        queries, keys       2 p / (1 + a)
        values, output      2 p a / (1 + a)         together p; above 1 the matrix stays whole, and queries and keys
                                                    get 2 p - 1

Keys and values may be narrower than queries, so the rank is that share of out in / (out + in), rounded down: for square
matrices, the ranks of the paper. A matrix whose share is 1 stays dense here; the paper factors it at half the rank,
which costs the same and loses something. Feed-forwards are narrowed as `deepen.narrow` does with `least=0.01`: the
channels of the very lowest scores stay.

Cost: p of the attention and feed-forward parameters and FLOPs. The factors are stored and run as such, in the native
form; a baked checkpoint multiplies them out, to its full size.

Li et al., LoRAP, arXiv:2404.09695.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from deepen.checkpoint.computed import Computed, layer_tensors, with_tensors
from deepen.checkpoint.recipes import Copy, Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.errors import FamilyError, UsageError
from deepen.registry import method
from deepen.surgery.narrow import narrow
from deepen.surgery.place import tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower
    from deepen.surgery.activations import Activations

# The share of channels that LoRAP keeps for having the lowest scores.
LEAST = 0.01
# How much more of values and output is kept than of queries and keys.
RATIO = 3.0
SMALL, LARGE = ("q_proj", "k_proj"), ("v_proj", "o_proj")


@method(
    "low-rank",
    family="surgery",
    source="arXiv:2404.09695",
    title="LoRAP: Transformer Sub-Layers Deserve Differentiated Structured Compression for Large Language Models",
    mechanism="attention matrices become two factors by activation-weighted SVD; feed-forward channels go by score",
    cost="a share of the parameters and FLOPs of attention and feed-forwards",
)
def low_rank(
    ck: Checkpoint,
    activations: Activations,
    *,
    keep: float = 0.75,
    ratio: float = RATIO,
    rank: int | None = None,
    feed_forward: bool = True,
    multiple: int = 64,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Factors the attention matrices of the visited layers and narrows their feed-forwards.

        small, report = deepen.low_rank(ck, deepen.activations(ck, text), keep=0.8)

    Args:
        ck: what to change; its attention has matrices of its own for queries, keys, values and output.
        activations: from `deepen.activations`, for this program.
        keep: the share of parameters that stays.
        ratio: how much more of values and output stays than of queries and keys.
        rank: the rank of all four matrices, in place of `keep` and `ratio` for attention.
        feed_forward: narrow the feed-forwards too.
        multiple: the width of a feed-forward is a multiple of this number.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: a share, ratio or rank out of range, or activations of another program.
        FamilyError: attention whose matrices are fused, or factored already, or feed-forwards that cannot be narrowed.
        CheckpointError: tensors whose values are codes.
    """
    found, _ = tower_key(ck, tower)
    if not 0 < keep <= 1:
        raise UsageError(f"low_rank: the share that stays is above 0 and at most 1, got {keep}")
    if not ratio >= 1:
        raise UsageError(f"low_rank: the ratio of values to queries is 1 or more, got {ratio}")
    activations.require(ck, found.name, "low_rank")
    small, large = shares(keep, ratio)
    visited = sorted({key.layer for key in ck.plan(found.name).keys})
    ranks: dict[int, dict[str, int]] = {}
    for layer in visited:
        for path, (out, into) in attention_matrices(ck, found, layer).items():
            share = small if path.endswith(SMALL) else large
            chosen = int(share * out * into / (out + into)) if rank is None else rank
            if not 1 <= chosen <= min(out, into):
                raise UsageError(
                    f"low_rank: rank {chosen} for {path} of layer {layer}, which is {out} x {into}; expected 1 to "
                    f"{min(out, into)}"
                )
            if rank is not None or share < 1:
                ranks.setdefault(layer, {})[path] = chosen
    made = _factored(ck, found, ranks, activations)
    if feed_forward:
        made, _ = narrow(made, activations, keep=keep, least=LEAST, multiple=multiple, tower=found.name)
    prefix = ck.disk[found.name].prefix
    before, after = (each.cost().params for each in (ck, made))
    each = sorted({(path.rpartition(".")[2], rank) for paths in ranks.values() for path, rank in paths.items()})
    return made, report(
        ck, made, found.name, "low-rank",
        f"factored {sum(map(len, ranks.values()))} matrices in {len(visited)} layers"
        + (f" ({', '.join(f'{name} at rank {rank}' for name, rank in each)})" if each else "")
        + ("; narrowed the feed-forwards" if feed_forward else ""),
        folded=tuple(f"{prefix}.{layer}.{path}" for layer, paths in ranks.items() for path in paths),
        figures={"parameters": after / before},
    )  # fmt: skip


def shares(keep: float, ratio: float = RATIO) -> tuple[float, float]:
    """The share of their values that queries and keys keep, and that values and output keep."""
    large = 2 * ratio * keep / (1 + ratio)
    return (2 * keep - 1, 1.0) if large >= 1 else (2 * keep / (1 + ratio), large)


def attention_matrices(ck: Checkpoint, tower: Tower, layer: int) -> dict[str, tuple[int, int]]:
    """The four matrices of a layer's attention, by path, with what they give and read.

    Raises:
        FamilyError: one of them is missing, or is no linear map of its own.
    """
    from torch import nn

    from deepen.checkpoint.widths import bank_modules

    module = bank_modules(ck, tower)[layer]
    owned = layer_tensors(ck, tower, layer)
    found: dict[str, tuple[int, int]] = {}
    for path, child in module.named_modules():
        name = path.rpartition(".")[2]
        if name in (*SMALL, *LARGE) and type(child) is nn.Linear and f"{path}.weight" in owned:
            found[path] = (child.out_features, child.in_features)
    names = sorted(path.rpartition(".")[2] for path in found)
    if names != sorted((*SMALL, *LARGE)):
        raise FamilyError(
            f"{ck.where}: layer {layer} of {ck.family.model_type} has {', '.join(names) or 'none'} of the linear maps "
            f"{', '.join((*SMALL, *LARGE))}; low-rank attention needs each of them once, dense and unfused"
        )
    return found


def _factored(
    ck: Checkpoint, tower: Tower, ranks: Mapping[int, Mapping[str, int]], activations: Activations
) -> Checkpoint:
    """The checkpoint with factors in the place of matrices."""
    infos, layers, hidden = ck.source.infos, {}, []
    for layer, paths in ranks.items():
        owned = layer_tensors(ck, tower, layer)
        tensors: dict[str, Recipe] = {}
        for path, rank in paths.items():
            full = owned[f"{path}.weight"]
            matrix = Copy(full, infos[full])
            root = activations.square(layer, path).sqrt()
            split = _once(lambda old, root=root, rank=rank: factors(old, root, rank))
            out, into = matrix.shape
            for side, shape in (("left", (out, rank)), ("right", (rank, into))):
                pick = lambda old, side=side, split=split: split(old, side == "right")  # noqa: E731
                tensors[f"{path}.{side}.weight"] = Computed(
                    TensorInfo(matrix.dtype, shape), (matrix,), pick, f"factoring {full}"
                )
            hidden.append(full)
            if f"{path}.bias" in owned:
                bias = owned[f"{path}.bias"]
                tensors[f"{path}.left.bias"] = Copy(bias, infos[bias])
                hidden.append(bias)
        layers[layer] = tensors
    known = {**ck.factors.get(tower.name, {})}
    for layer, paths in ranks.items():
        known[layer] = {**known.get(layer, {}), **paths}
    made = with_tensors(ck, tower, layers, hidden)
    return replace(made, factors={**ck.factors, tower.name: known}) if ranks else made


def _once(split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """One decomposition for both factors: what one of them leaves is kept until the other is asked for."""
    kept: dict[bool, torch.Tensor] = {}

    def factor(matrix: torch.Tensor, right: bool) -> torch.Tensor:
        if right not in kept:
            kept[False], kept[True] = split(matrix)
        return kept.pop(right)

    return factor


def factors(matrix: torch.Tensor, root: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """L [out, r] and R [r, in]: the nearest to a matrix [out, in] when column j counts `root[j]` times.

    Args:
        matrix: W, [out, in].
        root: the diagonal of D, [in], above 0.
        rank: r.
    """
    import torch

    wide = root.to(torch.float64)
    left, values, right = torch.linalg.svd(matrix.double() * wide, full_matrices=False)
    size = values[:rank].sqrt()
    return (left[:, :rank] * size).to(matrix.dtype), (size[:, None] * right[:rank] / wide).to(matrix.dtype)
