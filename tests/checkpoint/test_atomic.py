"""A target appears whole or not at all, and nothing that exists is ever replaced by a folder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepen.checkpoint import atomic
from deepen.checkpoint.atomic import atomic_file, atomic_folder, leftovers
from deepen.checkpoint.recipes import Zeros
from deepen.checkpoint.sources import TensorInfo, open_safetensors
from deepen.checkpoint.writer import write_weights
from deepen.errors import SaveError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(target: Path, match: str, forbidden: tuple[Path, ...] = ()) -> None:
    """Entering fails with the message, the block does not run, and nothing is left behind."""
    before = names(target.parent) if target.parent.is_dir() else []
    with pytest.raises(SaveError, match=match), atomic_folder(target, forbidden=forbidden):
        pytest.fail("the block must not run")
    assert before == (names(target.parent) if target.parent.is_dir() else [])


def test_the_folder_appears_at_the_end_with_its_files(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub/file").write_text("x")
        assert folder.is_absolute()
        assert folder.parent == tmp_path
        assert folder.name.startswith(f".out.partial-{os.getpid()}-")
        assert not target.exists()
        assert leftovers(target) == [folder]
    assert names(tmp_path) == ["out"]
    assert (target / "sub/file").read_text() == "x"
    assert leftovers(target) == []


def test_the_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out"):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_relative_target_and_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with atomic_folder(Path("out")) as folder:
        os.chdir("elsewhere")
        (folder / "file").touch()
    assert names(tmp_path) == ["elsewhere", "out"]


def test_existing_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    refused(tmp_path / "file", r"file exists already \(a file\)")
    refused(tmp_path / "empty", r"empty exists already \(a folder\)")
    refused(tmp_path / "full", r"full exists already \(a folder\)")
    refused(tmp_path / "dangling", r"dangling exists already \(a link\)")
    refused(Path("/"), "exists already")
    refused(tmp_path / "empty/..", "exists already")


def test_targets_at_the_input_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "models/input"
    source.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(source)
    refused(source, "is the input .*models/input", (source,))
    refused(source / "out", "lies inside the input", (source,))
    refused(tmp_path / "alias/out", "lies inside the input", (source,))
    refused(source / "out", "lies inside the input", (tmp_path / "alias",))
    refused(tmp_path / "models", "contains the input", (tmp_path, source)[1:])
    refused(tmp_path / "x", "contains the input", (tmp_path / "x/input",))
    with atomic_folder(tmp_path / "models/input2", forbidden=(source,)):
        pass
    assert names(tmp_path / "models") == ["input", "input2"]


def test_parents_that_cannot_hold_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "absent/out", "to be a folder, but it does not exist; make it first")
    refused(tmp_path / "file/out", "to be a folder, but it is not a folder")
    refused(Path("/proc/out"), "cannot make /proc/.out.partial-.*; save somewhere else")
    refused(tmp_path / ("x" * 250), "File name too long")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(tmp_path / "out", "no permission to write in")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_exception_removes_the_sibling(tmp_path: Path, error: type[BaseException]) -> None:
    def save() -> None:
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "file").touch()
            raise error

    with pytest.raises(error):
        save()
    assert names(tmp_path) == []


def test_an_interrupt_in_the_middle_of_writing(tmp_path: Path) -> None:
    recipes = {f"x{i}": Zeros(TensorInfo("F32", (10,))) for i in range(9)}
    seen: list[list[str]] = []

    def interrupt(count: int) -> None:
        seen.append([path.name for folder in leftovers(tmp_path / "out") for path in folder.iterdir()])
        if len(seen) == 5:
            raise KeyboardInterrupt

    def save() -> None:
        with atomic_folder(tmp_path / "out") as folder:
            write_weights(folder, recipes, open_safetensors(tmp_path / "in"), max_shard_bytes=80, progress=interrupt)

    (tmp_path / "in").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "in/model.safetensors")
    with pytest.raises(KeyboardInterrupt):
        save()
    assert len(seen[-1]) == 2
    assert names(tmp_path) == ["in"]


@pytest.mark.parametrize("kind", ["file", "folder", "full", "dangling"])
def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"

    def appear() -> None:
        if kind == "file":
            target.write_text("theirs")
        elif kind == "dangling":
            target.symlink_to("nowhere")
        else:
            target.mkdir()
        if kind == "full":
            (target / "theirs").touch()

    with pytest.raises(SaveError, match="exists already"), atomic_folder(target):
        appear()
    assert names(tmp_path) == ["out"]
    assert kind != "file" or target.read_text() == "theirs"
    assert kind != "full" or names(target) == ["theirs"]


@pytest.mark.parametrize("kind", ["file", "full"])
def test_a_target_that_appears_after_the_last_look_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tmp_path / "out"
    rename = os.rename

    def late(source: Path, goal: Path) -> None:
        if kind == "file":
            goal.write_text("theirs")
        else:
            goal.mkdir()
            (goal / "theirs").touch()
        rename(source, goal)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(SaveError, match="cannot rename"), atomic_folder(target) as folder:
        (folder / "ours").touch()
    assert names(tmp_path) == ["out"]
    assert kind == "full" or target.read_text() == "theirs"
    assert kind == "file" or names(target) == ["theirs"]


def test_a_sibling_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(ValueError, match="why") as caught, atomic_folder(tmp_path / "out") as folder:
        raise ValueError("why")
    assert caught.value.__notes__ == [f"{folder} could not be removed; remove it by hand"]


def test_leftovers_are_of_this_target_only(tmp_path: Path) -> None:
    for name in (".out.partial-1-a", ".out.partial-2-b", ".out2.partial-1-a", "out.partial-1", ".xout.partial-1-a"):
        (tmp_path / name).mkdir()
    assert leftovers(tmp_path / "out") == [tmp_path / ".out.partial-1-a", tmp_path / ".out.partial-2-b"]
    assert leftovers(tmp_path / "absent/out") == []
    with atomic_folder(tmp_path / "out"):
        pass
    assert len(leftovers(tmp_path / "out")) == 2


KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from deepen.checkpoint.atomic import atomic_folder, leftovers
from deepen.checkpoint.recipes import Copy
from deepen.checkpoint.sources import TensorInfo, open_safetensors
from deepen.checkpoint.writer import header, write_weights

root = Path(sys.argv[1])
infos = {f"x{i:02d}": TensorInfo("I8", (500_000,)) for i in range(40)}
(root / "in").mkdir()
(root / "in/model.safetensors").write_bytes(header(infos, {}) + os.urandom(20_000_000))
source = open_safetensors(root / "in")

def save(name):
    with atomic_folder(root / name, forbidden=(root / "in",)) as folder:
        recipes = {key: Copy(key, info) for key, info in infos.items()}
        write_weights(folder, recipes, source, max_shard_bytes=3_000_000, progress=lambda n: time.sleep(0.001))

start = time.perf_counter()
save("timing")
whole = time.perf_counter() - start
random.seed(int(sys.argv[2]))
report = []
for i in range(20):
    name = f"out{i}"
    child = os.fork()
    if child == 0:
        save(name)
        os._exit(0)
    time.sleep(random.random() * whole * 1.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = [path.name for path in leftovers(root / name)]
    report.append({"name": name, "pid": child, "exists": (root / name).exists(), "leftovers": left})
    if not (root / name).exists():
        save(name)
print(json.dumps(report))
"""


