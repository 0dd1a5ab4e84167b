"""Writes weights in the safetensors format, streaming: the model is never in memory.

A tensor whose recipe is a byte range of a file is copied in pieces of at most 16 MB, by the kernel where it can and
through one buffer of 1 MB where it cannot. A tensor that has to be computed is computed, written and freed before the
next.
The bytes written depend only on the recipes: the same input gives the same files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import MappingProxyType

from deepen.checkpoint.recipes import Recipe, check_computed, info
from deepen.checkpoint.sources import (
    BITS,
    INDEX_FILE,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    ByteRange,
    Source,
    TensorInfo,
    open_safetensors,
)
from deepen.errors import CheckpointError, SaveError

CHUNK_BYTES = 16 * 10**6
# The plain copy's buffer: one larger than the processor's cache was measured three times slower.
BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What `write_weights` wrote.

    Attributes:
        files: bytes of each file, by name; the index is among them if there is one.
        total_size: bytes of all tensors.
        total_parameters: number of values of all tensors.
    """

    files: Mapping[str, int]
    total_size: int
    total_parameters: int


def write_weights(
    folder: Path,
    tensors: Mapping[str, Recipe],
    source: Source,
    *,
    max_shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
    progress: Callable[[int], None] | None = None,
) -> WeightFiles:
    """Writes the tensors into `model.safetensors`, or into numbered shards and their index.

    Shards are filled in the order given; a tensor larger than `max_shard_bytes` gets a shard of its own. Inside a
    file, tensors of wider types come first and the order given decides among equals, so that each one is aligned.

    Args:
        folder: an existing folder without weights; no file is overwritten.
        tensors: name to recipe.
        source: what the recipes read.
        max_shard_bytes: bound on the tensor bytes of one file.
        metadata: free text for the header of each file.
        progress: called with the number of bytes written since its last call, at least every 16 MB.

    Raises:
        SaveError: a file cannot be written, or the tensors cannot be stored in this format.
        CheckpointError: a source tensor cannot be read or is not what its recipe says.
    """
    if max_shard_bytes < 1:
        raise SaveError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    if not tensors:
        raise SaveError(f"{folder}: there is no tensor to write")
    infos = {name: info(recipe) for name, recipe in tensors.items()}
    shards = plan_shards(infos, max_shard_bytes)
    total = sum(item.nbytes for item in infos.values())
    job = _Job(folder, source, total, progress or (lambda count: None))
    files: dict[str, int] = {}
    for file, names in shards.items():
        head = header({name: infos[name] for name in names}, metadata)
        with job.writing(file) as out:
            job.put(memoryview(head), out)
            for name in names:
                job.write(name, tensors[name], out)
        files[file] = len(head) + sum(infos[name].nbytes for name in names)
    parameters = sum(item.numel for item in infos.values())
    if len(shards) > 1:
        owner = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": owner}
        text = (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        with job.writing(INDEX_FILE) as out:
            job.put(memoryview(text), out)
        files[INDEX_FILE] = len(text)
    return WeightFiles(files, total, parameters)


def plan_shards(infos: Mapping[str, TensorInfo], max_shard_bytes: int) -> dict[str, list[str]]:
    """File name to the tensors it holds, in the order in which they lie there."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, item in infos.items():
        if shards[-1] and filled + item.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += item.nbytes
    # Readers may view the file's bytes in place, which needs each tensor at a multiple of its value size.
    ordered = [sorted(names, key=lambda name: -BITS[infos[name].dtype]) for names in shards]
    if len(ordered) == 1:
        return {SINGLE_FILE: ordered[0]}
    return {f"model-{i:05d}-of-{len(ordered):05d}.safetensors": names for i, names in enumerate(ordered, 1)}


def header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The header of one file: length, JSON, and spaces up to a multiple of 8 bytes.

    Raises:
        SaveError: the header is larger than any reader accepts, or a name cannot be stored.
    """
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, item in infos.items():
        if name == "__metadata__":
            raise SaveError("a tensor cannot be named __metadata__ in the safetensors format: rename it")
        end = offset + item.nbytes
        entries[name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [offset, end]}
        offset = end
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise SaveError(f"a name in the header holds {bad!r}, which is no UTF-8 text: rename it") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        reason = f"a header of {len(text)} bytes is more than the {MAX_HEADER_BYTES} that readers accept"
        raise SaveError(f"{reason}: lower max_shard_bytes, so that each file holds fewer of the {len(infos)} tensors")
    return len(text).to_bytes(8, "little") + text


def check_written(folder: Path, tensors: Mapping[str, Recipe]) -> None:
    """Reads back the headers of what `write_weights` wrote and compares names, types and shapes.

    Raises:
        SaveError: the files cannot be opened, or hold other tensors than `tensors` says.
    """
    try:
        found = open_safetensors(folder).infos
    except CheckpointError as error:
        raise SaveError(f"{folder}: what was written cannot be read back: {error}") from error
    expected = {name: info(recipe) for name, recipe in tensors.items()}
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        first = f"{wrong[0]!r} should be {expected.get(wrong[0])} and is {found.get(wrong[0])}"
        raise SaveError(f"{folder}: {len(wrong)} tensors differ from what was to be written; {first}; save again")


def open_output(path: Path) -> FileIO:
    """Opens a new file for writing without a buffer; a function of its own so that tests can replace the device."""
    return open(path, "xb", buffering=0)


class _Writing:
    """A file being written; whatever the operating system refuses inside becomes a SaveError that names the file."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total = path, total

    def __enter__(self) -> FileIO:
        try:
            self.file = open_output(self.path)
        except OSError as error:
            raise self._failed(error) from error
        return self.file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # Some file systems report a full disk only here.
            self.file.close()
        except OSError as late:
            error = error or late
        if isinstance(error, OSError):
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> SaveError:
        reason = error.strerror or str(error)
        try:
            free = f"{shutil.disk_usage(self.path.parent).free} are free there"
        except OSError:
            free = "the free space there is unknown"
        need = f"all weights need {self.total} bytes and {free}"
        return SaveError(f"cannot write {self.path}: {reason}; {need}; make room or permit writing, or save elsewhere")


@dataclass
class _Job:
    """The state of one `write_weights`: where it writes, what it reads, and the one buffer it copies through."""

    folder: Path
    source: Source
    total: int
    progress: Callable[[int], None]
    buffer: bytearray = field(default_factory=bytearray)

    def writing(self, file: str) -> _Writing:
        return _Writing(self.folder / file, self.total)

    def write(self, name: str, recipe: Recipe, out: FileIO) -> None:
        """Writes one tensor."""
        place = recipe.range(self.source)
        if place is not None:
            expected = info(recipe).nbytes
            if place.length != expected:
                raise CheckpointError(f"tensor {name!r}: expected {expected} bytes, got {place.length} in {place.path}")
            self.copy(place, out)
            return
        import torch

        tensor = recipe.compute(self.source)
        check_computed(name, recipe, tensor)
        if tensor.numel():
            raw = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
            self.put(raw.data, out)

    def put(self, data: memoryview, out: FileIO) -> None:
        """Writes all of `data` in pieces; a raw write may take less than it is given."""
        done = 0
        while done < len(data):
            count = out.write(data[done : done + CHUNK_BYTES])
            done += count
            self.progress(count)

    def copy(self, place: ByteRange, out: FileIO) -> None:
        """Copies a byte range of a file, by the kernel as far as it goes."""
        with _open_input(place.path) as file:
            done = self._copy_in_kernel(file, place, out)
            file.seek(place.offset + done)
            while done < place.length:
                done += self._copy_piece(file, place, done, out)

    def _copy_in_kernel(self, file: FileIO, place: ByteRange, out: FileIO) -> int:
        """Bytes copied by copy_file_range before it ended, or failed for whatever reason.

        Not every pair of file systems can do it, and its error does not say which side is at fault: the plain copy
        that takes over will either succeed or meet the same error with its side known.
        """
        done = 0
        if not hasattr(os, "copy_file_range"):
            return done
        while done < place.length:
            size = min(CHUNK_BYTES, place.length - done)
            try:
                count = os.copy_file_range(file.fileno(), out.fileno(), size, offset_src=place.offset + done)
            except OSError:
                break
            if count == 0:
                break
            done += count
            self.progress(count)
        return done

    def _copy_piece(self, file: FileIO, place: ByteRange, done: int, out: FileIO) -> int:
        """Copies one piece through the buffer; returns its bytes."""
        if not self.buffer:
            self.buffer = bytearray(BUFFER_BYTES)
        view = memoryview(self.buffer)[: min(BUFFER_BYTES, place.length - done)]
        try:
            count = file.readinto(view)
        except OSError as error:
            raise CheckpointError(f"cannot read {place.path}: {error.strerror}; check the disk it is on") from error
        if not count:
            expected = f"{place.length} bytes at offset {place.offset}"
            raise CheckpointError(f"{place.path}: expected {expected}, got {done}; the file has changed, open it again")
        self.put(view[:count], out)
        return count


def _open_input(path: Path) -> FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; it was readable before, open it again") from error
