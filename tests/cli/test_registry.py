"""The register of methods."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deepen import registry
from deepen.cli import main
from deepen.errors import UsageError

FIELDS = {"family": "wiring", "source": "arXiv:2203.00555", "title": "DeepNet", "mechanism": "scales", "cost": "none"}


class Made:
    pass


class Other:
    pass


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", {})
    monkeypatch.setattr(registry, "MODULES", ())


def test_a_method_is_found_with_its_file() -> None:
    @registry.method("deepnorm", **FIELDS)
    class DeepNorm:
        pass

    found = registry.lookup("deepnorm")
    assert found.implementation is DeepNorm
    assert found.file.endswith("test_registry.py")
    assert found.to_json() == {"name": "deepnorm", "file": found.file, **FIELDS}


def test_methods_are_sorted_by_family_and_name() -> None:
    for name, family in (("b", "wiring"), ("c", "mixer"), ("a", "wiring")):
        registry.method(name, **{**FIELDS, "family": family})(Made)
    assert [found.name for found in registry.methods()] == ["c", "a", "b"]
    assert [found.name for found in registry.methods("wiring")] == ["a", "b"]


def test_a_name_is_registered_once() -> None:
    registry.method("deepnorm", **FIELDS)(Made)
    with pytest.raises(ValueError, match="'deepnorm' is registered twice"):
        registry.method("deepnorm", **FIELDS)(Other)


@pytest.mark.parametrize("field", [*FIELDS, "name"])
def test_no_field_is_empty(field: str) -> None:
    given = {"name": "deepnorm", **FIELDS, field: " "}
    with pytest.raises(ValueError, match=f"{field} is empty"):
        registry.method(given.pop("name"), **given)


def test_unknown_names_get_the_nearest() -> None:
    registry.method("deepnorm", **FIELDS)(Made)
    with pytest.raises(UsageError, match="did you mean 'deepnorm'"):
        registry.lookup("depnorm")
    with pytest.raises(UsageError, match="did you mean 'wiring'"):
        registry.methods("wring")


def test_modules_are_imported_when_an_implementation_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MODULES", ("deepen.surgery.drop",))
    imported: list[str] = []
    monkeypatch.setattr(registry, "import_module", imported.append)
    drop, block = registry.methods()
    assert (drop.name, drop.file, block.name) == ("drop", "deepen/surgery/drop.py", "drop-block")
    assert imported == []
    monkeypatch.setitem(registry._METHODS, "drop", dataclasses.replace(drop, made=Made))
    assert drop.implementation is Made
    assert imported == ["deepen.surgery.drop"]


def test_what_is_stated_in_the_text_is_what_the_decorators_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stated = registry._stated(registry.MODULES)
    assert len(stated) > 60
    for name, found in stated.items():
        assert found.implementation is registry._METHODS[name].made
        assert found.to_json() == registry._METHODS[name].to_json()


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    registry.method("deepnorm", **FIELDS)(Made)
    assert main(["methods"]) == 0
    assert "arXiv:2203.00555" in capsys.readouterr().out
    assert main(["methods", "--family", "wiring", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"][0]["name"] == "deepnorm"
