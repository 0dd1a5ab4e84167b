"""The package, its documents and its make targets agree with the code."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points, metadata, version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest

import deepen
from deepen.cli import COMMANDS, main
from deepen.errors import ProgramError
from deepen.program import Program
from deepen.program.draw_text import draw_text
from tests.cli.models import TEXT, tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# The model that the README's examples use, and its depth.
EXAMPLE, DEPTH = "Qwen/Qwen3-0.6B", 28


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[list[str]]:
    """The arguments of every `deepen` command in a document."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in blocks("sh", path.read_text(encoding="utf-8")):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["deepen"]:
                    yield words[1:]


def test_one_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0]
    assert version("deepen") == deepen.__version__ == newest


def test_metadata() -> None:
    found = metadata("deepen")
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    (script,) = [point for point in entry_points(group="console_scripts") if point.name == "deepen"]
    assert script.load() is main


def test_types_and_the_page_ship_with_the_package() -> None:
    for name in ("py.typed", "report/page.html.j2"):
        assert files("deepen").joinpath(name).is_file()
    # Everything below the package's folder is part of the wheel.
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/deepen"]}


def test_imports_and_dependencies_agree() -> None:
    """What src imports from elsewhere is a dependency or an extra, and every dependency is imported."""
    needed = {_imported(line) for line in PROJECT["project"]["dependencies"]}
    extras = {_imported(line) for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra}
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    outside = found - set(sys.stdlib_module_names) - {"deepen"}
    assert outside <= needed | extras
    assert needed <= outside


def _imported(requirement: str) -> str:
    """The module of a requirement; for all of ours but one it is the name in lower case with underscores."""
    name = re.split(r"[<>=\[ ]", requirement)[0].replace("-", "_").lower()
    return {"pyyaml": "yaml"}.get(name, name)


def test_transformers_range_is_the_one_that_open_checks() -> None:
    tested = import_module("deepen.checkpoint.open").TESTED
    low, high = (".".join(map(str, bound)) for bound in tested)
    assert f"transformers>={low},<{high}" in PROJECT["project"]["dependencies"]


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "lint", "format", "bench", "clean"])
def test_make_target(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert re.search(rf"^\.PHONY:.* {target}\b", makefile, re.MULTILINE)


def test_documents_name_only_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"]:
        for target in re.findall(r"^(?:`)?make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_documented_commands_exist_and_take_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    known = {name for name, *_ in COMMANDS}
    found = list(commands())
    assert {"show", "run", "eval", "apply"} <= {words[0] for words in found}
    for words in found:
        assert words[0] in known
        assert main([words[0], "--help"]) == 0
        shown = capsys.readouterr().out
        for option in (word for word in words[1:] if re.fullmatch(r"--?[a-z][a-z-]*", word)):
            assert re.search(rf"(?<![\w-]){option}\b", shown), f"deepen {words[0]} has no {option}"


def test_documented_programs_fit_the_example() -> None:
    found = [
        word
        for words in commands()
        for before, word in pairwise(words[1:])
        if re.fullmatch(r"[0-9({][^a-z]*", word) and not before.startswith("-")
    ]
    assert len(found) >= 4
    for text in found:
        Program.parse(text).plan(DEPTH, ["af"] * DEPTH)


def test_language_table_parses() -> None:
    rows = re.findall(r"^\| (`.*?) \| (?!means)", README, re.MULTILINE)
    written = [text.replace("\\|", "|") for row in rows for text in re.findall(r"`([^`]+)`", row) if text != "@name"]
    assert len(written) >= 12
    for text in written:
        Program.parse(text)


def test_drawing_and_error_in_the_readme() -> None:
    drawing, error = blocks("text")
    program = next(words[2] for words in commands() if words[0] == "show")
    assert draw_text(Program.parse(program).plan(DEPTH, ["af"] * DEPTH)) == drawing.strip()
    with pytest.raises(ProgramError) as caught:
        Program.parse("0-17 20-30").plan(DEPTH, ["af"] * DEPTH)
    assert str(caught.value) == error.rstrip("\n")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target.split("#")[0]).exists(), target


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    """On a tiny model of the same family and depth, in a process of its own since it registers classes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    config = Qwen3Config(num_hidden_layers=DEPTH, num_attention_heads=2, num_key_value_heads=1, **size)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    example, transforms, stacks = blocks("python")
    assert example.count(f'"{EXAMPLE}"') == 1
    tokens = "import torch\ntokens = torch.tensor([[1, 2, 3]])"
    checks = ["assert type(again).__name__ == 'Qwen3ForCausalLM'", "assert wide.load().deepen.plans"]
    code = "\n".join(
        [example.replace(f'"{EXAMPLE}"', '"model"'), f"text = {TEXT!r}", transforms, tokens, stacks, *checks]
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "looped", "model", "smaller"]