def test_killed_writers_leave_the_old_state_and_a_named_rest(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLS, str(tmp_path), "7"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(report) == 20
    killed = [row for row in report if not row["exists"]]
    # The delays spread over the whole save, so most children die inside it.
    assert len([row for row in killed if row["leftovers"]]) > 5
    expected = {path.name: path.read_bytes() for path in (tmp_path / "timing").iterdir()}
    assert len(expected) == 8
    for row in report:
        assert len(row["leftovers"]) <= 1
        assert all(name.startswith(f".{row['name']}.partial-{row['pid']}-") for name in row["leftovers"])
        # Finished before the signal, or by the run after it: whole either way, and the rest did not disturb it.
        assert {path.name: path.read_bytes() for path in (tmp_path / row["name"]).iterdir()} == expected
    got = {
        name: tensor
        for file in expected
        if file.endswith("s")
        for name, tensor in load_file(tmp_path / "out3" / file).items()
    }
    original = load_file(tmp_path / "in/model.safetensors")
    assert all(bool((got[name] == tensor).all()) for name, tensor in original.items())


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("old", "new\nä\n"):
        with atomic_file(path) as file:
            file.write(text)
            assert not path.exists() or path.read_text() == "old"
        assert path.read_bytes() == text.encode()
    with atomic_file(path, "wb") as file:
        file.write(b"\xff")
    assert path.read_bytes() == b"\xff"
    assert names(tmp_path) == ["x.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_file_leaves_the_old_one(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def save() -> None:
        with atomic_file(path) as file:
            file.write("half")
            raise error

    with pytest.raises(error):
        save()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x.json"]


def test_a_full_device_is_a_save_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bin"
    path.write_text("old")
    monkeypatch.setattr(atomic, "open", lambda *args, **kwargs: FileIO("/dev/full", "wb"), raising=False)
    with (
        pytest.raises(SaveError, match=r"cannot write .*x.bin: No space left on device"),
        atomic_file(path, "wb") as file,
    ):
        file.write(b"x")
    assert path.read_text() == "old"


def test_files_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, match in (
        (tmp_path / "folder", "it is a folder"),
        (tmp_path / "absent/x", "it does not exist"),
        (Path("/proc/x"), "cannot write /proc/x"),
    ):
        with pytest.raises(SaveError, match=match), atomic_file(path):
            pytest.fail("the block must not run")
    assert names(tmp_path) == ["folder"]


def test_errors_of_the_block_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "x"):
        (tmp_path / "absent").read_text()
    with pytest.raises(OSError, match="theirs") as caught, atomic_folder(tmp_path / "out"):
        raise OSError(errno.EPIPE, "theirs")
    assert not isinstance(caught.value, SaveError)
    assert names(tmp_path) == []


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x").write_text("old")
    (tmp_path / "x").symlink_to("real/x")
    with atomic_file(tmp_path / "x") as file:
        file.write("new")
    assert (tmp_path / "x").is_symlink()
    assert (tmp_path / "real/x").read_text() == "new"
