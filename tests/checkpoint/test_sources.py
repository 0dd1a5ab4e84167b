"""Headers are checked before any tensor is offered: each fault has its own file and its own message."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepen.checkpoint.sources import BITS, ByteRange, TensorInfo, open_safetensors, read_header, tensor_info
from deepen.errors import CheckpointError

# Every type of the safetensors library that torch can hold, with the torch type.
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def sample(dtype: torch.dtype) -> torch.Tensor:
    """48 bytes of a pattern, as 3 rows of the given type."""
    raw = torch.arange(48, dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(3, -1)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    """Writes a safetensors file by hand: `header` is text, or an object to be dumped."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sharded(folder: Path) -> dict[str, str]:
    """Two shards and their index; returns the weight map."""
    owner = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    save_file({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}, folder / "one.safetensors")
    save_file({"c": torch.tensor([4.0])}, folder / "two.safetensors", metadata={"format": "pt"})
    write_index(folder, owner)
    return owner


def write_index(folder: Path, owner: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owner}))


def refused(folder: Path, *parts: str) -> None:
    """Opening fails with a message that holds all the parts."""
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(folder)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read_as_the_library_wrote_it(tmp_path: Path, name: str) -> None:
    tensor = sample(TYPES[name])
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    got = source.read("x")
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert bits(got) == bits(tensor)
    assert source.infos["x"] == tensor_info(tensor)
    assert source.infos["x"].dtype == name
    assert source.infos["x"].nbytes == 48


def test_f6_is_known_but_has_no_torch_type(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"x": entry("F6_E2M3", [8], [0, 6])}, b"abcdef")
    source = open_safetensors(tmp_path)
    assert source.infos["x"] == TensorInfo("F6_E2M3", (8,))
    assert source.range("x").length == source.infos["x"].nbytes == 6
    with pytest.raises(CheckpointError, match=r"'x'.*no such type.*only be copied"):
        source.read("x")


def test_types_cover_the_library() -> None:
    assert set(BITS) == {*TYPES, "F6_E2M3", "F6_E3M2"}


def test_ranges_point_at_the_bytes_and_no_byte_is_read_on_opening(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7), "e": torch.empty(0, 4)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    source = open_safetensors(tmp_path)
    assert source.files == (path,)
    assert source.metadata == {"format": "pt"}
    assert {name: info.shape for name, info in source.infos.items()} == {"a": (2, 3), "b": (), "e": (0, 4)}
    for name, tensor in tensors.items():
        place = source.range(name)
        assert path.read_bytes()[place.offset : place.offset + place.length] == bits(tensor)
        assert torch.equal(source.read(name), tensor)


def test_read_owns_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(4)}, path)
    source = open_safetensors(tmp_path)
    first = source.read("x")
    first.mul_(0)
    data = bytearray(path.read_bytes())
    with open(path, "r+b") as file:
        file.write(data[:-16] + b"\xff" * 16)
    assert first.tolist() == [0, 0, 0, 0]
    with open(path, "r+b") as file:
        file.write(data)
    assert source.read("x").tolist() == [1, 1, 1, 1]


def test_read_refuses_unknown_names_and_files_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"layers.weight": torch.ones(4)}, path)
    source = open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tensor 'layer.weight' \(did you mean 'layers.weight'"):
        source.read("layer.weight")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"expected 16 bytes at offset .*, got 15 bytes"):
        source.read("layers.weight")
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        source.read("layers.weight")


def test_shards_and_a_tensor_the_index_omits(tmp_path: Path) -> None:
    owner = sharded(tmp_path)
    del owner["b"]
    write_index(tmp_path, owner)
    source = open_safetensors(tmp_path)
    assert set(source.infos) == {"a", "b", "c"}
    assert source.files == (tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert source.metadata == {"format": "pt"}
    assert source.read("b").item() == 3
    assert source.read("c").tolist() == [4.0]


def test_one_file_is_preferred_to_the_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"only": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(open_safetensors(tmp_path).infos) == {"only"}


def test_a_shard_may_lie_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "parts/x.safetensors")
    write_index(tmp_path, {"x": "parts/x.safetensors"})
    assert open_safetensors(tmp_path).read("x").item() == 1


