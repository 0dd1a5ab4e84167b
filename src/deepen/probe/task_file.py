"""A task for lm-eval in a file of one's own: YAML with its data beside it. Nothing in it is run or fetched.

    task: capitals
    dataset_path: json
    dataset_kwargs: {data_files: {test: capitals.jsonl}}      one object a line, or a .json file with a list of objects
    test_split: test
    output_type: multiple_choice
    doc_to_text: "The capital of {{country}} is"
    doc_to_choice: "{{choices}}"
    doc_to_target: answer

The fields mean what they mean to lm-eval. Those that name code or lead to the network are refused, as are metrics that
lm-eval does not bring: it would fetch them, and they are code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepen.errors import DataError, nearest

FIELDS = frozenset(
    "task task_alias tag dataset_path dataset_kwargs training_split validation_split test_split fewshot_split "
    "doc_to_text doc_to_target doc_to_choice description target_delimiter fewshot_delimiter fewshot_config "
    "num_fewshot metric_list output_type generation_kwargs repeats filter_list should_decontaminate "
    "doc_to_decontamination_query gen_prefix metadata".split()
)
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
OUTPUTS = ("loglikelihood", "loglikelihood_rolling", "multiple_choice", "generate_until")


def read_task(path: Path) -> dict[str, Any]:
    """The task of a file as lm-eval takes it, with its data read.

    Raises:
        DataError: a file that cannot be read, a field, metric or split that is not there or not allowed.
    """
    task = _fields(path)
    _known(path, "field", task, FIELDS)
    for name in ("task", "output_type", "doc_to_text"):
        if not isinstance(task.get(name), str):
            raise DataError(f"{path}: expected a text as `{name}`, got {task.get(name)!r}; add it")
    _known(path, "output_type", [task["output_type"]], OUTPUTS)
    _metrics(path, task.get("metric_list"))
    splits = _data(path, task)
    wanted = {name: task[name] for name in SPLITS if task.get(name) is not None}
    if not wanted.keys() & {"test_split", "validation_split"}:
        raise DataError(f"{path}: names neither a test_split nor a validation_split; name one of {', '.join(splits)}")
    for name, split in wanted.items():
        if split not in splits:
            raise DataError(f"{path}: {name} {split!r} is not in the data; it has {', '.join(splits)}")
    return task | {"dataset_kwargs": None, "custom_dataset": lambda **_: _dataset(splits)}


def _fields(path: Path) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml  # pyright: ignore[reportMissingImports]

    if "!function" in _text(path):
        raise DataError(f"{path}: !function runs code of the task's author, which deepen does not; write a template")
    try:
        return load_yaml(path, resolve_func=False, recursive=False)
    # what PyYAML raises has no base class but this
    except Exception as error:
        raise DataError(f"{path}: expected a YAML mapping: {' '.join(str(error).split())}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read: {reason}; give a UTF-8 file") from error


def _known(path: Path, kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise DataError(f"{path}: {kind} {name!r} is not one that a task file may have{nearest(str(name), known)}")


def _metrics(path: Path, metrics: Any) -> None:
    from lm_eval.api import metrics as brought  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_REGISTRY  # pyright: ignore[reportMissingImports]

    assert brought
    if metrics is None:
        return
    if not isinstance(metrics, list) or not all(isinstance(metric, dict) and "metric" in metric for metric in metrics):
        raise DataError(f"{path}: expected a list of {{metric: NAME}} as `metric_list`, got {metrics!r}")
    for metric in metrics:
        _known(path, "metric", [metric["metric"]], list(METRIC_REGISTRY))
        _known(path, "aggregation", [metric["aggregation"]] if "aggregation" in metric else [], [*AGGREGATION_REGISTRY])
        if metric.get("hf_evaluate"):
            raise DataError(f"{path}: hf_evaluate fetches the code of a metric, which deepen does not; leave it out")


def _data(path: Path, task: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The documents of each split; files are looked up beside the task, and a single one is the split `train`."""
    options = task.get("dataset_kwargs")
    given = options.get("data_files") if isinstance(options, dict) and set(options) == {"data_files"} else None
    if task.get("dataset_path") != "json" or not given:
        raise DataError(f"{path}: expected `dataset_path: json` and `dataset_kwargs: {{data_files: {{test: FILE}}}}`")
    splits = given if isinstance(given, dict) else {"train": given}
    return {
        str(split): [doc for name in ([names] if isinstance(names, str) else names) for doc in _docs(path, str(name))]
        for split, names in splits.items()
    }


def _docs(path: Path, name: str) -> list[dict[str, Any]]:
    if "://" in name:
        raise DataError(f"{path}: {name} is not a file; download it and name the file")
    file = path.parent / name
    text = _text(file)
    try:
        if file.suffix == ".json":
            docs = json.loads(text)
        else:
            docs = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{file}: expected JSON, an object a line or one list in a .json file: {error}") from error
    if not isinstance(docs, list) or not docs or not all(isinstance(doc, dict) and doc for doc in docs):
        raise DataError(f"{file}: expected objects with fields, an object a line or one list in a .json file")
    return docs


def _dataset(splits: Mapping[str, list[dict[str, Any]]]) -> Any:
    from datasets import Dataset, DatasetDict  # pyright: ignore[reportMissingImports]

    return DatasetDict({split: Dataset.from_list(docs) for split, docs in splits.items()})
