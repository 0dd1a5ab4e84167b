"""`deepen heal`: what it writes, that it helps, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import deepen
from deepen.cli import main
from tests.cli.models import TEXT, checkpoint

CUT, LOOP = "0-1 4-5", "0-1 (2-3)*2"
OPTIONS = {
    "--context": "32", "--batch": "4", "--steps": "20", "--lr": "3e-3", "--eval-every": "10",
    "--held-out-tokens": "128",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("heal")
    checkpoint(made / "model", bos=True)
    (made / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    return made


def command(folder: Path, out: Path, program: str, *more: str) -> list[str]:
    """Healing the tiny model; what is given replaces the usual options."""
    usual = {"--data": str(folder / "text.txt"), "-o": str(out), **OPTIONS}
    kept = [word for name, value in usual.items() if name not in more for word in (name, value)]
    return ["heal", str(folder / "model"), program, *kept, *more]


def tensors(place: Path) -> dict[str, torch.Tensor]:
    return deepen.open(place).load().state_dict()


def held_out_loss(place: Path, text: str) -> float:
    """The loss on the last tenth of a text, as healing reads it."""
    ck = deepen.open(place)
    found = deepen.perplexity(ck.load(), ck.tokenizer(), text[round(len(text) * 0.9) :], context=32, tokens=128)
    return found.nll / found.tokens


@pytest.mark.parametrize(
    ("program", "more"),
    [
        (CUT, ["--mode", "full"]),
        (LOOP, ["--mode", "lora", "--rank", "4", "--lr", "2e-2"]),
        (LOOP, ["--mode", "lora", "--rank", "4", "--lr", "2e-2", "--keep-adapter"]),
        (CUT, ["--mode", "layers", "--layers", "1,4-5"]),
        (LOOP, ["--distil", "0.5", "--temperature", "2", "--accumulate", "2"]),
    ],
    ids=["full", "lora", "adapter", "layers", "distil"],
)
def test_the_saved_model_is_the_healed_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str, more: list[str]
) -> None:
    out = tmp_path / "healed"
    assert main(command(folder, out, program, *more, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["difference"]["value"] < 0
    assert document["difference"]["high"] < 0
    after = document["after"]["nll"] / document["after"]["tokens"]
    assert held_out_loss(out, TEXT * 3) == pytest.approx(after, abs=1e-5)
    kind = json.loads((out / "config.json").read_text(encoding="utf-8"))["model_type"]
    assert kind == ("llama" if program == CUT else "deepen_checkpoint")
    assert (out / "tokenizer.json").is_file()
    assert (out / "adapter").is_dir() == ("--keep-adapter" in more)
    lines = [json.loads(line) for line in (out / "heal.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["step"] for line in lines if "held_out" in line] == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]


def test_only_the_layers_named_move(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "healed"
    assert main(command(folder, out, CUT, "--mode", "layers", "--layers", "4", "--weight-decay", "1")) == 0
    before = deepen.open(folder / "model").apply(CUT).load().state_dict()
    moved = {name for name, each in tensors(out).items() if not torch.equal(each, before[name])}
    # layer 4 of the bank is the third that the program visits
    assert moved == {name for name in before if name.startswith("model.layers.2.")}


def test_only_what_the_program_owns_moves(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, out = "0-1 (2-3)*2[lora=2,emb] 4-5", tmp_path / "healed"
    assert main(command(folder, out, program, "--mode", "owned", "--lr", "2e-2", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["difference"]["high"] < 0
    before = deepen.open(folder / "model").apply(program).load().state_dict()
    after = tensors(out)
    assert after.keys() == before.keys()
    moved = {name for name, each in after.items() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if ".owned." in name}
    assert main(command(folder, tmp_path / "no", CUT, "--mode", "owned")) == 2
    assert "owns no parameters" in capsys.readouterr().err


def test_people_get_the_difference(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, tmp_path / "healed", CUT, "--tokens", "300", "--steps", "3")) == 2
    assert "give one" in capsys.readouterr().err
    words = [word for word in command(folder, tmp_path / "healed", CUT) if word not in ("--steps", "20")]
    assert main([*words, "--tokens", "300"]) == 0
    printed = capsys.readouterr()
    # 4 windows of 32 tokens are a step
    assert "3 steps, 384 tokens" in printed.out
    assert "95 %, 5 windows" in printed.out
    assert "step 3/3: loss" in printed.err


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_cut_model_comes_back_towards_its_teacher(folder: Path, tmp_path: Path, seed: int) -> None:
    """Distilled alone, without the tokens of the text, the cut model predicts more like the whole one."""
    text = TEXT * 3
    whole = deepen.open(folder / "model")
    cut = whole.apply(CUT)
    recipe = deepen.Recipe(steps=20, batch=4, lr=3e-3, seed=seed)
    deepen.heal(cut, text, tmp_path / "healed", recipe=recipe, distil=1.0, context=32, held_out_tokens=128)
    from deepen.train.losses import Distillation

    loss = Distillation(teacher=whole.load(), weight=1.0)
    ids = torch.tensor([whole.tokenizer()(text[-200:]).input_ids[:32]])
    with torch.no_grad():
        distances = [loss(each.load(), ids).item() for each in (deepen.open(tmp_path / "healed"), cut)]
    assert distances[0] < 0.9 * distances[1]


def test_streams_at_marks_are_brought_together(folder: Path, tmp_path: Path) -> None:
    text = TEXT * 3
    whole = deepen.open(folder / "model").apply("0-3 @here 4-5")
    cut = whole.apply("0-1 @here 4-5")
    recipe = deepen.Recipe(steps=20, batch=4, lr=3e-3, eval_every=0, gradient_checkpointing=True)
    deepen.heal(cut, text, tmp_path / "healed", recipe=recipe, hidden=1.0, teacher=whole, context=32)
    ids = torch.tensor([whole.tokenizer()(text[-200:]).input_ids[:32]])
    streams = []
    for each in (whole, cut, deepen.open(tmp_path / "healed")):
        model = each.load()
        model(input_ids=ids)
        streams.append(model.deepen.marks["here"])
    assert (streams[2] - streams[0]).square().mean() < 0.9 * (streams[1] - streams[0]).square().mean()


def test_gradient_checkpointing_changes_nothing(folder: Path, tmp_path: Path) -> None:
    for name, more in (("plain", []), ("again", ["--gradient-checkpointing"])):
        assert main(command(folder, tmp_path / name, LOOP, "--steps", "3", *more)) == 0
    plain, again = tensors(tmp_path / "plain"), tensors(tmp_path / "again")
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_weights_are_saved_in_the_type_they_had(folder: Path, tmp_path: Path) -> None:
    deepen.open(folder / "model").save(tmp_path / "narrow", dtype="BF16")
    text = folder / "text.txt"
    words = ["heal", str(tmp_path / "narrow"), LOOP, "--data", str(text), "-o", str(tmp_path / "out"), "--json"]
    options = [word for pair in OPTIONS.items() for word in pair]
    assert main([*words, *options, "--mode", "lora", "--rank", "2"]) == 0
    assert {info.dtype for info in deepen.open(tmp_path / "out").source.infos.values()} == {"BF16"}


@pytest.mark.slow
def test_sigterm_saves_and_resume_ends_as_if_nothing_had_been(folder: Path, tmp_path: Path) -> None:
    usual = command(folder, tmp_path / "healed", LOOP, "--mode", "lora", "--rank", "2", "--steps", "120")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-m", "deepen", *usual], stderr=subprocess.PIPE, text=True, env=env)
    log = tmp_path / "healed.healing" / "log.jsonl"
    while not (log.is_file() and log.read_text(encoding="utf-8").count("\n") >= 3):
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM after step" in run.communicate()[1]
    assert run.returncode == 1
    assert not (tmp_path / "healed").exists()
    assert main([*usual, "--rank", "3", "--resume"]) == 2
    assert main([*usual, "--resume"]) == 0
    again = command(folder, tmp_path / "again", LOOP, "--mode", "lora", "--rank", "2", "--steps", "120")
    assert main(again) == 0
    stopped, whole = tensors(tmp_path / "healed"), tensors(tmp_path / "again")
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("program", "more", "status", "words"),
    [
        (CUT, ["--mode", "layers"], 2, "needs the layers to train"),
        (CUT, ["--layers", "1"], 2, "--layers is about --mode layers"),
        (CUT, ["--mode", "layers", "--layers", "3"], 2, "visits no layer 3; it visits 0, 1, 4, 5"),
        (CUT, ["--mode", "layers", "--layers", "4-"], 2, "got '4-'"),
        (CUT, ["--mode", "lora", "--rank", "99"], 2, "--rank 99: expected 1 to 16"),
        (CUT, ["--mode", "lora", "--rank", "0"], 2, "--rank 0: expected 1 to"),
        (CUT, ["--keep-adapter"], 2, "--keep-adapter is about --mode lora"),
        (CUT, ["--distil", "2"], 2, "--distil 2.0: expected a weight from 0 to 1"),
        ("0-5", ["--distil", "0.5"], 2, "would learn from itself"),
        (CUT, ["--temperature", "2"], 2, "are about distillation"),
        (CUT, ["--teacher-program", "0-5"], 2, "name the model"),
        (CUT, ["--distil-hidden", "1"], 2, "marks that both programs have"),
        (CUT, ["--batch", "400"], 1, "fewer than a batch of 400"),
        (CUT, ["--context", "1"], 2, "a context of 1 tokens leaves 0"),
        (CUT, ["--context", "65"], 2, "64 positions"),
        (CUT, ["--held-out", "1.5"], 2, "--held-out 1.5"),
        (CUT, ["--held-out", "0.001"], 1, "the held-out part of the text"),
        (CUT, ["--held-out-tokens", "8"], 2, "at least one window of 32"),
        (CUT, ["--tokens", "0", "--steps", "1"], 2, "give one"),
        (CUT, ["--lr", "0"], 2, "--lr 0.0"),
        (CUT, ["--dtype", "float16"], 2, "small gradients become 0"),
        (CUT, ["--resume"], 1, "no state of a run there"),
        ("0-9", [], 1, "layer 9 does not exist"),
        (CUT, ["-o", "/nowhere/healed"], 1, "make it first"),
    ],
)
def test_bad_input(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    program: str,
    more: list[str],
    status: int,
    words: str,
) -> None:
    assert main(command(folder, tmp_path / "healed", program, *more)) == status
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_a_teacher_of_another_vocabulary_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "wider", bos=True, vocab_size=100)
    more = ["--distil", "0.5", "--teacher", str(tmp_path / "wider")]
    assert main(command(folder, tmp_path / "healed", CUT, *more)) == 2
    assert "the teacher predicts 100 tokens, the model 96" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wider"]


def test_a_model_without_a_causal_head_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "bert", "bert")
    words = command(folder, tmp_path / "healed", "0-1")
    words[1] = str(tmp_path / "bert")
    assert main(words) == 1
    assert "BertLMHeadModel has no causal head; heal trains" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_a_checkpoint_with_an_adapter_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = command(folder, tmp_path / "first", CUT, "--mode", "lora", "--rank", "2", "--keep-adapter", "--steps", "1")
    assert main(first) == 0
    words = [word if word != str(folder / "model") else str(tmp_path / "first") for word in first]
    words[words.index("-o") + 1] = str(tmp_path / "second")
    words[2] = "0-3"
    assert main(words) == 2
    assert "merge it into the weights" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_written_by_a_resume(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepen.train import heal as place

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "healed"
    with monkeypatch.context() as patched:
        patched.setattr(place, "carry", full)
        assert main(command(folder, out, CUT)) == 1
    assert "No space left on device; the trained state is whole in" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["healed.healing"]
    assert main([*command(folder, out, CUT), "--resume"]) == 0
    assert main(command(folder, tmp_path / "again", CUT)) == 0
    resumed, whole = tensors(out), tensors(tmp_path / "again")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_folder_that_exists_is_left_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "healed").mkdir()
    assert main(command(folder, tmp_path / "healed", CUT)) == 1
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "healed").iterdir())