def test_no_weights(tmp_path: Path) -> None:
    refused(tmp_path, "model.safetensors", "no weights at all")
    refused(tmp_path / "absent", "got nothing", "check the path")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "got a file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "x.pt", "x.pth", "x.ckpt"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    refused(tmp_path, name, "pickled", "save_pretrained(new_folder, safe_serialization=True)")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adapter_model.safetensors", "an adapter must be merged"),
        ("x.gguf", "the .gguf file itself"),
        ("tf_model.h5", "tf_model.h5"),
    ],
)
def test_other_weights_are_named(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).touch()
    refused(tmp_path, name, hint)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "got 0 bytes"),
    "no header": (
        lambda p: p.write_bytes((9).to_bytes(8, "little") + b"{}"),
        "got 2 bytes, the file is trunc",
    ),
    "huge header": (
        lambda p: p.write_bytes((100_000_001).to_bytes(8, "little") + b"{}"),
        "a header of at most 100000000 bytes, got 100000001",
    ),
    "not JSON": (lambda p: raw_file(p, b"{nope"), "expected JSON"),
    "not UTF-8": (lambda p: raw_file(p, b'{"\xff": 1}'), "expected JSON text in UTF-8"),
    "surrogate": (lambda p: raw_file(p, b'{"\\ud800": 1}'), "expected JSON text in UTF-8"),
    "deep JSON": (lambda p: raw_file(p, b"[" * 100_000), "expected JSON"),
    "huge number": (lambda p: raw_file(p, b'{"x": ' + b"9" * 5000 + b"}"), "expected JSON"),
    "list": (lambda p: raw_file(p, []), "expected a JSON object, got list"),
    "metadata": (lambda p: raw_file(p, {"__metadata__": {"a": 1}}), "__metadata__"),
    "key twice": (
        lambda p: raw_file(p, b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "'x' appears twice",
    ),
    "inner key twice": (
        lambda p: raw_file(p, b'{"x":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "'dtype' appears twice",
    ),
    "no object": (lambda p: raw_file(p, {"x": 1}), "'x' to have dtype, shape and data_offsets"),
    "extra key": (lambda p: raw_file(p, {"x": {**entry(), "y": 1}}, bytes(8)), "'x' to have dtype, shape"),
    "unknown type": (lambda p: raw_file(p, {"x": entry("F7")}, bytes(8)), "'F7'; convert the checkpoint to one of F64"),
    "type no text": (lambda p: raw_file(p, {"x": entry(["F32"])}, bytes(8)), "known type"),
    "negative shape": (lambda p: raw_file(p, {"x": entry("F32", [-1, -2])}, bytes(8)), "shape of whole numbers"),
    "shape of floats": (lambda p: raw_file(p, {"x": entry("F32", [2.0])}, bytes(8)), "shape of whole numbers"),
    "shape of truth": (lambda p: raw_file(p, {"x": entry("F32", [True, 2])}, bytes(8)), "shape of whole numbers"),
    "shape no list": (lambda p: raw_file(p, {"x": entry("F32", 2)}, bytes(8)), "shape of whole numbers"),
    "three offsets": (lambda p: raw_file(p, {"x": entry("F32", [2], [0, 4, 8])}, bytes(8)), "[begin, end]"),
    "backwards": (lambda p: raw_file(p, {"x": entry("F32", [2], [8, 0])}, bytes(8)), "[begin, end]"),
    "shape x type": (
        lambda p: raw_file(p, {"x": entry("F32", [3])}, bytes(8)),
        "12 bytes for tensor 'x', F32 [3], got 8 bytes",
    ),
    "half a byte": (lambda p: raw_file(p, {"x": entry("F4", [3], [0, 1])}, bytes(1)), "1.5 bytes for tensor 'x'"),
    "starts late": (
        lambda p: raw_file(p, {"x": entry("F32", [2], [4, 12])}, bytes(12)),
        "data offset 0, got 4 (a hole)",
    ),
    "hole": (
        lambda p: raw_file(p, {"x": entry(), "y": entry("U8", [1], [9, 10])}, bytes(10)),
        "'y' at data offset 8, got 9 (a hole)",
    ),
    "overlap": (
        lambda p: raw_file(p, {"x": entry(), "y": entry("U8", [4], [7, 11])}, bytes(11)),
        "'y' at data offset 8, got 7 (an overlap)",
    ),
    "same bytes": (lambda p: raw_file(p, {"x": entry(), "y": entry()}, bytes(8)), "(an overlap)"),
    "truncated": (lambda p: raw_file(p, {"x": entry()}, bytes(7)), "(truncated)"),
    "trailing": (lambda p: raw_file(p, {"x": entry()}, bytes(9)), "(trailing bytes)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_refused(tmp_path: Path, fault: str) -> None:
    make, message = FAULTS[fault]
    make(tmp_path / "model.safetensors")
    refused(tmp_path, str(tmp_path / "model.safetensors"), message)


def test_the_hand_made_file_is_valid_without_its_fault(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"x": entry(), "z": entry("F32", [0], [8, 8])}, bytes(8))
    assert open_safetensors(tmp_path).read("x").tolist() == [0, 0]
    assert load_file(tmp_path / "model.safetensors")["x"].tolist() == [0, 0]


def test_a_sparse_header_length_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little"))
    refused(tmp_path, "a header of at most")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ({"x": "/etc/passwd"}, "'/etc/passwd'"),
        ({"x": "../one.safetensors"}, "'../one.safetensors'"),
        ({"x": "sub/../../one.safetensors"}, "inside"),
        ({"x": "..\\one.safetensors"}, "inside"),
        ({"x": ""}, "inside"),
        ({"x": "one\0.safetensors"}, "inside"),
        ({"x": "pytorch_model.bin"}, "safe_serialization=True"),
        ({"x": "absent.safetensors"}, "absent.safetensors beside it, got no such file"),
        ({}, "weight_map"),
        ([], "weight_map"),
        ({"x": 1}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_unsafe_or_missing_shards_are_refused(tmp_path: Path, owner: object, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder)
    save_file({"x": torch.ones(1)}, tmp_path / "one.safetensors")
    if isinstance(owner, dict) and owner:
        owner = {**owner, "a": "one.safetensors"}
    write_index(folder, owner)
    refused(folder, "model.safetensors.index.json", message)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    refused(tmp_path, str(index), "JSON")
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    refused(tmp_path, str(index), "'a' appears twice")


def test_an_index_that_misplaces_a_tensor_is_refused(tmp_path: Path) -> None:
    owner = sharded(tmp_path)
    write_index(tmp_path, {**owner, "c": "one.safetensors", "a": "two.safetensors"})
    refused(tmp_path, "'a' in two.safetensors", "got it in one.safetensors")
    write_index(tmp_path, {**owner, "d": "one.safetensors"})
    refused(tmp_path, "'d' in one.safetensors", "got it in no file")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"c": torch.tensor([4.0]), "a": torch.ones(1)}, tmp_path / "two.safetensors")
    refused(tmp_path, "two.safetensors", "'a' here and in one.safetensors")


def test_links_inside_the_folder_are_followed_and_others_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder)
    (folder / "two.safetensors").rename(folder / "real.safetensors")
    (folder / "two.safetensors").symlink_to("real.safetensors")
    assert open_safetensors(folder).read("c").tolist() == [4.0]
    (folder / "real.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(folder, "two.safetensors, a link to", "outside.safetensors")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "models--x/snapshots/abc"
    folder.mkdir(parents=True)
    (tmp_path / "models--x/blobs").mkdir()
    sharded(folder)
    for name in ("one.safetensors", "two.safetensors", "model.safetensors.index.json"):
        (folder / name).rename(tmp_path / "models--x/blobs" / f"hash-{name[:3]}")
        (folder / name).symlink_to(f"../../blobs/hash-{name[:3]}")
    source = open_safetensors(folder)
    assert source.read("c").tolist() == [4.0]
    assert source.range("c").path == folder / "two.safetensors"
    (tmp_path / "models--x/elsewhere").mkdir()
    (tmp_path / "models--x/blobs/hash-two").rename(tmp_path / "models--x/elsewhere/hash-two")
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").symlink_to("../../elsewhere/hash-two")
    refused(folder, "a link to")


def test_sizes_of_packed_types() -> None:
    assert TensorInfo("F4", (3, 2)).nbytes == 3
    assert TensorInfo("F6_E3M2", (4,)).nbytes == 3
    assert TensorInfo("F64", ()).nbytes == 8
    assert TensorInfo("F64", (0, 5)).nbytes == 0
    assert TensorInfo("BF16", (3, 5)).numel == 15
    assert ByteRange(Path("x"), 1, 2).length == 2
    with pytest.raises(CheckpointError, match=r"no type for torch\.complex128"):
        tensor_info(torch.zeros(1, dtype=torch.complex128))
