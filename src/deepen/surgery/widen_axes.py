"""What each axis of each tensor of a family counts, and how it is filled when it grows.

index_j     which old entry the new entry j is made of; one past the last stands for the mean of all
factor_j    what it is multiplied by
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Widths of a model.

    Attributes:
        stream: values of the stream.
        hidden: hidden values of a feed-forward.
        heads: query heads.
        groups: heads of keys and values.
        size: values of a head.
    """

    stream: int
    hidden: int
    heads: int
    groups: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tensors and config fields of a family.

    Attributes:
        layer: what the axes of each tensor of a layer count, by its name inside the layer; None: not a width.
        ends: the same for the tensors outside the layers.
        stream: config field of the width of the stream.
        hidden: config field of the feed-forward width.
        heads: config field of the query heads.
        eps: config field of what norms add to the mean square.
        centred: the norms subtract the mean.
        fills: all heads together are as wide as the stream.
        key_norms: queries and keys have norms of their own, with the same `eps`.
    """

    layer: Mapping[str, tuple[str | None, ...]]
    ends: Mapping[str, tuple[str | None, ...]]
    stream: str = "hidden_size"
    hidden: str = "intermediate_size"
    heads: str = "num_attention_heads"
    eps: str = "rms_norm_eps"
    centred: bool = False
    fills: bool = False
    key_norms: bool = False

    def live(self, old: Widths, new: Widths) -> float:
        """The share of the variance of the old stream that a norm of the new one sees under `lemon`."""
        copies = new.stream // old.stream if self.centred else 1
        return copies * old.stream / new.stream


@dataclass(frozen=True, eq=False)
class Spread:
    """How an axis is filled.

    Attributes:
        size: old entries.
        index: for each new entry the old one, or `size` for the mean of all.
        factor: for each new entry what it is multiplied by.
    """

    size: int
    index: tuple[int, ...]
    factor: tuple[float, ...]

    @property
    def unchanged(self) -> bool:
        """Whether it changes nothing."""
        return self.index == tuple(range(self.size)) and set(self.factor) == {1.0}

    def along(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """The tensor with this axis filled anew."""
        import torch

        if self.size in self.index:
            tensor = torch.cat([tensor, tensor.mean(axis, keepdim=True)], axis)
        factor = torch.tensor(self.factor, dtype=tensor.dtype)
        sides = [-1 if at == axis else 1 for at in range(tensor.dim())]
        return tensor.index_select(axis, torch.tensor(self.index)) * factor.view(sides)

    def blocks(self, size: int) -> Spread:
        """The same for an axis on which each entry is a block of `size` values."""
        index = tuple(entry * size + at for entry in self.index for at in range(size))
        return Spread(self.size * size, index, tuple(factor for factor in self.factor for _ in range(size)))

    def scaled(self, factor: float | Sequence[float]) -> Spread:
        """The same, multiplied by one factor or one for each new entry."""
        each = (factor,) * len(self.factor) if isinstance(factor, int | float) else factor
        return Spread(self.size, self.index, tuple(one * two for one, two in zip(self.factor, each, strict=True)))


def copies(old: int, new: int) -> Spread:
    """Entries one after another, and again from the first."""
    return Spread(old, tuple(at % old for at in range(new)), (1.0,) * new)


def shares(spread: Spread, noise: float, generator: torch.Generator) -> Spread:
    """The weights with which copies are read: those of one entry add up to 1.

    Args:
        spread: the copies; means have the weight 1.
        noise: standard deviation of what the weights of copies differ by; 0 for equal ones.
        generator: of the noise.
    """
    import torch

    drawn = (torch.randn(len(spread.index), generator=generator, dtype=torch.float64) * noise).tolist()
    counts = Counter(spread.index)
    ahead, left = Counter(counts), dict.fromkeys(counts, 1.0)
    weights = []
    for entry, apart in zip(spread.index, drawn, strict=True):
        mean = entry == spread.size
        # The last copy takes what the others leave, so that the sum is exact.
        weights.append(1.0 if mean else left[entry] if ahead[entry] == 1 else 1.0 / counts[entry] + apart)
        ahead[entry] -= 1
        left[entry] -= weights[-1]
    return Spread(spread.size, spread.index, tuple(weights))


def spreads(
    shape: Shape, old: Widths, new: Widths, how: str, *, tied: bool, depth: int, seed: int
) -> dict[str, Spread]:
    """How each kind of axis is filled.

    Args:
        shape: the family.
        old: the widths that are.
        new: the widths to be.
        how: `lemon` or `fpi`.
        tied: the head is the embedding.
        depth: layers; the noise of `lemon` is 1 / (sqrt(copies) depth).
        seed: of the noise.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def read(spread: Spread) -> Spread:
        noise = 1 / (math.sqrt(len(spread.index)) * depth) if how == "lemon" else 0.0
        return shares(spread, noise, generator)

    group = old.heads // old.groups
    hidden, heads = copies(old.hidden, new.hidden), copies(old.groups, new.groups)
    found = {"hidden": hidden, "down": read(hidden)}
    found |= {"value": heads.blocks(old.size), "mix": read(heads).blocks(group * old.size)}
    found |= {"query": heads.blocks(group * old.size), "key": found["value"]}
    stream = copies(old.stream, new.stream)
    count = Counter(stream.index)
    write = gain = centre = stream
    reads = read(stream) if how == "fpi" or shape.centred else stream
    last = [1.0 / count[entry] if tied else 1.0 for entry in stream.index]
    if how == "lemon":
        root, whole = math.sqrt(shape.live(old, new)), new.stream // old.stream * old.stream
        gain = stream.scaled(root)
        if shape.centred:
            # Whole copies, and the mean of the stream in the places left, which the norm sees as nothing.
            index = tuple(at % old.stream if at < whole else old.stream for at in range(new.stream))
            live = [1.0 if at < whole else 0.0 for at in range(new.stream)]
            write = Spread(old.stream, index, (1.0,) * new.stream)
            reads = read(write)
            gain, centre = stream.scaled([root * each for each in live]), stream.scaled(live)
            last = [old.stream / whole if tied else 1.0] * new.stream
        else:
            write = stream.scaled([1.0 if at < old.stream else 0.0 for at in range(new.stream)])
            last = [1.0] * new.stream
        if shape.key_norms:
            found |= {name: found[name].scaled(root) for name in ("query", "key")}
    found |= {"write": write, "read": reads, "gain": gain, "centre": centre}
    found |= {"last": gain.scaled(last), "last centre": centre.scaled(last)}
    value = found["value"]
    offsets = range(0, 3 * value.size, value.size)
    fused = tuple(entry + offset for offset in offsets for entry in value.index)
    return {**found, "fused": Spread(3 * value.size, fused, value.factor * 3)}


