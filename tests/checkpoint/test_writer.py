"""What is written is what the recipes say, in bytes that every reader accepts, whatever the device does meanwhile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from deepen.checkpoint import writer
from deepen.checkpoint.recipes import Cast, Copy, Recipe, Scaled, Zeros
from deepen.checkpoint.sources import ByteRange, SafetensorsSource, Source, TensorInfo, open_safetensors
from deepen.checkpoint.writer import check_written, header, plan_shards, write_weights
from deepen.errors import CheckpointError, SaveError

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """`count` random bytes read as the type, NaN patterns included."""
    torch.manual_seed(count)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(2, -1)


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsSource:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return open_safetensors(folder)


def copies(source: SafetensorsSource) -> dict[str, Recipe]:
    return {name: Copy(name, info) for name, info in source.infos.items()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture(params=["kernel", "buffer", "absent"])
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ways to copy: in the kernel, refused by it, and on a system without copy_file_range."""
    calls: list[int] = []
    real = os.copy_file_range

    def kernel(*args: int, **kwargs: int) -> int:
        count = real(*args, **kwargs)
        calls.append(count)
        return count

    def refuse(*args: int, **kwargs: int) -> int:
        calls.append(0)
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if request.param == "absent":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", kernel if request.param == "kernel" else refuse)
    yield request.param
    assert (sum(calls) > 0) == (request.param == "kernel")
    assert bool(calls) == (request.param != "absent")


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_type_is_copied_bit_for_bit(tmp_path: Path, out: Path, copying: str, dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, 4096)
    source = opened(tmp_path / "in", {"x": tensor})
    write_weights(out, copies(source), source)
    got = load_file(out / "model.safetensors")["x"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert bits(got) == bits(tensor)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_type_is_written_when_it_is_computed(tmp_path: Path, out: Path, dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, 4096)
    source = opened(tmp_path / "in", {"x": tensor})
    write_weights(out, copies(source), Computed(source))
    assert (out / "model.safetensors").read_bytes()[-4096:] == bits(tensor)
    assert bits(load_file(out / "model.safetensors")["x"]) == bits(tensor)


@dataclass
class Computed:
    """A source without byte ranges that knows which of its results are alive."""

    source: Source
    alive: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.infos, self.metadata, self.files = self.source.infos, self.source.metadata, self.source.files

    def range(self, name: str) -> ByteRange | None:
        return None

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        self.alive.append(weakref.ref(tensor))
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        return tensor


def test_at_most_one_computed_tensor_is_alive(tmp_path: Path, out: Path) -> None:
    source = Computed(opened(tmp_path / "in", {f"x{i}": torch.full((9,), float(i)) for i in range(8)}))
    recipes: dict[str, Recipe] = {name: Scaled(Copy(name, info), 2.0) for name, info in source.infos.items()}
    recipes |= {f"y{i}": Copy(f"x{i}", source.infos[f"x{i}"]) for i in range(8)}
    write_weights(out, recipes, source)
    assert len(source.alive) == 16
    assert source.most == 1
    got = load_file(out / "model.safetensors")
    assert [got[f"x{i}"][0].item() for i in range(8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [got[f"y{i}"][0].item() for i in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_pieces_join(tmp_path: Path, out: Path, copying: str, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(writer, "BUFFER_BYTES", chunk)
    source = opened(tmp_path / "in", {"a": random_bits(torch.int8, 500), "b": random_bits(torch.int8, 998)})
    steps: list[int] = []
    result = write_weights(out, copies(source), source, progress=steps.append)
    assert all(0 < step <= chunk for step in steps)
    assert sum(steps) == sum(result.files.values())
    for name in ("a", "b"):
        assert torch.equal(load_file(out / "model.safetensors")[name], source.read(name))


def test_a_kernel_copy_that_stops_half_way_is_finished(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(tmp_path / "in", {"a": random_bits(torch.int8, 1000)})
    real, calls = os.copy_file_range, [300, 0]

    def limited(src: int, dst: int, count: int, offset_src: int) -> int:
        return real(src, dst, min(count, size), offset_src=offset_src) if (size := calls.pop(0)) else 0

    monkeypatch.setattr(os, "copy_file_range", limited)
    write_weights(out, copies(source), source)
    assert calls == []
    assert torch.equal(load_file(out / "model.safetensors")["a"], source.read("a"))


def test_short_writes_are_finished(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            return super().write(data[:5])

    monkeypatch.setattr(writer, "open_output", lambda path: Short(path, "xb"))
    monkeypatch.delattr(os, "copy_file_range")
    source = opened(tmp_path / "in", {"a": random_bits(torch.int8, 64), "b": torch.ones(3)})
    write_weights(out, {**copies(source), "c": Zeros(TensorInfo("F32", (5,)))}, source)
    got = load_file(out / "model.safetensors")
    assert torch.equal(got["a"], source.read("a"))
    assert got["b"].tolist() == [1, 1, 1]
    assert got["c"].tolist() == [0] * 5


def test_the_bytes_are_the_library_s(tmp_path: Path, out: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(2), "s": torch.tensor(1.5), "e": torch.empty(0, 3)}
    source = opened(tmp_path / "in", tensors)
    write_weights(out, {name: Copy(name, source.infos[name]) for name in sorted(tensors)}, source)
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()


def test_header_and_order(tmp_path: Path, out: Path) -> None:
    tensors = {
        "z": torch.ones(3, dtype=torch.int8),
        "b": torch.ones(2),
        "a": torch.ones(1).double(),
        "c": torch.ones(1),
    }
    source = opened(tmp_path / "in", tensors)
    write_weights(
        out, {name: Copy(name, source.infos[name]) for name in tensors}, source, metadata={"y": "1", "x": "ä"}
    )
    data = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert data[8 : 8 + length].rstrip(b" ").endswith(b"}")
    entries = json.loads(data[8 : 8 + length])
    assert entries.pop("__metadata__") == {"x": "ä", "y": "1"}
    # Wide types first, then the order given: every tensor is aligned.
    assert list(entries) == ["a", "b", "c", "z"]
    assert [entry["data_offsets"] for entry in entries.values()] == [[0, 8], [8, 16], [16, 20], [20, 23]]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"x": "ä", "y": "1"}


def test_the_default_metadata_is_what_transformers_asks_for(tmp_path: Path, out: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(1)})
    write_weights(out, copies(source), source)
    assert open_safetensors(out).metadata == {"format": "pt"}


def test_shards_and_index(tmp_path: Path, out: Path) -> None:
    tensors = {name: torch.full((size,), float(size)) for name, size in (("d", 10), ("c", 10), ("big", 99), ("a", 1))}
    source = opened(tmp_path / "in", tensors)
    recipes: dict[str, Recipe] = {name: Copy(name, source.infos[name]) for name in tensors}
    recipes |= {"scalar": Zeros(TensorInfo("BF16", ())), "empty": Zeros(TensorInfo("F32", (0, 7)))}
    result = write_weights(out, recipes, source, max_shard_bytes=80)
    assert result.files == {path.name: path.stat().st_size for path in out.iterdir()}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    one, two, three = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    # 40 + 40 bytes fill a shard exactly, and a tensor above the bound has one of its own.
    assert index["weight_map"] == {"d": one, "c": one, "big": two, "a": three, "scalar": three, "empty": three}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"] == {"total_parameters": 121, "total_size": 482}
    assert (result.total_size, result.total_parameters) == (482, 121)
    for name, file in index["weight_map"].items():
        got = load_file(out / file)[name]
        assert got.shape == recipes[name].shape
        assert torch.equal(got, tensors.get(name, torch.zeros_like(got)))
    check_written(out, recipes)


def test_one_shard_has_no_index(tmp_path: Path, out: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(10), "b": torch.ones(10)})
    result = write_weights(out, copies(source), source, max_shard_bytes=80)
    assert list(result.files) == ["model.safetensors"] == [path.name for path in out.iterdir()]


def test_plan_of_shards_counts_no_empty_first_shard() -> None:
    big, small = TensorInfo("F32", (100,)), TensorInfo("I8", (1,))
    assert list(plan_shards({"big": big}, 1)) == ["model.safetensors"]
    plan = plan_shards({"big": big, "s1": small, "s2": small, "b2": big}, 2)
    assert list(plan.values()) == [["big"], ["s1", "s2"], ["b2"]]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.randn(30), "b": torch.randn(30).half()})
    recipes: dict[str, Recipe] = {**copies(source), "c": Cast(Scaled(copies(source)["a"], 0.3), "BF16")}
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name, recipes, source, max_shard_bytes=100)
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert len(written[0]) == 4
    assert written[0] == written[1]


def test_shards_of_transformers_are_read_and_ours_are_loaded_by_it(tmp_path: Path, out: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, head_dim=8
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "in", max_shard_size="4KB")
    source = open_safetensors(tmp_path / "in")
    assert len(source.files) > 2
    state = model.state_dict()
    assert {name: source.read(name).tolist() for name in source.infos} == {n: t.tolist() for n, t in state.items()}
    write_weights(out, copies(source), source, max_shard_bytes=9000)
    config.save_pretrained(out)
    again, report = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)  # pyright: ignore
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_nothing_is_overwritten(tmp_path: Path, out: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(1)})
    (out / "model.safetensors").write_text("precious")
    with pytest.raises(SaveError, match=r"model.safetensors: File exists"):
        write_weights(out, copies(source), source)
    assert (out / "model.safetensors").read_text() == "precious"


