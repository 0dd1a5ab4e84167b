"""Where tensors come from: safetensors files, opened by their headers only.

A safetensors file is `8 bytes: header length n, little endian | n bytes of JSON | tensor data`, and the JSON gives each
tensor its type, its shape and its place in the data. Everything here works on those headers; tensor bytes are touched
only by `read`, one tensor at a time, into memory that the result owns (no memory map: a file that changes or vanishes
later cannot change a loaded model). Headers are checked completely before any tensor is offered.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from deepen.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The limit of the safetensors library itself: a larger header is refused by every reader.
MAX_HEADER_BYTES = 100_000_000

BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_TORCH: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
# What to do about a damaged file.
_AGAIN = "fetch or save the file again"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of a tensor on disk.

    Attributes:
        dtype: safetensors name, a key of `BITS`.
        shape: number of values along each axis; `()` is a scalar.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk; F4 and F6 are packed."""
        return (self.numel * BITS[self.dtype] + 7) // 8


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of the file `path`, starting `offset` bytes from its beginning."""

    path: Path
    offset: int
    length: int


class Source(Protocol):
    """Named tensors that can be read one at a time."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor under its name on disk."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """Free text that came with the tensors."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors."""
        ...

    def range(self, name: str) -> ByteRange | None:
        """The bytes of a tensor, exactly as `infos[name]` says, or None if it has to be computed by `read`."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one safetensors file."""

    infos: Mapping[str, TensorInfo]
    ranges: Mapping[str, ByteRange]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """Tensors of one or several safetensors files. Build it with `open_safetensors`."""

    infos: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    files: tuple[Path, ...]
    ranges: Mapping[str, ByteRange]

    def range(self, name: str) -> ByteRange:
        """Where the tensor lies on disk.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        if name not in self.ranges:
            raise CheckpointError(f"{self.files[0].parent}: no tensor {name!r}{nearest(name, self.ranges)}")
        return self.ranges[name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own on the CPU.

        Raises:
            CheckpointError: no such tensor, a file that is gone or has shrunk, or a type that torch lacks.
        """
        place = self.range(name)
        return from_bytes(read_bytes(place), self.infos[name], where=f"{place.path}: tensor {name!r}")


