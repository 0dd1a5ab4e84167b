"""`deepen check-scaling`: figures, files, and bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepen.cli import main
from deepen.train import scaling

STACK = "layers: 7\nwidth: 8\nheads: 2\nhidden: 8\n"
TINY = ["--depths", "1,3", "--steps", "1", "--seeds", "2", "--batch", "2", "--context", "8"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stack.yaml").write_text(STACK, encoding="utf-8")
    inner = "".join(f"  {line}\n" for line in STACK.splitlines())
    (tmp_path / "recipe.yaml").write_text(f"stack:\n{inner}steps: 10\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 20, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_figures_and_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check-scaling", "recipe.yaml", "--data", "text.txt", *TINY, "--rates", "1e-2,1e-3", "-o", "out"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((place / "out" / "scaling.json").read_text(encoding="utf-8"))
    assert (document["depths"], document["rates"], document["width"]) == ([1, 3], [1e-3, 1e-2], 8)
    names = [curve["parametrisation"] for curve in document["curves"]]
    assert names == ["standard", "depth-mup", "completep"]
    for curve in document["curves"]:
        assert [len(row) for row in curve["changes"]] == [2, 2]
        assert [len(row) for row in curve["losses"]] == [2, 2]
        for row, best in zip(curve["losses"], curve["best_rates"], strict=True):
            assert best == document["rates"][row.index(min(row))]
        assert curve["slope"]["low"] <= curve["slope"]["value"] <= curve["slope"]["high"]
    assert document["curves"][1]["options"] == {"base_depth": 1}
    # at the base depth the two that begin with the same values are one
    assert document["curves"][1]["changes"][0] == document["curves"][2]["changes"][0]
    page = (place / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg" class="chart"') == 2
    assert f"{document['curves'][0]['slope']['value']:.3f}" in page
    assert sorted(path.name for path in place.iterdir()) == ["out", "recipe.yaml", "stack.yaml", "text.txt"]


def test_the_tables(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of depth^(1/2), losses that are lowest at a rate of 1 / depth, and a depth where all runs are lost."""

    def run(config: Any, reading: Any, *, rate: float, **others: Any) -> scaling.Outcome:
        lost = config.layers == 16 and "completep" in str(config.parametrisation)
        loss = float("nan") if lost else abs(rate - 1 / config.layers)
        return scaling.Outcome(change=float("nan") if lost else config.layers**0.5, loss=loss)

    monkeypatch.setattr(scaling, "run", run)
    words = ["check-scaling", "stack.yaml", "--data", "text.txt", "--depths", "16,4", "--rates", "0.25,0.0625"]
    assert main([*words, "--parametrisation", "standard", "--parametrisation", "completep"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["standard", "2", "4", "0.500", "0.500", "to", "0.500", "drifts"] in lines
    assert ["completep", "2", "nan", "-", "-", "lost"] in lines
    assert ["standard", "0.25", "0.0625"] in lines
    assert ["completep", "0.25", "-"] in lines


BAD: Mapping[str, tuple[list[str], int, str]] = {
    "rule": (["--parametrisation", "depth-mop"], 2, "no parametrisation 'depth-mop' (did you mean 'depth-mup'?)"),
    "one depth": (["--depths", "4,4"], 2, "--depths 4,4: a slope needs two depths or more"),
    "depths": (["--depths", "4,x"], 2, "--depths 4,x: expected positive numbers such as 4,16,64"),
    "rates": (["--rates", "0"], 2, "--rates 0: expected positive numbers such as 3e-4,1e-3"),
    "steps": (["--steps", "0"], 2, "--steps 0: expected 1 or more"),
    "batch": (["--batch", "0"], 2, "--batch 0: expected 1 or more"),
    "context": (["--context", "5000"], 1, "windows of --context 5000 need more"),
    "text": (["--data", "none.txt"], 1, "--data none.txt: cannot be read"),
    "output": (["-o", "text.txt"], 1, "text.txt exists already"),
    "tied": (["--parametrisation", "meta-principled"], 2, "use tied: false"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, status, message = BAD[name]
    # all of it is refused before anything is trained
    monkeypatch.setattr(scaling, "run", None)
    text = [] if "--data" in words else ["--data", "text.txt"]
    assert main(["check-scaling", "stack.yaml", *text, *words]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
    assert len(list(place.iterdir())) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STACK + "widht: 3\n", "bad.yaml: no key 'widht' (did you mean 'width'?)"),
        ("stack: {layers: 2, width: 8}\n", "bad.yaml: stack: heads"),
        (STACK + "program: 0 (1-2)*2 3-6\n", "a program does not fit; leave it out"),
        (STACK + "vocabulary: 100\n", "a vocabulary of 100 has no place for bytes"),
        (STACK + "wiring: deepnorm\n", "depth-mup does not go with the wiring deepnorm"),
        (STACK + "init: gpt2\n", "init gpt2 does not go with the parametrisation depth-mup"),
    ],
)
def test_bad_recipes(place: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.yaml").write_text(text, encoding="utf-8")
    assert main(["check-scaling", "bad.yaml", "--data", "text.txt"]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_that_is_not_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-scaling", "none.yaml", "--data", "text.txt"]) == 2
    assert "none.yaml: No such file" in capsys.readouterr().err