def test_a_full_device(tmp_path: Path, out: Path, copying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # /dev/full takes no kernel copy, which the fixture checks by counting copied bytes: give it a real one first.
    source = opened(tmp_path / "in", {"a": torch.ones(1000)})
    (tmp_path / "warm").mkdir()
    write_weights(tmp_path / "warm", copies(source), source)
    monkeypatch.setattr(writer, "open_output", lambda path: FileIO("/dev/full", "wb"))
    with pytest.raises(SaveError) as caught:
        write_weights(out, copies(source), source)
    message = str(caught.value)
    assert f"cannot write {out / 'model.safetensors'}: No space left on device" in message
    assert "need 4000 bytes" in message
    assert "free there" in message
    assert "make room" in message


class Failing(FileIO):
    """Fails with an error of the device, in write after the header or in close."""

    error, at = errno.EIO, "write"

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        if self.at == "write" and self.tell() > 0:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(data)

    def close(self) -> None:
        was_closed = self.closed
        super().close()
        if self.at == "close" and not was_closed:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("at", ["write", "close", "open"])
def test_every_error_of_the_device(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, error: int, at: str
) -> None:
    def fail(path: Path) -> FileIO:
        if at == "open":
            raise OSError(error, os.strerror(error))
        file = Failing(path, "xb")
        file.error, file.at = error, at
        return file

    source = opened(tmp_path / "in", {"a": torch.ones(10), "b": torch.ones(10)})
    monkeypatch.setattr(writer, "open_output", fail)
    with pytest.raises(SaveError, match=rf"model-00001-of-00002.safetensors: {os.strerror(error)}; .*80 bytes"):
        write_weights(out, {"z": Zeros(TensorInfo("F32", (10,))), "a": copies(source)["a"]}, source, max_shard_bytes=40)


def test_the_index_is_guarded_too(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(10), "b": torch.ones(10)})
    real = writer.open_output
    full = lambda path: FileIO("/dev/full", "wb") if path.suffix == ".json" else real(path)  # noqa: E731
    monkeypatch.setattr(writer, "open_output", full)
    with pytest.raises(SaveError, match=r"model.safetensors.index.json: No space left"):
        write_weights(out, copies(source), source, max_shard_bytes=40)