_BIASES: dict[str, tuple[str | None, ...]] = {
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("value",),
    "self_attn.o_proj.bias": ("write",),
    "mlp.gate_proj.bias": ("hidden",),
    "mlp.up_proj.bias": ("hidden",),
    "mlp.down_proj.bias": ("write",),
}
_LLAMA = {
    **_BIASES,
    "self_attn.q_proj.weight": ("query", "read"),
    "self_attn.k_proj.weight": ("key", "read"),
    "self_attn.v_proj.weight": ("value", "read"),
    "self_attn.o_proj.weight": ("write", "mix"),
    "self_attn.q_norm.weight": (None,),
    "self_attn.k_norm.weight": (None,),
    "self_attn.rotary_emb.inv_freq": (None,),
    "mlp.gate_proj.weight": ("hidden", "read"),
    "mlp.up_proj.weight": ("hidden", "read"),
    "mlp.down_proj.weight": ("write", "down"),
    "input_layernorm.weight": ("gain",),
    "post_attention_layernorm.weight": ("gain",),
}
_LLAMA_ENDS = {
    "embed_tokens.weight": (None, "write"),
    "norm.weight": ("last",),
    "lm_head.weight": (None, "read"),
}
_GPT2: dict[str, tuple[str | None, ...]] = {
    "ln_1.weight": ("gain",),
    "ln_1.bias": ("centre",),
    "attn.c_attn.weight": ("read", "fused"),
    "attn.c_attn.bias": ("fused",),
    "attn.c_proj.weight": ("mix", "write"),
    "attn.c_proj.bias": ("write",),
    "attn.bias": (None,),
    "attn.masked_bias": (None,),
    "ln_2.weight": ("gain",),
    "ln_2.bias": ("centre",),
    "mlp.c_fc.weight": ("read", "hidden"),
    "mlp.c_fc.bias": ("hidden",),
    "mlp.c_proj.weight": ("down", "write"),
    "mlp.c_proj.bias": ("write",),
}
_GPT2_ENDS = {
    "wte.weight": (None, "write"),
    "wpe.weight": (None, "write"),
    "ln_f.weight": ("last",),
    "ln_f.bias": ("last centre",),
    "lm_head.weight": (None, "read"),
}
SHAPES: Mapping[str, Shape] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), Shape(layer=_LLAMA, ends=_LLAMA_ENDS)),
    "qwen3": Shape(layer=_LLAMA, ends=_LLAMA_ENDS, key_norms=True),
    "gpt2": Shape(
        layer=_GPT2,
        ends=_GPT2_ENDS,
        stream="n_embd",
        hidden="n_inner",
        heads="n_head",
        eps="layer_norm_epsilon",
        centred=True,
        fills=True,
    ),
}
