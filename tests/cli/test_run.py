"""Streaming, run-time counts, and the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from deepen.cli import main
from deepen.cli.run import Stream, encode
from tests.cli.models import checkpoint, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("run") / "llama"))


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_time_count_is_a_loop_of_that_count(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "the king", "--tokens", "12")
    texts = {
        count: ran(capsys, "run", model, "0-1 (2-3)*1..4 4-5", *options, "--counts", count)["text"] for count in "134"
    }
    for count, text in texts.items():
        assert text == ran(capsys, "run", model, f"0-1 (2-3)*{count} 4-5", *options)["text"]
    assert len(set(texts.values())) > 1


def test_settings_that_a_checkpoint_stores_do_not_sample_or_punish(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "stored"
    shutil.copytree(model, stored)
    settings = {"repetition_penalty": 9.0, "do_sample": True, "top_p": 0.5, "max_new_tokens": 3, "min_new_tokens": 12}
    (stored / "generation_config.json").write_text(json.dumps(settings))
    options = ("0-5", "--prompt", "the king", "--tokens", "8")
    assert ran(capsys, "run", str(stored), *options)["text"] == ran(capsys, "run", model, *options)["text"]


def test_each_loop_has_its_count(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "the king", "--tokens", "8")
    got = ran(capsys, "run", model, "(0-1)*1..3 2 (3)*2 (4-5)*1..2", *options, "--counts", "3,1")
    assert got["text"] == ran(capsys, "run", model, "(0-1)*3 2 (3)*2 4-5", *options)["text"]


def test_the_draws_follow_the_seed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("run", model, "0-5", "--prompt", "the king", "--tokens", "12", "--temperature", "2")
    first, again, other = (ran(capsys, *options, "--seed", seed)["text"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_what_is_streamed_is_what_json_says(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("run", model, "0-5", "--prompt", "the king", "--tokens", "12")
    assert main(list(options)) == 0
    assert capsys.readouterr().out == ran(capsys, *options)["text"] + "\n"


def test_an_encoder_decoder_answers_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(checkpoint(tmp_path / "t5", "t5"))
    got = ran(capsys, "run", model, "encoder: (0-3)*2", "--prompt", "the king", "--tokens", "5")
    assert got["program"] == "decoder: 0-2 encoder: (0-3)*2"
    assert 1 <= got["tokens"] <= 5


def test_the_chat_template_is_applied_when_there_is_one() -> None:
    plain, chat = tokenizer(), tokenizer(chat=True)
    bare = plain("abc").input_ids
    assert encode(chat, "abc", True)[0].tolist() == [[4, *bare, 5]]
    assert encode(chat, "abc", True)[1] is True
    assert encode(chat, "abc", False)[0].tolist() == [bare]
    assert encode(plain, "abc", True)[1] is False


def test_words_are_printed_whole_and_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    made = tokenizer()
    stream = Stream(made)
    stream.put(torch.tensor([[9, 9, 9]]))
    for token in made("the king, the café").input_ids:
        stream.put(torch.tensor([token]))
    assert capsys.readouterr().out == "the king, the "
    stream.end()
    assert capsys.readouterr().out == "café\n"
    assert stream.count == 18
