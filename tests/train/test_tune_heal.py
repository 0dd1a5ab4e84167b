"""`deepen heal` in its selective modes: what is saved, what moved, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import deepen
from deepen.cli import main
from tests.cli.models import TEXT, checkpoint

PROGRAM = "0-1 (2-3)*2"
OPTIONS = {
    "--context": "32", "--batch": "4", "--steps": "20", "--lr": "3e-3", "--eval-every": "10",
    "--held-out-tokens": "128",
}  # fmt: skip
OTHER = "SIC TRANSIT GLORIA MUNDI! ET IN ARCADIA EGO; 0123456789.\n" * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tuned")
    checkpoint(made / "model", bos=True)
    (made / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    (made / "other.txt").write_text(OTHER, encoding="utf-8")
    return made


def command(folder: Path, out: Path, *more: str) -> list[str]:
    usual = {"--data": str(folder / "text.txt"), "-o": str(out), **OPTIONS}
    kept = [word for name, value in usual.items() if name not in more for word in (name, value)]
    return ["heal", str(folder / "model"), PROGRAM, *kept, *more]


def tensors(place: Path) -> dict[str, torch.Tensor]:
    return deepen.open(place).load().state_dict()


@pytest.mark.parametrize(
    ("mode", "more", "ends"),
    [
        ("fim", ["--count", "2"], ""),
        ("inflection", ["--rank", "4"], "proj.weight"),
        ("slicefine", ["--width", "4", "--every", "3", "--order", "alternating"], "proj.weight"),
        ("losia", ["--share", "0.5", "--every", "4"], "proj.weight"),
        ("slam", ["--layers", "1,3"], "proj.weight"),
        ("spu", ["--share", "0.3", "--layers", "0-2"], "up_proj.weight"),
    ],
)
def test_the_saved_model_is_the_healed_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, more: list[str], ends: str
) -> None:
    out = tmp_path / "healed"
    assert main([*command(folder, out, "--mode", mode, *more, "--lr", "1e-2"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["difference"]["value"] < 0
    text = TEXT * 3
    ck = deepen.open(out)
    found = deepen.perplexity(ck.load(), ck.tokenizer(), text[round(len(text) * 0.9) :], context=32, tokens=128)
    after = document["after"]["nll"] / document["after"]["tokens"]
    assert found.nll / found.tokens == pytest.approx(after, abs=1e-5)
    before = deepen.open(folder / "model").apply(PROGRAM).load().state_dict()
    now = tensors(out)
    assert set(now) == set(before)
    moved = {name for name in before if not torch.equal(now[name], before[name])}
    assert moved
    assert all(".layers." in name and name.endswith(ends) for name in moved)
    layers = document["layers"] or [0, 1, 2, 3]
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in moved} == set(layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]


def test_people_read_which_layers_were_chosen(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--mode", "slam", "--other", str(folder / "other.txt"), "--count", "2", "--steps", "2"]
    assert main(command(folder, tmp_path / "healed", *more)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layers"))
    chosen = {int(each) for each in line.removeprefix("layers").split(",")}
    assert len(chosen) == 2
    before = deepen.open(folder / "model").apply(PROGRAM).load().state_dict()
    now = tensors(tmp_path / "healed")
    moved = {name.split(".layers.")[1] for name in before if not torch.equal(now[name], before[name])}
    assert moved == {f"{layer}.mlp.{name}_proj.weight" for layer in chosen for name in ("up", "down")}


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        (["--width", "4"], 2, "--width is about --mode slicefine; name the mode"),
        (["--mode", "losia", "--order", "rows"], 2, "--order is about --mode slicefine"),
        (["--mode", "slicefine", "--share", "0.5"], 2, "--share is about --mode losia and --mode spu"),
        (["--mode", "slicefine", "--width", "0"], 2, "--width 0: expected 1 or more"),
        (["--mode", "slicefine", "--every", "0"], 2, "--every 0: expected 1 or more"),
        (["--mode", "losia", "--every", "0"], 2, "--every 0: expected 1 or more steps of a window"),
        (["--mode", "losia", "--share", "1.5"], 2, "--share 1.5: expected a share"),
        (["--mode", "spu", "--share", "0"], 2, "--share 0.0: expected a share"),
        (["--mode", "fim", "--count", "5"], 2, "--count 5: expected 1 to 4"),
        (["--mode", "fim", "--layers", "1"], 2, "chooses the layers itself"),
        (["--mode", "inflection", "--layers", "1"], 2, "chooses the layers itself"),
        (["--mode", "slam"], 2, "--mode slam takes texts in other languages"),
        (["--mode", "slam", "--layers", "1", "--count", "1"], 2, "both say which layers"),
        (["--mode", "slam", "--layers", "5"], 2, "visits no layer 5"),
        (["--mode", "slicefine", "--layers", "5"], 2, "visits no layer 5"),
        (["--mode", "spu", "--keep-adapter"], 2, "--keep-adapter is about --mode lora"),
    ],
)
def test_bad_input(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], status: int, words: str
) -> None:
    assert main(command(folder, tmp_path / "healed", *more)) == status
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["slicefine", "losia"])
def test_a_killed_run_goes_on_to_the_same_weights(folder: Path, tmp_path: Path, mode: str) -> None:
    more = ["--mode", mode, "--every", "7", "--steps", "40", "--save-every", "5"]
    usual = command(folder, tmp_path / "healed", *more)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-m", "deepen", *usual], stderr=subprocess.PIPE, env=env)
    log = tmp_path / "healed.healing" / "log.jsonl"
    while not (log.is_file() and log.read_text(encoding="utf-8").count("\n") >= 18):
        assert run.poll() is None
        time.sleep(0.02)
    run.kill()
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert main([*usual, "--every", "8", "--resume"]) == 2
    assert main([*usual, "--resume"]) == 0
    assert main(command(folder, tmp_path / "again", *more)) == 0
    stopped, whole = tensors(tmp_path / "healed"), tensors(tmp_path / "again")
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)
