"""A real model of 135 million parameters: perplexity against transformers' own loss, and the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import deepen
from deepen.cli.packaged import packaged_model, packaged_text
from deepen.probe.windows import encode
from tests.cli.models import deepen as command

pytestmark = pytest.mark.slow


def test_perplexity_on_hamlet() -> None:
    opened = deepen.open(packaged_model())
    model, tokenizer = opened.load(), opened.tokenizer()
    text = packaged_text()
    got = deepen.perplexity(model, tokenizer, text, tokens=2048)
    ids = torch.tensor(encode(tokenizer, text, 2048)[0]).reshape(4, 1, 512)
    with torch.no_grad():
        losses = [model(input_ids=window, labels=window).loss.item() for window in ids]
    assert got.tokens == 4 * 511
    assert got.nll == pytest.approx(sum(losses) * 511, rel=1e-5)
    assert got.perplexity == pytest.approx(36.68, abs=0.02)


def test_the_head_of_a_long_text_is_tokenised_as_in_the_whole() -> None:
    tokenizer = deepen.open(packaged_model()).tokenizer()
    text = packaged_text()
    ids, edges = encode(tokenizer, text, None)
    assert encode(tokenizer, text, 2048) == (ids[:2048], edges[:2049])
    assert edges[-1] == len(text.encode())


def test_demo(tmp_path: Path) -> None:
    ran = command("demo", "--out", tmp_path / "demo", "--json", env={"OMP_NUM_THREADS": "2"})
    assert ran.status == 0, ran.err
    document = json.loads(ran.out)
    found = {row["name"]: row["perplexity"] for row in document["results"]}
    # cutting an end ruins the model, cutting the middle hurts it, repeating or pairing layers there hardly matters
    assert found["as it is"] == pytest.approx(36.68, abs=0.02)
    assert found["repeat layers 14-16"] < 45
    assert found["layers 15 and 16 side by side"] < 45
    assert found["without the middle third"] > 300
    assert min(found["without the first third"], found["without the last third"]) > 10000
    assert document["baked"]["layers"] == 33
    assert document["baked"]["difference"] <= document["baked"]["tolerance"]
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10000