def open_safetensors(folder: Path) -> SafetensorsSource:
    """Opens the weights of a Hugging Face folder by their headers.

    `model.safetensors` is used if it is there, as transformers does, else the files named by
    `model.safetensors.index.json`. A tensor that lies in one of those files is offered even if the index omits it.

    Raises:
        CheckpointError: no weights, only pickled ones, or files that are missing, truncated, contradictory or unsafe.
    """
    if not folder.is_dir():
        _fail(folder, "a folder with safetensors weights", "a file" if folder.exists() else "nothing", "check the path")
    if (folder / SINGLE_FILE).is_file():
        owner: Mapping[str, str] = {}
        paths = [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        owner = _read_index(folder)
        paths = [folder / file for file in sorted(set(owner.values()))]
    else:
        _no_weights(folder)
    infos: dict[str, TensorInfo] = {}
    ranges: dict[str, ByteRange] = {}
    metadata: dict[str, str] = {}
    for path in paths:
        header = read_header(path)
        for name in header.infos:
            if name in ranges:
                got = f"{name!r} here and in {ranges[name].path.name}"
                _fail(path, "each tensor in one file", got, "save the model again; the two copies may differ")
        infos |= header.infos
        ranges |= header.ranges
        metadata = {**header.metadata, **metadata}
    for name, file in owner.items():
        if name not in ranges or ranges[name].path != folder / file:
            found = f"it in {ranges[name].path.name}" if name in ranges else "it in no file"
            _fail(folder / INDEX_FILE, f"tensor {name!r} in {file}", found, "fetch the index and the weights again")
    return SafetensorsSource(infos, metadata, tuple(paths), ranges)


def read_header(path: Path) -> Header:
    """Reads and checks the header of one safetensors file; no tensor bytes are read.

    Raises:
        CheckpointError: the file cannot be read, is not safetensors, or its header and its size do not agree.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                _fail(path, "at least the 8 bytes of a safetensors header length", f"{len(prefix)} bytes", _AGAIN)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                got = f"{length} (not a safetensors file?)"
                _fail(path, f"a header of at most {MAX_HEADER_BYTES} bytes", got, _AGAIN)
            text = file.read(length)
    except OSError as error:
        _fail(path, "a readable file", error.strerror or str(error), "check that the file exists and its permissions")
    if len(text) < length:
        _fail(path, f"a header of {length} bytes", f"{len(text)} bytes, the file is truncated", _AGAIN)
    entries = parse_json(text, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "__metadata__ to map text to text", repr(metadata)[:80], _AGAIN)
    infos: dict[str, TensorInfo] = {}
    ranges: dict[str, ByteRange] = {}
    for name, entry in entries.items():
        infos[name], begin, end = _entry(path, name, entry)
        ranges[name] = ByteRange(path, 8 + length + begin, end - begin)
    # The format allows neither holes nor overlaps, so in order of place each tensor starts where the last one ended.
    expected = 8 + length
    for name, place in sorted(ranges.items(), key=lambda item: (item[1].offset, item[1].length)):
        if place.offset != expected:
            kind = "a hole" if place.offset > expected else "an overlap"
            got = f"{place.offset - 8 - length} ({kind})"
            _fail(path, f"tensor {name!r} at data offset {expected - 8 - length}", got, _AGAIN)
        expected += place.length
    if size != expected:
        got = f"{size} bytes ({'truncated' if size < expected else 'trailing bytes'})"
        _fail(path, f"{expected} bytes by its header", got, _AGAIN)
    return Header(infos, ranges, metadata)


def _entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, int, int]:
    """Type, shape, first and last data offset of one header entry."""
    where = f"tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"{where} to have dtype, shape and data_offsets", repr(entry)[:80], _AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        do = f"convert the checkpoint to one of {', '.join(BITS)}"
        _fail(path, f"{where} of a known type", repr(dtype)[:80], do)
    if not _sizes(shape):
        _fail(path, f"{where} to have a shape of whole numbers", repr(shape)[:80], _AGAIN)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"{where} to have data_offsets [begin, end]", repr(offsets)[:80], _AGAIN)
    info, (begin, end) = TensorInfo(dtype, tuple(shape)), offsets
    if info.numel * BITS[dtype] != 8 * (end - begin):
        expected = f"{info.numel * BITS[dtype] / 8:g} bytes for {where}, {dtype} {list(shape)}"
        _fail(path, expected, f"{end - begin} bytes by its data_offsets", _AGAIN)
    return info, begin, end


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _read_index(folder: Path) -> dict[str, str]:
    """The checked weight map of the index: tensor name to file name."""
    path = folder / INDEX_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        _fail(path, "a readable file", error.strerror or str(error), "check its permissions")
    owner = parse_json(text, path).get("weight_map")
    if not isinstance(owner, dict) or not owner or not all(isinstance(file, str) for file in owner.values()):
        _fail(path, "weight_map to map tensor names to file names", repr(owner)[:80], "fetch the index again")
    for file in sorted(set(owner.values())):
        _check_shard(path, folder, file)
    return owner


def _check_shard(index: Path, folder: Path, file: str) -> None:
    """Refuses a shard that is missing, is not safetensors, or lies outside the folder of the index."""
    unsafe = "do not use this checkpoint unless you trust it; put the weights into the folder itself"
    if not file or "\0" in file or "\\" in file or Path(file).is_absolute() or ".." in Path(file).parts:
        _fail(index, f"weight_map to name files inside {folder}", repr(file), unsafe)
    if not file.endswith(".safetensors"):
        _fail(index, "weight_map to name .safetensors files", repr(file), _as_safetensors(folder))
    if not (folder / file).is_file():
        _fail(index, f"the file {file} beside it", "no such file", "fetch the missing part of the checkpoint")
    real, home = (folder / file).resolve(), folder.resolve()
    # The one layout in which a link may leave the folder: <repo>/snapshots/<revision>/file -> <repo>/blobs/<hash>.
    cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not real.is_relative_to(home) and not cache:
        _fail(index, f"weight_map to name files inside {folder}", f"{file}, a link to {real}", unsafe)


def _no_weights(folder: Path) -> NoReturn:
    """Says what the folder holds instead of safetensors weights, and the way out."""
    expected = f"{SINGLE_FILE} or {INDEX_FILE}"
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        got = f"only pickled weights ({', '.join(pickles[:3])}), which can run code when they are read"
        _fail(folder, expected, got, _as_safetensors(folder))
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf", ".h5", ".msgpack")
    )
    if any(name.endswith(".gguf") for name in others):
        _fail(folder, expected, f"GGUF ({', '.join(others[:3])})", "give the path of the .gguf file itself")
    if others:
        way = "give the folder of a whole model; an adapter must be merged into its model first"
        _fail(folder, expected, f"other weights ({', '.join(others[:3])})", way)
    _fail(folder, expected, "no weights at all", "check the path, or fetch the weights")


def _as_safetensors(folder: Path) -> str:
    load = f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    save = "model.save_pretrained(new_folder, safe_serialization=True)"
    return f"convert it once, if you trust it: load it with transformers, `{load}`, and write it with `{save}`"


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parses a JSON object of UTF-8 text in which no key may appear twice.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a repeated key.
    """

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            # An unpaired surrogate is legal JSON but no UTF-8 text, so it could never be written back.
            key.encode()
            if key in result:
                raise ValueError(f"the key {key!r} appears twice")
            result[key] = value
        return result

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _fail(path, "JSON text in UTF-8 without repeated keys", str(error)[:200], _AGAIN)
    if not isinstance(value, dict):
        _fail(path, "a JSON object", type(value).__name__, _AGAIN)
    return value


def read_bytes(place: ByteRange) -> bytearray:
    """The bytes of a range, in memory of their own.

    Raises:
        CheckpointError: the file cannot be read, or ends before the range does.
    """
    raw, done = bytearray(place.length), 0
    try:
        with open(place.path, "rb", buffering=0) as file:
            file.seek(place.offset)
            # One call reads at most 2 GiB on Linux.
            while done < place.length and (count := file.readinto(memoryview(raw)[done:])):
                done += count
    except OSError as error:
        _fail(place.path, "a readable file", error.strerror or str(error), "it was readable before: check the disk")
    if done < place.length:
        expected = f"{place.length} bytes at offset {place.offset}"
        _fail(place.path, expected, f"{done} bytes", "the file has changed since it was opened: open it again")
    return raw


def from_bytes(raw: bytearray, info: TensorInfo, where: str) -> torch.Tensor:
    """A CPU tensor over `raw`, which it keeps alive and owns.

    Two F4 values share a byte, so torch's last axis is half as long as the one on disk.

    Raises:
        CheckpointError: torch has no type for this one; `where` says which tensor it is.
    """
    import torch

    dtype = torch_dtype(info.dtype, where)
    shape = info.shape if info.dtype != "F4" else (*info.shape[:-1], info.shape[-1] // 2)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def torch_dtype(dtype: str, where: str) -> torch.dtype:
    """The torch type of a safetensors type.

    Raises:
        CheckpointError: torch has none; the tensor can be copied but not computed with.
    """
    import torch

    found = getattr(torch, _TORCH.get(dtype, ""), None)
    if found is None:
        reason = f"torch {torch.__version__} has no such type; the tensor can only be copied as it is"
        raise CheckpointError(f"{where}: expected a type that torch knows, got {dtype}: {reason}")
    return found


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """What a tensor will be on disk: the inverse of `from_bytes`.

    Raises:
        CheckpointError: safetensors has no type for it.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = next((dtype for dtype, other in _TORCH.items() if other == name), None)
    if dtype is None:
        raise CheckpointError(f"safetensors has no type for {tensor.dtype}; convert the tensor first")
    shape = tuple(tensor.shape)
    return TensorInfo(dtype, shape if dtype != "F4" else (*shape[:-1], shape[-1] * 2))


def _fail(path: Path, expected: str, got: str, do: str) -> NoReturn:
    raise CheckpointError(f"{path}: expected {expected}, got {got}; {do}")
