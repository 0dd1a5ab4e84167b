"""How each tensor of a checkpoint is made: a copy of a source tensor, zeros, or a few operations on one.

A recipe is a description; nothing is read before `compute`. A recipe with a `range` is plain bytes of a file, whatever
its type, and is copied without being interpreted, so quantised layers pass through bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deepen.checkpoint.sources import BITS, ByteRange, Source, TensorInfo, from_bytes, tensor_info, torch_dtype
from deepen.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# Types whose values mean themselves. Values of the others are codes whose scale lies in another tensor.
NUMBERS = ("F64", "F32", "F16", "BF16")
# Values computed at once.
_SLICE = 4 * 2**20


class Recipe(Protocol):
    """A tensor that can be made from a source."""

    @property
    def dtype(self) -> str:
        """Safetensors name of the type of the result."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        ...

    def range(self, source: Source) -> ByteRange | None:
        """The bytes of the result if they lie in a file as they are, else None."""
        ...

    def compute(self, source: Source) -> torch.Tensor:
        """The result, in memory of its own on the CPU."""
        ...


class Described:
    """A recipe whose result is described by its field `info`, and lies in no file as it is."""

    __slots__ = ()
    info: TensorInfo

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def range(self, source: Source) -> ByteRange | None:
        return None


class Alike:
    """A recipe whose result has the type and shape of its field `recipe`, and lies in no file as it is."""

    __slots__ = ()
    recipe: Recipe

    @property
    def dtype(self) -> str:
        return self.recipe.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape

    def range(self, source: Source) -> ByteRange | None:
        return None


@dataclass(frozen=True, slots=True)
class Copy(Described):
    """The tensor `name` of the source, unchanged."""

    name: str
    info: TensorInfo

    def range(self, source: Source) -> ByteRange | None:
        """Where the tensor lies in a file, or None if the source has to compute it."""
        self._check(source)
        return source.range(self.name)

    def compute(self, source: Source) -> torch.Tensor:
        """The tensor, in memory of its own.

        Raises:
            CheckpointError: the source has no such tensor, or one of another type or shape.
        """
        self._check(source)
        return source.read(self.name)

    def _check(self, source: Source) -> None:
        found = source.infos.get(self.name)
        if found != self.info:
            reason = "the files have changed since the checkpoint was opened: open it again"
            raise CheckpointError(f"tensor {self.name!r}: expected {self.info}, got {found}; {reason}")


@dataclass(frozen=True, slots=True)
class Zeros(Described):
    """A tensor of zeros, of any type that has a zero."""

    info: TensorInfo

    def __post_init__(self) -> None:
        _check_zero(self.info.dtype)

    def compute(self, source: Source) -> torch.Tensor:
        """The zeros."""
        # All bits zero is the value zero in every type that has one.
        return from_bytes(bytearray(self.info.nbytes), self.info, where="zeros")


@dataclass(frozen=True, slots=True)
class Scaled(Alike):
    """`factor` times another recipe, computed in fp32 (fp64 for F64) and rounded once to the type of the recipe.

    A factor of 0 gives exact zeros, also where the recipe is infinite or not a number, and for every type. Other
    factors need a type whose values mean themselves: F64, F32, F16 or BF16.
    """

    recipe: Recipe
    factor: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor):
            raise CheckpointError(f"a tensor can only be scaled by a finite factor, got {self.factor}")
        if self.factor == 0:
            _check_zero(self.dtype)
        elif self.factor != 1 and self.dtype not in NUMBERS:
            raise CheckpointError(_not_numbers("scaled", self.dtype))

    def range(self, source: Source) -> ByteRange | None:
        """The bytes of the inner recipe when the factor is 1, else None."""
        return self.recipe.range(source) if self.factor == 1 else None

    def compute(self, source: Source) -> torch.Tensor:
        """The product.

        Raises:
            CheckpointError: a finite value would overflow its type.
        """
        if self.factor == 0:
            return Zeros(TensorInfo(self.dtype, self.shape)).compute(source)
        tensor = self.recipe.compute(source)
        if self.factor == 1:
            return tensor
        wide = tensor if self.dtype == "F64" else tensor.float()
        return rounded(wide, self.dtype, f"scaling by {self.factor}", factor=self.factor)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some of the `count` equal blocks of another recipe along one axis, in the order `chosen`; any type."""

    recipe: Recipe
    axis: int
    count: int
    chosen: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.recipe.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.recipe.shape)
        shape[self.axis] = shape[self.axis] // self.count * len(self.chosen)
        return tuple(shape)

    def range(self, source: Source) -> ByteRange | None:
        return None

    def compute(self, source: Source) -> torch.Tensor:
        """The blocks, copied."""
        import torch

        blocks = self.recipe.compute(source).chunk(self.count, self.axis)
        return torch.cat([blocks[index] for index in self.chosen], self.axis)


@dataclass(frozen=True, slots=True)
class Cast:
    """Another recipe, rounded to the type `dtype`; both types are among F64, F32, F16 and BF16, or equal."""

    recipe: Recipe
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise CheckpointError(f"a tensor cannot be cast to {self.dtype!r}: known types are {', '.join(BITS)}")
        if self.dtype != self.recipe.dtype and not {self.dtype, self.recipe.dtype} <= set(NUMBERS):
            raise CheckpointError(_not_numbers(f"cast to {self.dtype}", self.recipe.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape

    def range(self, source: Source) -> ByteRange | None:
        """The bytes of the inner recipe when the type stays, else None."""
        return self.recipe.range(source) if self.dtype == self.recipe.dtype else None

    def compute(self, source: Source) -> torch.Tensor:
        """The rounded tensor.

        Raises:
            CheckpointError: a finite value would overflow the type.
        """
        return rounded(self.recipe.compute(source), self.dtype, "casting")


def rounded(tensor: torch.Tensor, dtype: str, what: str, factor: float = 1.0) -> torch.Tensor:
    """`factor * tensor` in the type `dtype`; refuses new infinities, which would surface as NaN much later."""
    import torch

    result = torch.empty(tensor.shape, dtype=torch_dtype(dtype, what))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    # In slices, so that the wide intermediate never adds the size of a large tensor.
    for source, target in zip(tensor.reshape(-1).split(_SLICE), result.reshape(-1).split(_SLICE), strict=True):
        target.copy_(source.to(wide) * factor if factor != 1 else source)
        new = target.isinf() & source.isfinite()
        if new.any():
            value = source[new][0].item() * factor
            raise CheckpointError(
                f"{what}: the value {value:g} does not fit {dtype}; keep the type, or use BF16 or F32"
            )
    return result


def _not_numbers(what: str, dtype: str) -> str:
    return f"a tensor of type {dtype} cannot be {what}: only {', '.join(NUMBERS)} hold plain numbers; dequantise first"


def _check_zero(dtype: str) -> None:
    if dtype == "F8_E8M0":
        raise CheckpointError("a tensor of type F8_E8M0 cannot be zero: its values are powers of two")


def info(recipe: Recipe) -> TensorInfo:
    """Type and shape of the result of a recipe."""
    return TensorInfo(recipe.dtype, recipe.shape)


def check_computed(name: str, recipe: Recipe, tensor: torch.Tensor) -> None:
    """Refuses a computed tensor that is not what its recipe promised.

    Raises:
        CheckpointError: another type or shape.
    """
    if tensor_info(tensor) != info(recipe):
        raise CheckpointError(f"tensor {name!r}: expected {info(recipe)} from its recipe, got {tensor_info(tensor)}")
