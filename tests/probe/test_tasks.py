"""lm-eval's scores on task files of our own against scores computed here; nothing comes from the network."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.errors import DataError, FamilyError, UsageError
from deepen.probe.tasks import load_tasks
from tests.cli.models import checkpoint

DOCS = [
    {"country": "france", "choices": ["paris", "rome"], "answer": 0},
    {"country": "italy", "choices": ["paris", "rome"], "answer": 1},
    {"country": "spain", "choices": ["oslo", "madrid"], "answer": 1},
    {"country": "norway", "choices": ["oslo", "madrid"], "answer": 0},
    {"country": "peru", "choices": ["lima", "quito"], "answer": 0},
]
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{country}}:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return deepen.open(checkpoint(tmp_path_factory.mktemp("tasks") / "llama"))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, text: str = TASK, docs: list[dict[str, Any]] = DOCS) -> Path:
    lines = "".join(json.dumps(doc) + "\n" for doc in docs)
    (folder / "capitals.jsonl").write_text(lines, encoding="utf-8")
    path = folder / "capitals.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def right(ck: Checkpoint, docs: list[dict[str, Any]], prefix: str = "") -> list[bool]:
    """Whether the answer is the likeliest choice, document by document."""
    model, tokenizer = ck.load(), ck.tokenizer()
    found = []
    for doc in docs:
        scores = []
        for choice in doc["choices"]:
            prompt = tokenizer(prefix + doc["country"] + ":").input_ids
            answer = tokenizer(" " + choice).input_ids
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
            places = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            scores.append(places.gather(1, torch.tensor(answer)[:, None]).sum().item())
        found.append(scores.index(max(scores)) == doc["answer"])
    return found


@pytest.mark.parametrize("program", ["0-5", "5 (1-2)*2 0"])
def test_scores_are_those_of_the_program(llama: Checkpoint, task: Path, program: str) -> None:
    ck = llama.apply(program)
    found = {score.metric: score for score in deepen.evaluate_tasks(ck, [str(task)])}
    hits = [float(hit) for hit in right(ck, DOCS)]
    accuracy = found["acc"]
    assert accuracy.value == pytest.approx(sum(hits) / len(hits))
    assert accuracy.stderr == pytest.approx(stdev(hits) / math.sqrt(len(hits)))
    assert (accuracy.task, accuracy.samples, accuracy.shots, accuracy.higher_is_better) == ("capitals", 5, 0, True)
    assert "acc_norm" in found


def test_a_native_stack_scores_as_its_checkpoint(llama: Checkpoint, task: Path) -> None:
    ck = llama.apply("5 (1-2)*2 0")
    model = deepen.to_transformers(deepen.to_stack(ck))
    (found, *_), (expected, *_) = (
        deepen.evaluate_tasks(subject, [str(task)], tokenizer=ck.tokenizer()) for subject in (model, ck)
    )
    assert (found.metric, found.value, found.samples) == (expected.metric, expected.value, 5)


def test_limit_and_shots(llama: Checkpoint, tmp_path: Path) -> None:
    example = {"country": "chile", "choices": ["lima", "santiago"], "answer": 1}
    text = TASK.replace("capitals.jsonl}", "capitals.jsonl, shot: shot.json}") + "fewshot_split: shot\n"
    path = write(tmp_path, text)
    (tmp_path / "shot.json").write_text(json.dumps([example]), encoding="utf-8")
    options: dict[str, Any] = {"tokenizer": llama.tokenizer(), "limit": 3, "shots": 1}
    found = deepen.evaluate_tasks(llama.load(), [str(path)], **options)[0]
    assert (found.samples, found.shots) == (3, 1)
    assert found.value == pytest.approx(sum(right(llama, DOCS[:3], "chile: santiago\n\n")) / 3)


def test_generated_answers_and_metrics_without_a_formula(
    llama: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_answer = TASK.replace('doc_to_choice: "{{choices}}"\n', "")
    text = open_answer.replace("multiple_choice", "generate_until")
    text += "generation_kwargs: {until: ['!'], max_gen_toks: 3}\nmetric_list: [{metric: exact_match}]\n"
    model, tokenizer = llama.load(), llama.tokenizer()
    prompt = tokenizer("peru:", return_tensors="pt").input_ids
    said = tokenizer.decode(model.generate(prompt, max_new_tokens=3, do_sample=False)[0, 5:])
    docs = [{"country": "peru", "answer": answer} for answer in (said, said, "else")]
    found = deepen.evaluate_tasks(llama, [str(write(tmp_path, text, docs))])
    assert [(score.metric, score.value) for score in found] == [("exact_match", pytest.approx(2 / 3))]
    rolling = open_answer.replace("multiple_choice", "loglikelihood_rolling").replace('"{{country}}:"', '""')
    path = write(tmp_path, rolling.replace("answer", '"{{country}}"'))
    words = deepen.evaluate_tasks(llama, [str(path)])
    assert {"word_perplexity", "bits_per_byte"} <= {score.metric for score in words}
    assert all(score.stderr is None or score.stderr >= 0 for score in words)
    assert capsys.readouterr().out == ""
    assert "DISABLE_MULTIPROC" not in os.environ


def test_tasks_are_loaded_once_for_several_models(llama: Checkpoint, task: Path) -> None:
    loaded = load_tasks([str(task)])
    task.unlink()
    first, second, again = (deepen.evaluate_tasks(llama.apply(text), loaded) for text in ("0-5", "5-0", "0-5"))
    assert first == again
    assert len(second) == len(first)


BAD = {
    "code": ("doc_to_text: !function f.g\n", "!function"),
    "field": ("doc_to_tex: a\n", "'doc_to_tex' .*did you mean 'doc_to_text'"),
    "code in a field": ("process_docs: f\n", "process_docs"),
    "metric": ("metric_list: [{metric: bleux}]\n", "'bleux' .*did you mean 'bleu'"),
    "fetched metric": ("metric_list: [{metric: acc, hf_evaluate: true}]\n", "hf_evaluate"),
    "aggregation": ("metric_list: [{metric: acc, aggregation: meen}]\n", "did you mean 'mean'"),
    "metrics": ("metric_list: acc\n", "expected a list"),
    "split": ("fewshot_split: train\n", "'train' is not in the data; it has test"),
    "output": ("output_type: generate\n", "'generate'"),
    "hub": ("dataset_path: someone/data\n", "dataset_path: json"),
    "url": ("dataset_kwargs: {data_files: {test: 'https://a.b/c.jsonl'}}\n", "not a file"),
    "no file": ("dataset_kwargs: {data_files: {test: no.jsonl}}\n", "no.jsonl: cannot be read"),
    "yaml": ("a: [\n", "YAML"),
    "filter": ("filter_list: [{name: a, filter: [{function: nothing}]}]\n", "cannot load"),
}


@pytest.mark.parametrize("name", BAD)
def test_task_files_that_are_refused(name: str, tmp_path: Path) -> None:
    line, words = BAD[name]
    key = line.split(":")[0] + ":"
    kept = "".join(old for old in TASK.splitlines(keepends=True) if not old.startswith(key))
    with pytest.raises(DataError, match=words):
        load_tasks([str(write(tmp_path, kept + line))])


@pytest.mark.parametrize("text, words", [("{oops\n", "JSON"), ("[1]\n", "objects"), ("", "objects"), ("{}", "objects")])
def test_data_that_is_refused(text: str, words: str, task: Path) -> None:
    (task.parent / "capitals.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        load_tasks([str(task)])


@pytest.mark.parametrize("template", ["{{nothing}}", "{{country.__class__.__mro__}}"])
def test_a_template_can_neither_miss_a_field_nor_reach_code(llama: Checkpoint, tmp_path: Path, template: str) -> None:
    path = write(tmp_path, TASK.replace("{{country}}", template))
    with pytest.raises(DataError, match="template"):
        deepen.evaluate_tasks(llama, [str(path)])


def test_names_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "all_tasks", ["arc_easy", "hellaswag"])
    build = TaskManager.__init__
    monkeypatch.setattr(TaskManager, "__init__", lambda self, **_: build(self, include_defaults=False))
    with pytest.raises(UsageError, match=r"'hellaswg' .*did you mean 'hellaswag'"):
        load_tasks(["arc_easy", "hellaswg"])


def test_refusals(llama: Checkpoint, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(task)
    for options, words in (({"limit": 0}, "limit=0"), ({"shots": -1}, "shots=-1"), ({"batch": 0}, "batch=0")):
        with pytest.raises(UsageError, match=words):
            deepen.evaluate_tasks(llama, [path], **options)
    for tasks in ([], [path, path]):
        with pytest.raises(UsageError, match="at least one, each named once"):
            deepen.evaluate_tasks(llama, tasks)
    with pytest.raises(UsageError, match="tokenizer="):
        deepen.evaluate_tasks(llama.load(), [path])
    encoder = deepen.open(checkpoint(tmp_path / "e", "distilbert", encoder=True))
    with pytest.raises(FamilyError, match="generates no text"):
        deepen.evaluate_tasks(encoder, [path])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UsageError, match=r"pip install 'deepen\[lm-eval\]'"):
        deepen.evaluate_tasks(llama, [path])
