"""Recipes promise a type and a shape, keep the promise, and never interpret bytes they only copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from deepen.checkpoint.recipes import Cast, Copy, Recipe, Scaled, Zeros, check_computed, info
from deepen.checkpoint.sources import BITS, ByteRange, TensorInfo, from_bytes, tensor_info
from deepen.errors import CheckpointError


@dataclass
class Memory:
    """A source over tensors in memory that counts its reads and pretends that they lie in a file."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    reads: list[str] = field(default_factory=list)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return {name: tensor_info(tensor) for name, tensor in self.tensors.items()}

    def range(self, name: str) -> ByteRange | None:
        return ByteRange(Path(name), 0, self.infos[name].nbytes)

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name].clone()


def source_and_copy(tensor: torch.Tensor) -> tuple[Memory, Copy]:
    return Memory({"x": tensor}), Copy("x", tensor_info(tensor))


def test_copy_passes_the_range_and_the_values() -> None:
    source, copy = source_and_copy(torch.arange(6.0).reshape(2, 3))
    assert (copy.dtype, copy.shape) == ("F32", (2, 3))
    assert copy.range(source) == ByteRange(Path("x"), 0, 24)
    assert source.reads == []
    result = copy.compute(source)
    assert torch.equal(result, source.tensors["x"])
    result.zero_()
    assert source.tensors["x"].sum() == 15


def test_copy_refuses_a_source_that_changed() -> None:
    source, copy = source_and_copy(torch.zeros(2))
    for changed in ({}, {"x": torch.zeros(3)}, {"x": torch.zeros(2).half()}):
        source.tensors = changed
        with pytest.raises(CheckpointError, match=r"'x': expected .*F32.*open it again"):
            copy.compute(source)
        with pytest.raises(CheckpointError, match=r"'x': expected .*F32.*open it again"):
            copy.range(source)


@pytest.mark.parametrize("dtype", sorted(set(BITS) - {"F8_E8M0", "F6_E2M3", "F6_E3M2"}))
def test_zeros_of_every_type(dtype: str) -> None:
    zeros = Zeros(TensorInfo(dtype, (2, 4)))
    assert zeros.range(Memory({})) is None
    result = zeros.compute(Memory({}))
    assert tensor_info(result) == zeros.info
    assert not result.reshape(-1).view(torch.uint8).any()


