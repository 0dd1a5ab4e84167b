"""Configurations of stacks: what is read, and what is said of what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.init import RECIPES
from deepen.stack.stack import Stack

TEXT = """
layers: 4
program: 0 (1-2)*2 3
width: 32
heads: 4
wiring: {name: hyper-connections, streams: 2}
"""


def test_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(TEXT, encoding="utf-8")
    config = StackConfig.read(path)
    assert (config.layers, config.program, config.head, config.inner) == (4, "0 (1-2)*2 3", 8, 85)
    assert config.wiring_options == ("hyper-connections", {"streams": 2})
    assert StackConfig.read(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: 4\nwidht: 8\nheads: 1", "no key 'widht' .did you mean 'width'"),
        ("layers: 4\nwidth: 10\nheads: 4", "width of 10 is not divisible by 4 heads"),
        ("layers: 4\nwidth: 16\nheads: 4\nkv_heads: 3", "4 heads cannot share 3 kv_heads"),
        ("layers: 0\nwidth: 8\nheads: 1", "layers: got 0, must be >= 1"),
        (
            "layers: 4\nwidth: 8\nheads: 1\nwiring: {name: hyper-connections, streams: 0}",
            "wiring.streams: got 0, must be >= 1",
        ),
        ("layers: x\nwidth: 8\nheads: 1", "layers: got 'x', must be a valid integer"),
        ("width: 8\nheads: 1", "layers: is missing"),
        ("layers: 4\nwidth: 8\nheads: 1\nwiring: pre-lm", "wiring: no wiring 'pre-lm' .did you mean 'pre-ln'"),
        ("layers: 4\nwidth: 8\nheads: 1\nwiring: {name: denseformer, perod: 2}", "no option 'perod'.*'period'"),
        ("layers: 4\nwidth: 8\nheads: 1\nwiring: {period: 2}", "a table with a name"),
        ("layers: 4\nwidth: 8\nheads: 1\nwindow: [1, 2]", "window lists 2 windows for 4 layers"),
        ("layers: 4\nwidth: 9\nheads: 3", "a head width of 3 is odd"),
        ("layers: [", "not YAML"),
        ("- 1", "expected keys and values, got list"),
    ],
)
def test_errors_name_the_file_the_key_and_the_nearest(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        StackConfig.read(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        StackConfig.read(tmp_path / "none.yaml")


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recipes_of_initial_values(recipe: str) -> None:
    config = StackConfig(layers=4, program="0 (1-2)*3 3", width=64, heads=4, hidden=256, vocabulary=512, init=recipe)
    model = Stack(config, seed=0)
    expected = RECIPES[recipe](64, 8, 16)
    layer = model.layers[1]
    for tensor, deviation in (
        (layer.a.sublayer.qkv.weight, expected.matrix),
        (layer.f.sublayer.down.weight, expected.output),
        (model.embedding.weight, expected.embedding),
    ):
        assert tensor.std().item() == pytest.approx(deviation, rel=0.03)
    with pytest.raises(UsageError, match="did you mean 'gpt2'"):
        Stack(config.model_copy(update={"init": "gpt3"}))
