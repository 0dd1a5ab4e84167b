"""The structure of the house, read from every module's syntax tree; each rule also catches planted violations."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "deepen"
MODULES = sorted(SOURCE.rglob("*.py"))

# Top imports bottom only: a package may import from rows below its own, and from itself; within a row, nothing.
# The empty name is the root package, which exports names from everything below it.
ROWS = [
    ["cli"],
    [""],
    ["report"],
    ["compare"],
    ["rules", "train"],
    ["adaptive"],
    ["probe"],
    ["surgery"],
    ["checkpoint"],
    ["stack"],
    ["continuous"],
    ["wiring"],
    ["sublayers"],
    ["tasks", "program"],
    ["registry"],
    ["errors"],
]
HEIGHT = {name: -row for row, names in enumerate(ROWS) for name in names}
# The two modules of the root that belong to a package's place in the order.
STANDS_WITH = {"hf": "checkpoint", "__main__": "cli"}
MAX_LINES = 400
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported at any place: functions and type checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def direction(module: str, source: str) -> list[str]:
    """Imports that go up, sideways, or are relative."""
    own = _package(module)
    if own not in HEIGHT:
        return [f"{module}: package {own!r} has no place in the order of imports"]
    found = []
    for line, name in imports(ast.parse(source)):
        if name.startswith("."):
            found.append(f"{module}:{line}: relative import {name}")
        if name.split(".")[0] != "deepen" or name == "deepen.__version__":
            continue
        other = _package(name)
        if other != own and HEIGHT.get(other, 0) >= HEIGHT[own]:
            found.append(f"{module}:{line}: {own} may not import {name}")
    return found


def program_is_pure(module: str, source: str) -> list[str]:
    """program/ imports the standard library, itself and errors only."""
    if not module.startswith("deepen.program"):
        return []
    allowed = sys.stdlib_module_names | {"deepen"}
    return [
        f"{module}:{line}: program/ may not import {name}"
        for line, name in imports(ast.parse(source))
        if name.split(".")[0] not in allowed
        or (name.startswith("deepen") and not name.startswith(("deepen.program", "deepen.errors")))
    ]


def transformers_in_one_place(module: str, source: str) -> list[str]:
    """Only checkpoint/ and hf.py import transformers."""
    if module == "deepen.hf" or module.startswith("deepen.checkpoint"):
        return []
    return [
        f"{module}:{line}: only checkpoint/ may import {name}"
        for line, name in imports(ast.parse(source))
        if name.split(".")[0] == "transformers"
    ]


def only_safe_loading(module: str, source: str) -> list[str]:
    """No pickle in any form, no code from checkpoints."""
    tree = ast.parse(source)
    found = [f"{module}:{line}: {name}" for line, name in imports(tree) if name.split(".")[0] in PICKLES]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        keywords = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        name = ast.unparse(call.func)
        if name == "torch.load" and keywords.get("weights_only") is not True:
            found.append(f"{module}:{call.lineno}: torch.load without weights_only=True")
        if keywords.get("allow_pickle") or keywords.get("trust_remote_code"):
            found.append(f"{module}:{call.lineno}: {name} would run code from a file")
        if name in ("eval", "exec"):
            found.append(f"{module}:{call.lineno}: {name} of a string")
    return found


def telling_name(module: str, source: str) -> list[str]:
    """A file is named after what it holds."""
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    return [f"{module}: name it after what it holds"] if module.split(".")[-1] in vague else []


def short(module: str, source: str) -> list[str]:
    """At most 400 lines."""
    lines = len(source.splitlines())
    return [f"{module}: {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else []


def documented(module: str, source: str) -> list[str]:
    """A public module says what it is."""
    if module.split(".")[-1].startswith("_") or ast.get_docstring(ast.parse(source)):
        return []
    return [f"{module}: no docstring"]


def no_machine(name: str, text: str) -> list[str]:
    """No path of one machine and no host of a package index."""
    home = r"(?<![\w.~-])/(?:work|root|opt|mnt|home/\w+|Users/\w+)/\w"
    hosts = r"\bpypi\.|pythonhosted\.|download\.pytorch\.|file:" + "///"
    outside = r"\bshared/(?:methods|[A-Zfahc]\w+\.(?:md|tsv))"
    pattern = re.compile("|".join((home, hosts, outside)))
    return [f"{name}:{i}: {m[0]}" for i, line in enumerate(text.splitlines(), 1) for m in pattern.finditer(line)]


Rule = Callable[[str, str], list[str]]
PLANTED: list[tuple[Rule, str, str]] = [
    (direction, "deepen.checkpoint.x", "from deepen.cli import main"),
    (direction, "deepen.checkpoint.x", "def f():\n    import deepen.surgery.drop"),
    (direction, "deepen.checkpoint.x", "from deepen import surgery"),
    (direction, "deepen.checkpoint.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deepen.probe"),
    (direction, "deepen.checkpoint.x", "import_module('deepen.train.loop')"),
    (direction, "deepen.checkpoint.x", "import deepen"),
    (direction, "deepen", "from deepen.cli import main"),
    (direction, "deepen.hf", "import deepen.surgery"),
    (direction, "deepen.rules.x", "import deepen.train.loop"),
    (direction, "deepen.sublayers.x", "from deepen.wiring import base"),
    (direction, "deepen.errors", "import deepen.registry"),
    (direction, "deepen.probe.x", "from . import scores"),
    (direction, "deepen.extras.x", ""),
    (program_is_pure, "deepen.program.x", "import numpy"),
    (program_is_pure, "deepen.program.x", "def f():\n    import torch.nn as nn"),
    (program_is_pure, "deepen.program", "from deepen.registry import method"),
    (transformers_in_one_place, "deepen.cli.x", "def f():\n    from transformers import AutoConfig"),
    (transformers_in_one_place, "deepen.probe.x", "import transformers.cache_utils"),
    (only_safe_loading, "deepen.x", "import pickle"),
    (only_safe_loading, "deepen.x", "def f():\n    from joblib import load"),
    (only_safe_loading, "deepen.x", "torch.load(path)"),
    (only_safe_loading, "deepen.x", "torch.load(path, weights_only=False)"),
    (only_safe_loading, "deepen.x", "np.load(path, allow_pickle=True)"),
    (only_safe_loading, "deepen.x", "AutoModel.from_pretrained(path, trust_remote_code=True)"),
    (only_safe_loading, "deepen.x", "eval(text)"),
    (telling_name, "deepen.surgery.utils", ""),
    (telling_name, "deepen.common", ""),
    (short, "deepen.x", "a = 1\n" * 401),
    (documented, "deepen.x", "import os"),
    (no_machine, "a.md", "see /" + "work/main/x"),
    (no_machine, "a.md", "see /" + "home/someone/x"),
    (no_machine, "a.toml", "url = 'https://py" + "pi.org/simple'"),
    (no_machine, "a.sh", "--find-links file:" + "///srv"),
    (no_machine, "a.py", "# see sha" + "red/methods/x"),
]
ALLOWED: list[tuple[Rule, str, str]] = [
    (direction, "deepen.checkpoint.x", "import torch\nfrom deepen.program import Plan\nfrom deepen import __version__"),
    (direction, "deepen.checkpoint.x", "from deepen.checkpoint.y import z\nfrom deepen.errors import nearest"),
    (direction, "deepen.registry", "from deepen.errors import nearest"),
    (direction, "deepen.hf", "from deepen.checkpoint.open import open_checkpoint"),
    (direction, "deepen.__main__", "from deepen.cli import main"),
    (direction, "deepen.cli.x", "import deepen"),
    (direction, "deepen", "from deepen.probe.x import score"),
    (program_is_pure, "deepen.program.x", "import re\nfrom deepen.errors import nearest\nfrom deepen.program import y"),
    (transformers_in_one_place, "deepen.checkpoint.x", "import transformers"),
    (only_safe_loading, "deepen.x", "torch.load(path, weights_only=True)\nmodel.eval()\nre.compile('a')"),
    (short, "deepen.x", "a = 1\n" * 400),
    (documented, "deepen.x", '"""What it is."""'),
    (no_machine, "a.md", "https://example.org/work/x, ~/opt/x and shared/weights"),
]
RULES = [direction, program_is_pure, transformers_in_one_place, only_safe_loading, telling_name, short, documented]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: Rule) -> None:
    assert len(MODULES) > 30
    found = [line for path in MODULES for line in rule(_module(path), path.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_violation_is_found(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source)


@pytest.mark.parametrize(("rule", "module", "source"), ALLOWED, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_allowed_passes(rule: Rule, module: str, source: str) -> None:
    assert not rule(module, source)


def test_no_rule_is_without_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == {*RULES, no_machine}


def test_tracked_files_name_no_machine_and_no_index_host() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    texts = {path: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    assert SOURCE / "errors.py" in texts
    found = [line for path, text in texts.items() for line in no_machine(str(path.relative_to(ROOT)), text)]
    assert not found, "\n" + "\n".join(found)


def test_importing_deepen_imports_neither_torch_nor_transformers() -> None:
    code = "import deepen, sys; print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert _python(code) == ""


def test_the_program_language_needs_no_torch() -> None:
    code = "import deepen, sys; deepen.Program.parse('0-3').plan(4, ['af'] * 4).tape(); print('torch' in sys.modules)"
    assert _python(code) == "False"


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(name: str) -> str:
    """The part of a deepen name that has a place in the order."""
    parts = name.split(".")
    own = parts[1] if len(parts) > 1 else ""
    return STANDS_WITH.get(own, own)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