def test_zero_is_refused_where_the_type_has_none() -> None:
    with pytest.raises(CheckpointError, match="powers of two"):
        Zeros(TensorInfo("F8_E8M0", (2,)))
    with pytest.raises(CheckpointError, match="powers of two"):
        Scaled(Copy("x", TensorInfo("F8_E8M0", (2,))), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scaled_rounds_once_from_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, copy = source_and_copy(torch.randn(50, 40).to(dtype))
    scaled = Scaled(copy, 1 / 3)
    expected = (source.tensors["x"].float() * (1 / 3)).to(dtype)
    assert scaled.range(source) is None
    assert info(scaled) == copy.info
    assert torch.equal(scaled.compute(source), expected)
    if dtype != torch.float32:
        # The factor itself is not rounded to the narrow type first.
        assert not torch.equal(expected, source.tensors["x"] * torch.tensor(1 / 3, dtype=dtype))


def test_scaled_keeps_fp64() -> None:
    source, copy = source_and_copy(torch.tensor([1 / 3], dtype=torch.float64))
    assert Scaled(copy, 0.1).compute(source).item() == (1 / 3) * 0.1


def test_large_tensors_are_scaled_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepen.checkpoint.recipes._SLICE", 7)
    source, copy = source_and_copy(torch.arange(60.0).reshape(3, 4, 5).bfloat16())
    assert torch.equal(Scaled(copy, 0.3).compute(source), (source.tensors["x"].float() * 0.3).bfloat16())


def test_scaling_by_zero_reads_nothing_and_gives_exact_zeros() -> None:
    source, copy = source_and_copy(torch.tensor([float("inf"), float("nan"), -1.0]))
    result = Scaled(copy, 0.0).compute(source)
    assert source.reads == []
    assert result.tolist() == [0, 0, 0]
    assert not result.signbit().any()
    packed, codes = source_and_copy(torch.ones(3, dtype=torch.int8))
    assert Scaled(codes, 0).compute(packed).tolist() == [0, 0, 0]


def test_scaling_by_one_is_a_copy() -> None:
    source, copy = source_and_copy(torch.ones(3, dtype=torch.int8))
    assert Scaled(copy, 1).range(source) == copy.range(source)
    assert Scaled(copy, 1).compute(source).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", sorted(set(BITS) - {"F64", "F32", "F16", "BF16"}))
def test_codes_are_not_scaled_or_cast(dtype: str) -> None:
    copy = Copy("x", TensorInfo(dtype, (2,)))
    with pytest.raises(CheckpointError, match=f"{dtype} cannot be scaled.*dequantise first"):
        Scaled(copy, 0.5)
    with pytest.raises(CheckpointError, match=f"{dtype} cannot be cast to BF16"):
        Cast(copy, "BF16")
    with pytest.raises(CheckpointError, match=f"cannot be cast to {dtype}"):
        Cast(Copy("x", TensorInfo("F32", (2,))), dtype)
    assert Cast(copy, dtype).dtype == dtype


def test_cast_rounds_and_keeps_the_range_only_when_the_type_stays() -> None:
    source, copy = source_and_copy(torch.tensor([1 / 3, float("inf"), float("nan")]))
    cast = Cast(copy, "BF16")
    assert info(cast) == TensorInfo("BF16", (3,))
    assert cast.range(source) is None
    assert cast.compute(source).dtype == torch.bfloat16
    assert cast.compute(source)[:2].tolist() == source.tensors["x"][:2].bfloat16().tolist()
    assert cast.compute(source)[2].isnan()
    assert Cast(copy, "F32").range(source) == copy.range(source)
    with pytest.raises(CheckpointError, match="known types are"):
        Cast(copy, "F31")


def test_overflow_is_refused_with_the_value() -> None:
    source, copy = source_and_copy(torch.tensor([1.0, 70000.0]))
    with pytest.raises(CheckpointError, match=r"casting: the value 70000 does not fit F16; .*BF16"):
        Cast(copy, "F16").compute(source)
    source, copy = source_and_copy(torch.tensor([40000.0]).half())
    with pytest.raises(CheckpointError, match=r"scaling by 2: the value 80000 does not fit F16"):
        Scaled(copy, 2).compute(source)


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_the_factor_is_finite(factor: float) -> None:
    with pytest.raises(CheckpointError, match="finite factor"):
        Scaled(Zeros(TensorInfo("F32", ())), factor)


def test_recipes_compose_over_scalars_and_empty_tensors() -> None:
    for tensor in (torch.tensor(3.0), torch.empty(0, 4)):
        source, copy = source_and_copy(tensor)
        recipe: Recipe = Cast(Scaled(copy, 0.5), "BF16")
        result = recipe.compute(source)
        assert torch.equal(result, (tensor * 0.5).bfloat16())
        check_computed("x", recipe, result)


def test_check_computed_names_the_tensor() -> None:
    zeros = Zeros(TensorInfo("F32", (2,)))
    for wrong in (torch.zeros(3), torch.zeros(2).half()):
        with pytest.raises(CheckpointError, match=r"'w': expected .*F32.* from its recipe"):
            check_computed("w", zeros, wrong)


def test_from_bytes_unpacks_f4() -> None:
    tensor = from_bytes(bytearray(b"ab"), TensorInfo("F4", (1, 4)), "x")
    assert tensor.shape == (1, 2)
    assert tensor_info(tensor) == TensorInfo("F4", (1, 4))
