"""Tasks of lm-eval (github.com/EleutherAI/lm-evaluation-harness) on a model with a program.

A task is a name that lm-eval knows, whose data come from the hub, or a file of one's own (`task_file`), which needs no
network. Prompts, few-shot examples, scores and their standard errors are lm-eval's; deepen gives it the loaded model
and tokenizer. The templates of tasks are rendered in jinja's sandbox: a template is no place to run code.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepen.errors import DataError, FamilyError, UsageError, nearest
from deepen.probe.task_file import read_task

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase

# Draws of the standard error of metrics that have no formula for it.
DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One metric of one task.

    Attributes:
        task: its name; also the name of a group of tasks.
        metric: its name; after a comma, what was done to the answers first, where anything was.
        value: the score.
        stderr: its standard error, None where lm-eval gives none.
        samples: documents that were scored; None for a group.
        shots: examples in the prompt; None for a group.
        higher_is_better: None where lm-eval does not say.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int | None
    shots: int | None
    higher_is_better: bool | None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return asdict(self)


def evaluate_tasks(
    subject: Checkpoint | PreTrainedModel,
    tasks: Sequence[Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    limit: int | None = None,
    shots: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    dtype: Any = None,
    seed: int = 0,
) -> list[TaskScore]:
    """The scores of a model on tasks of lm-eval, in the order of the tasks.

    Args:
        subject: a checkpoint with its program, or a model loaded from one.
        tasks: names, paths of task files, or what `load_tasks` made of them.
        tokenizer: of a loaded model; a checkpoint has its own.
        limit: documents of a task that are read; None reads all.
        shots: examples in the prompt; None leaves that to the task. A task that says 0 keeps it.
        batch: prompts that are read at once.
        device: where a checkpoint's weights go.
        dtype: torch dtype of a checkpoint's weights, or its name; None keeps that of the files.
        seed: of the choice of examples.

    Raises:
        UsageError: lm-eval is not installed, an unknown task, numbers out of range, a model without its tokenizer.
        DataError: a task file or data that cannot be used.
        FamilyError: the model generates no text.

    Example:
        >>> import deepen
        >>> ck = deepen.open("model").apply("0-5 7-11")                    # doctest: +SKIP
        >>> deepen.evaluate_tasks(ck, ["task.yaml"])[0].value              # doctest: +SKIP
    """
    for name, value, least in (("limit", limit, 1), ("shots", shots, 0), ("batch", batch, 1)):
        if value is not None and value < least:
            raise UsageError(f"tasks with {name}={value}: expected at least {least}")
    loaded = load_tasks(tasks)
    from deepen.checkpoint.checkpoint import Checkpoint

    if isinstance(subject, Checkpoint):
        model, tokenizer = subject.load(device=device, dtype=dtype), subject.tokenizer()
    else:
        model = subject
    if tokenizer is None:
        raise UsageError("tasks on a loaded model need its tokenizer; pass tokenizer=, such as checkpoint.tokenizer()")
    if not model.can_generate() or model.main_input_name != "input_ids":
        raise FamilyError(f"{type(model).__name__} generates no text, and lm-eval asks models that do")
    return _scores(_run(model, tokenizer, loaded, limit=limit, shots=shots, batch=batch, seed=seed))


def load_tasks(tasks: Sequence[Any]) -> list[Any]:
    """The tasks and groups of tasks that names and files stand for, their data read; what is loaded stays as it is.

    Raises:
        UsageError: lm-eval is not installed, no task, a task named twice, or one that nobody knows.
        DataError: a task file or data that cannot be used.
    """
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError("tasks need lm-eval: pip install 'deepen[lm-eval]'") from error
    texts = [task for task in tasks if isinstance(task, str)]
    if not tasks or len(set(texts)) < len(texts):
        raise UsageError(f"tasks {', '.join(texts) or 'none'}: expected at least one, each named once")
    names = [task for task in texts if not _is_file(task)]
    # reading the list of all known tasks takes longer than a small task
    manager = TaskManager(include_defaults=bool(names))
    for name in names:
        if name not in manager.all_tasks:
            known = nearest(name, manager.all_tasks)
            raise UsageError(f"lm-eval has no task {name!r}{known}; a file of yours ends in .yaml")
    found: list[Any] = []
    for task in tasks:
        found += _load(manager, task) if isinstance(task, str) else [task]
    return found


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _load(manager: Any, task: str) -> list[Any]:
    spec = read_task(Path(task)) if _is_file(task) else task
    try:
        with _apart():
            loaded = manager.load([spec])
    # the network, the data, the task: each has its own family of errors
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"task {task}: lm-eval cannot load it: {reason[0]}") from error
    group = loaded.get("groups", {}).get(task)
    return list(loaded["tasks"].values()) if group is None else [group]


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[Any],
    *,
    limit: int | None,
    shots: int | None,
    batch: int,
    seed: int,
) -> Mapping[str, Any]:
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    # decorated functions and classes, which type checkers take to have no parameters
    evaluate: Any = simple_evaluate
    wrap: Any = HFLM
    try:
        with _apart():
            found = evaluate(
                model=wrap(pretrained=model, tokenizer=tokenizer, batch_size=batch),
                tasks=tasks,
                task_manager=TaskManager(include_defaults=False),
                num_fewshot=shots,
                limit=limit,
                log_samples=False,
                bootstrap_iters=DRAWS,
                fewshot_random_seed=seed,
            )
    except TemplateError as error:
        raise DataError(f"a template of a task does not fit its documents: {error}; correct the template") from error
    except ValueError as error:
        raise DataError(f"lm-eval refuses the tasks: {' '.join(str(error).split())}") from error
    return found


@contextmanager
def _apart() -> Iterator[None]:
    """lm-eval by itself: what it prints goes to stderr, templates into a sandbox, no other process is started."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils  # pyright: ignore[reportMissingImports]

    rendering: Any = utils
    log, kept = logging.getLogger("lm_eval"), rendering.env
    level, parallel = log.level, os.environ.get("DISABLE_MULTIPROC")
    rendering.env = SandboxedEnvironment(undefined=kept.undefined, keep_trailing_newline=True)
    rendering.env.filters.update(kept.filters)
    log.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        rendering.env = kept
        log.setLevel(level)
        os.environ.pop("DISABLE_MULTIPROC")
        if parallel is not None:
            os.environ["DISABLE_MULTIPROC"] = parallel


def _scores(found: Mapping[str, Any]) -> list[TaskScore]:
    scores = []
    for task, row in found["results"].items():
        for key, value in row.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = row.get(f"{metric}_stderr,{filtered}")
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric if filtered == "none" else f"{metric}, {filtered}",
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    samples=found["n-samples"].get(task, {}).get("effective"),
                    shots=found["n-shot"].get(task),
                    higher_is_better=found["higher_is_better"].get(task, {}).get(metric),
                )
            )
    return scores
