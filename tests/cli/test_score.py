"""`deepen score`: the table, the document, the figure, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deepen.cli import main
from deepen.probe.scores.reading import Reading
from deepen.probe.scores.score import TOGETHER
from deepen.registry import methods
from tests.cli.models import TEXT, checkpoint, deepen

FAST = ("--context", "16", "--tokens", "64")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    checkpoint(folder / "llama")
    checkpoint(folder / "bert", "bert", encoder=True)
    checkpoint(folder / "t5", "t5")
    checkpoint(folder / "vit", "vit")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    (folder / "empty.txt").write_bytes(b"\n")
    return folder


def test_scores_stand_side_by_side_with_ranks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", f"{place}/llama", "--data", f"{place}/text.txt", *FAST]) == 0
    out, err = capsys.readouterr()
    heading, *rows = out.split("\n\n")[0].splitlines()
    assert heading.split() == [
        "visit", "layer", "block_influence", "rank", "angular", "rank", "contribution", "rank", "geometry", "rank",
        "effective_rank", "cka", "rank",
    ]  # fmt: skip
    assert [row.split()[:2] for row in rows] == [[str(at)] * 2 for at in range(6)]
    assert sorted(row.split()[3] for row in rows) == [*"123456"]
    assert "64 tokens in 4 windows; forward calls: 4 in " in out
    assert " for " + ", ".join(TOGETHER) in out
    assert "loading 0-5" in err


def test_a_program_and_names_in_any_order(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", f"{place}/llama", "removal", "0-1 2*2 5", "angular", "--data", f"{place}/text.txt", *FAST]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["program"] == "0-1 2*2 5"
    assert [row["layer"] for row in document["rows"]] == [*"01225"]
    assert {name.split(".")[0] for name in document["scores"]} == {"removal", "angular"}
    assert document["matrices"]["angular"]["values"][4][2] is None
    assert document["scores"]["removal"]["count"] == 4 * 15
    assert main([*arguments, "--details"]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert {"removal.a", "removal.f", "removal.perplexity"} <= set(heading.split())


def test_all_names_all(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "scores.svg"
    arguments = ["score", f"{place}/llama", "all", "--data", f"{place}/text.txt", *FAST, "--plot", str(svg)]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    known = {found.name for found in methods("score")}
    assert {name.split(".")[0] for name in document["scores"]} == known
    root = ElementTree.parse(svg).getroot()
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    for name in known:
        assert f"{name}: " in words
    # the heat map names both of its sides
    assert "visit skipped" in words
    assert "visit changed" in words


def test_the_figure(place: Path, tmp_path: Path) -> None:
    png, one, two = (tmp_path / name for name in ("a.png", "b.svg", "c.svg"))
    arguments = ["score", f"{place}/llama", "angular", "contribution", "--data", f"{place}/text.txt", *FAST]
    for path in (png, one, two):
        assert main([*arguments, "--plot", str(path)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert one.read_bytes() == two.read_bytes()
    words = "".join(ElementTree.parse(one).getroot().itertext())
    assert "part a" in words
    assert "visit skipped" not in words


def test_what_a_model_has_no_head_for_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", f"{place}/bert", "removal", "angular", "--data", f"{place}/text.txt", *FAST]
    assert main(arguments) == 0
    assert "removal: skipped: it needs a causal head" in capsys.readouterr().out
    # nothing but what was skipped
    assert main(["score", f"{place}/bert", "lens", "--data", f"{place}/text.txt", *FAST]) == 0
    assert "lens: skipped" in capsys.readouterr().out


def test_a_tower_of_several(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", f"{place}/t5", "angular", "--data", f"{place}/text.txt", *FAST]
    assert main(arguments) == 1
    assert "encoder, decoder" in capsys.readouterr().err
    for tower, depth in (("encoder", 4), ("decoder", 3)):
        assert main([*arguments, "--tower", tower, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["rows"]) == depth


def test_memories_of_two_visits(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", f"{place}/llama", "0-3", "--data", f"{place}/text.txt", *FAST, "--memories", "1,3"]
    assert main([*arguments, "--neurons", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["visit"] for each in document["memories"]] == [1, 3]
    listed = [neuron for each in document["memories"] for neuron in each["neurons"]]
    assert [each["visit"] for each in listed] == [1, 1, 3, 3]
    assert all(len(each["speaks"]) == len(each["fires"]) == 5 for each in listed)
    assert main([*arguments, "--neurons", "1", "--keep", f"{place}/kept"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["visit", "layer", "memories", "active", "effective", "agreement"]
    assert [line.split()[:3] for line in lines[1:3]] == [["1", "1", "48"], ["3", "3", "48"]]
    neurons = [line for line in lines if " neuron " in line]
    assert len(neurons) == 2
    assert neurons[0].startswith(f"visit 1 neuron {listed[0]['neuron']}  speaks for '")
    assert main(["report", f"{place}/kept"]) == 0
    page = (place / "kept" / "index.html").read_text(encoding="utf-8")
    assert "Feed-forwards as memories" in page
    assert "active" in page


M, T = "{place}/llama", "{place}/text.txt"
CASES = {
    "no data": ([M], 2, ["--data"]),
    "unknown score": ([M, "angluar", "--data", T], 2, ["did you mean 'angular'", "block_influence"]),
    "two programs": ([M, "0-2", "0-3", "--data", T], 2, ["expected one program", "'0-2', '0-3'"]),
    "bad program": ([M, "0-9", "--data", T], 1, ["program column"]),
    "not a figure": ([M, "--data", T, "--plot", "{place}/x.doc"], 2, ["x.doc", ".svg or .png"]),
    "memories and scores": ([M, "cka", "--data", T, "--memories", "1"], 2, ["instead of scores"]),
    "memories of words": ([M, "--data", T, "--memories", "a"], 2, ["'a'", "3,5"]),
    "memories of no visit": ([M, "--data", T, "--context", "16", "--memories", "9"], 2, ["visit 9", "0-5"]),
    "no neurons": ([M, "--data", T, "--memories", "1", "--neurons", "0"], 2, ["--neurons 0"]),
    "missing data": ([M, "--data", "{place}/none.txt"], 1, ["none.txt", "cannot be read"]),
    "empty data": ([M, "--data", "{place}/empty.txt"], 1, ["no text"]),
    "not UTF-8": ([M, "--data", "{place}/latin.txt"], 1, ["0xe9", "iconv"]),
    "too wide": ([M, "--data", T, "--context", "65"], 2, ["64 positions"]),
    "short window": ([M, "cka", "--data", T, "--context", "4"], 2, ["at least 5 tokens", "--context"]),
    "fewer tokens than a window": ([M, "--data", T, "--context", "16", "--tokens", "15"], 2, ["15 tokens"]),
    "no such tower": ([M, "--data", T, "--tower", "txt"], 1, ["did you mean 'text'"]),
    "reads no text": (["{place}/vit", "--data", T], 1, []),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(place: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, status, words = CASES[case]
    before = sorted(place.rglob("*"))
    assert main(["score", *(word.format(place=place) for word in arguments)]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert sorted(place.rglob("*")) == before


def test_out_of_memory_says_what_to_lower(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Reading, *arguments: object, **options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(Reading, "run", full)
    assert main(["score", f"{place}/llama", "--data", f"{place}/text.txt", *FAST, "--batch", "3"]) == 2
    assert "lower --batch (now 3) or --context (now 16)" in capsys.readouterr().err


def test_in_a_process_of_its_own(place: Path) -> None:
    ran = deepen("score", place / "llama", "cka", "--data", place / "text.txt", *FAST)
    assert ran.status == 0, ran.err
    assert ran.err.splitlines() == ["loading 0-5"]
