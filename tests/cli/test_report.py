"""`--keep` and `deepen report`: results of a real run in one folder, and the page that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepen.cli import main
from tests.cli.models import TEXT, checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    checkpoint(folder / "model")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def test_the_page_shows_what_the_commands_found(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, model, data = (
        tmp_path / "study",
        str(place / "model"),
        ["--data", str(place / "text.txt"), "--context", "16"],
    )
    found = [*data, "--tokens", "64"]
    options = ["--budget", "0.5", "--method", "contiguous", "--held-out-tokens", "64", "-o", str(tmp_path / "s.json")]
    for command in (
        ["show", model, "0-2 {3|4} 5"],
        ["score", model, "block_influence", "removal", "effects", *found],
        ["search", model, *options, *found],
        ["eval", model, "0-5", "0-3", *found],
        ["run", model, "0-5", "--prompt", "who", "--tokens", "3"],
    ):
        assert main([*command, "--keep", str(study)]) == 0, command
    assert main(["eval", model, "0-2", *found, "--keep", str(study), "--json"]) == 0
    capsys.readouterr()
    kept = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in study.iterdir()}
    assert kept.keys() == {"show.json", "score.json", "search.json", "eval.json", "eval-2.json", "run.json"}
    assert main(["report", str(study)]) == 0
    assert capsys.readouterr().out == f"{study / 'index.html'} written: 6 results\n"
    html = (study / "index.html").read_text(encoding="utf-8")
    program = kept["search.json"]["program"]
    removal = kept["score.json"]["scores"]["removal"]["values"]
    for expected in (program, f"layer 0: {removal[0]:.4g}", "visit skipped", "0-2 {3|4} 5", kept["run.json"]["prompt"]):
        assert expected in html, expected
    for document in kept.values():
        assert document["kept"]["command"].startswith("deepen ")
        assert f"--keep {study}" in document["kept"]["command"]
    assert "<script" not in html


def test_bad_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert "--keep" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_kept(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(place / "model"), "--keep", str(place / "text.txt")]) == 1
    printed = capsys.readouterr()
    assert "cannot make this folder" in printed.err
    assert printed.out == ""
