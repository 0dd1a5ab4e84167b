"""Families that the table does not have: found by building them at two depths, examined, and never believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import deepen
from deepen.checkpoint.discover import check, discover
from deepen.checkpoint.family import FAMILIES, REFUSED, known_families
from deepen.errors import FamilyError


class ShortSightedConfig(LlamaConfig):
    model_type = "short_sighted"


class ShortSighted(LlamaForCausalLM):
    """Runs four layers at most, however many it has."""

    config_class = ShortSightedConfig

    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:  # pyright: ignore
        depth = self.config.num_hidden_layers
        self.config.num_hidden_layers = min(4, depth)
        try:
            return super().forward(input_ids=input_ids, cache=cache, **kwargs)
        finally:
            self.config.num_hidden_layers = depth


@pytest.fixture
def short_sighted() -> Iterator[str]:
    AutoConfig.register("short_sighted", ShortSightedConfig)
    AutoModelForCausalLM.register(ShortSightedConfig, ShortSighted)
    yield "short_sighted"
    del CONFIG_MAPPING._extra_content["short_sighted"]
    del MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[ShortSightedConfig]


def test_a_forward_that_ignores_extra_layers_is_found_out(short_sighted: str, tmp_path: Path) -> None:
    report = check(short_sighted, tmp_path)
    assert report.outcome == "refused"
    assert "4 layers ran for 6 visits; the forward of its class leaves some out" in report.reason
    right = {verdict.operation for verdict in report.verdicts if verdict.outcome == "right"}
    wrong = {verdict.operation for verdict in report.verdicts if verdict.outcome == "wrong"}
    assert {"identity", "drop"} <= right
    assert wrong == {"repeat"}


def test_a_discovered_family_is_forgotten_again(tmp_path: Path) -> None:
    report = check("dpr", tmp_path)
    assert (report.outcome, report.table) == ("right", False)
    assert "dpr" not in FAMILIES
    assert {verdict.operation: verdict.outcome for verdict in report.verdicts}["zero"] == "refused"


@pytest.mark.parametrize("model_type", ["zamba2", "swin"])
def test_a_type_that_was_left_out_says_why(model_type: str, tmp_path: Path) -> None:
    report = check(model_type, tmp_path)
    assert (report.outcome, report.reason) == ("refused", REFUSED[model_type])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 4}))
    (tmp_path / "model.safetensors").write_bytes(save({"x": torch.zeros(1)}))
    with pytest.raises(FamilyError, match=f"the family '{model_type}' is refused: "):
        deepen.open(tmp_path)


@pytest.mark.parametrize("model_type", ["swin", "convnext", "efficientnet"])
def test_stages_are_no_uniform_list(model_type: str) -> None:
    with pytest.raises(FamilyError, match=r"lists seen: .*A uniform list of layers would be needed"):
        discover(model_type)


def test_towers_of_one_kind_are_told_apart() -> None:
    assert [tower.name for tower in discover("encoder-decoder").towers] == ["encoder", "decoder"]
    names = [tower.name for tower in discover("flava").towers]
    assert names == ["text_model", "image_model", "multimodal_model"]


def test_an_unknown_type_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="did you mean 'llama'"):
        check("lama", tmp_path)


def test_what_cannot_be_built_says_why(tmp_path: Path) -> None:
    report = check("detr", tmp_path)
    assert report.outcome == "not buildable"
    assert "timm" in report.reason


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(CONFIG_MAPPING.keys() - known_families().keys()))
def test_every_installed_type_ends_in_a_verdict(model_type: str, tmp_path: Path) -> None:
    report = check(model_type, tmp_path)
    assert report.outcome in ("right", "refused", "not buildable")
    assert report.reason or report.outcome == "right"
