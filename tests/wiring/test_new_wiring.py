"""The walk-through of CONTRIBUTING.md: a wiring is one file, and runs under a looped program."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest

from deepen import registry
from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import GROUP, LOOPED, Case

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The wiring of the guide, from a file of its own."""
    chapter = GUIDE.read_text(encoding="utf-8").split("## A new wiring\n")[1]
    (code,) = re.findall(r"^ {3}```python\n(.*?)^ {3}```$", chapter.split("\n## ")[0], re.MULTILINE | re.DOTALL)
    file = tmp_path / "carry.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("carry", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What is imported while the register is a copy would be missing from it afterwards.
    assert all(each.implementation for each in registry.methods("wiring"))
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setitem(sys.modules, "carry", module)
    spec.loader.exec_module(module)
    return Case("carry", {"start": 1.0}, equal=True)


def test_a_wiring_in_one_file_obeys_the_laws_in_a_loop(carry: Case) -> None:
    laws.equals_pre_ln(carry, LOOPED)
    laws.every_parameter_learns(carry, LOOPED)
    laws.gradients_are_right(carry, LOOPED)
    laws.cached_equals_uncached(carry, LOOPED)
    laws.saved_equals_loaded(carry, LOOPED)
    laws.batches_are_independent(carry, GROUP)
    laws.cached_equals_uncached(carry, laws.all_features(carry.kind))
    assert tuple(laws.at_first(carry, LOOPED).wiring.get_parameter("factors").shape) == (10,)


def test_its_name_and_options_are_known_to_configurations(carry: Case) -> None:
    with pytest.raises(UsageError, match=r"no wiring 'cary' \(did you mean 'carry'\?\)"):
        StackConfig.read({"layers": 2, "width": 8, "heads": 2, "wiring": "cary"})
    with pytest.raises(UsageError, match="the wiring carry has no option 'begin'; it takes start"):
        StackConfig.read({"layers": 2, "width": 8, "heads": 2, "wiring": {"name": "carry", "begin": 1}})
    with pytest.raises(UsageError, match=r"wiring\.start: got .*, must be a valid number"):
        StackConfig.read({"layers": 2, "width": 8, "heads": 2, "wiring": {"name": "carry", "start": "one"}})


@pytest.mark.parametrize(
    ("wiring", "message"),
    [
        ({"name": "hyper-connections", "streams": 0}, "wiring.streams: got 0, must be >= 1"),
        ({"name": "pre-ln", "streams": 4}, "the wiring pre-ln has no option 'streams'; it takes none"),
        ({"name": "orthogonal-hyper-connections", "streams": 4}, "has no option 'streams'; it takes readout"),
        ({"name": "elc-bert", "variant": "based"}, "wiring.variant: got 'based', must be 'base'"),
        ({"name": "deep-delta", "start": 2}, "wiring.start: got 2, must be < 2"),
        ({"streams": 4}, "a wiring is a name, or a table with a name and its options"),
    ],
)
def test_bad_options_are_one_clear_error(wiring: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        StackConfig.read({"layers": 2, "width": 8, "heads": 2, "wiring": wiring})