def test_errors_of_the_source_are_not_blamed_on_the_target(tmp_path: Path, out: Path, copying: str) -> None:
    path = tmp_path / "in" / "model.safetensors"
    source = opened(tmp_path / "in", {"a": torch.ones(1000)})
    os.truncate(path, path.stat().st_size - 500)
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected 4000 bytes at offset .*, got 3500"):
        write_weights(out, copies(source), source)
    path.unlink()
    (out / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*in/model.safetensors: No such file"):
        write_weights(out, copies(source), source)


@dataclass(frozen=True)
class Liar:
    """Promises F32 [2] and gives something else."""

    gives: torch.Tensor | ByteRange
    dtype: str = "F32"
    shape: tuple[int, ...] = (2,)

    def range(self, source: Source) -> ByteRange | None:
        return self.gives if isinstance(self.gives, ByteRange) else None

    def compute(self, source: Source) -> torch.Tensor:
        assert isinstance(self.gives, torch.Tensor)
        return self.gives


def test_a_recipe_that_breaks_its_promise(tmp_path: Path, out: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(10)})
    for i, gives in enumerate([torch.ones(3), torch.ones(2).half(), ByteRange(source.files[0], 0, 9)]):
        folder = out / str(i)
        folder.mkdir()
        with pytest.raises(CheckpointError, match="'x': expected"):
            write_weights(folder, {"x": Liar(gives)}, source)


def test_strided_tensors_are_written_in_order(tmp_path: Path, out: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(1)})
    write_weights(out, {"x": Liar(torch.arange(6.0).reshape(2, 3).T, shape=(3, 2))}, source)
    assert load_file(out / "model.safetensors")["x"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_requests_that_cannot_be_stored(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(1)})
    with pytest.raises(SaveError, match="no tensor to write"):
        write_weights(out, {}, source)
    with pytest.raises(SaveError, match="at least 1, got 0"):
        write_weights(out, copies(source), source, max_shard_bytes=0)
    zero = TensorInfo("F32", ())
    with pytest.raises(SaveError, match="rename it"):
        header({"__metadata__": zero}, {})
    with pytest.raises(SaveError, match="no UTF-8 text"):
        header({"\ud800": zero}, {})
    monkeypatch.setattr(writer, "MAX_HEADER_BYTES", 50)
    with pytest.raises(SaveError, match="lower max_shard_bytes"):
        header({"a": zero}, {})


def test_check_written_sees_every_difference(tmp_path: Path, out: Path) -> None:
    source = opened(tmp_path / "in", {"a": torch.ones(10), "b": torch.ones(10)})
    recipes = copies(source)
    write_weights(out, recipes, source, max_shard_bytes=40)
    check_written(out, recipes)
    extra = Zeros(TensorInfo("F32", (1,)))
    for wrong, name in (
        ({**recipes, "c": extra}, "'c'"),
        ({"a": recipes["a"]}, "'b'"),
        ({**recipes, "a": extra}, "'a'"),
        ({**recipes, "b": Zeros(TensorInfo("I32", (10,)))}, "'b'"),
    ):
        with pytest.raises(SaveError, match=f"1 tensors differ .*{name}"):
            check_written(out, wrong)
    (out / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SaveError, match="cannot be read back"):
        check_written(out, recipes)


MEMORY = """
import os, sys
from pathlib import Path
import torch
from deepen.checkpoint.recipes import Copy, Scaled
from deepen.checkpoint.sources import open_safetensors
from deepen.checkpoint.writer import write_weights

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

if sys.argv[3] == "buffer":
    del os.copy_file_range
source = open_safetensors(Path(sys.argv[1]))
recipes = {name: Copy(name, info) for name, info in source.infos.items()}
recipes["s"] = Scaled(recipes["x00"], 0.5)
before = status("VmRSS")
# Makes the peak start here. The peak of getrusage cannot be reset, and starts at that of the parent process.
Path("/proc/self/clear_refs").write_text("5")
write_weights(Path(sys.argv[2]), recipes, source)
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("way", ["kernel", "buffer"])
def test_memory_stays_bounded(tmp_path: Path, out: Path, way: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    infos = {f"x{i:02d}": TensorInfo("F32", (2_500_000,)) for i in range(40)}
    with open(folder / "model.safetensors", "wb") as file:
        file.write(head := header(infos, {}))
        # 400 MB without writing them: the file is sparse.
        file.truncate(len(head) + 400_000_000)
    command = [sys.executable, "-c", MEMORY, str(folder), str(out), way]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (out / "model.safetensors").stat().st_size > 410_000_000
    assert 0 < growth < 100_000_000
    (out / "model.safetensors").unlink()
