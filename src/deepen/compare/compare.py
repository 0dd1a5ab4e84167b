"""Runs a suite: each variant under each seed in a process of its own, several at once, resumable.

FOLDER/suite.yaml                 the suite, as it was read
FOLDER/runs/VARIANT-SEED/         one run; see `deepen.compare.run`
FOLDER/runs.jsonl                 one line a finished run
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deepen.checkpoint.atomic import atomic_file
from deepen.compare.run import RECIPE, RUN
from deepen.compare.suite import Suite, variants
from deepen.compare.summary import summary
from deepen.compare.worker import Worker
from deepen.errors import DeepenError, SaveError, UsageError

SUITE, RUNS, LINES = "suite.yaml", "runs", "runs.jsonl"
# Called when a run ends: its name, how many have ended, how many there are.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """One run: its variant, seed and folder."""

    variant: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


def compare(
    suite: Suite,
    where: str,
    folder: str | Path,
    *,
    workers: int = 1,
    models: bool = False,
    ray: str | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Runs what is left of a suite and summarises all of it.

    Args:
        suite: what is compared.
        where: its name in errors and in the result.
        folder: of the results; one of the same suite goes on.
        workers: runs at once; each has an equal share of the cores.
        models: keep the trained stacks.
        ray: the address of a Ray cluster to run on, or `local`; None runs processes of this machine.
        report: called when a run ends.

    Raises:
        UsageError: a recipe that cannot be run, another suite in the folder, or no Ray.
        SaveError: the folder cannot be written.
        DeepenError: runs that failed, by name with the reason; the others are kept.
    """
    folder = Path(folder)
    made = {each.name: each for each in variants(suite, where)}
    jobs = [Job(name, seed, folder / RUNS / f"{name}-{seed}") for name in suite.variants for seed in suite.seeds]
    _prepare(folder, suite, jobs, {job: made[job.variant].seeded(job.seed).yaml() for job in jobs})
    left = [job for job in jobs if not (job.folder / RUN).is_file()]
    wrong: dict[str, str] = {}
    ended = len(jobs) - len(left)
    for job, trouble in _on_ray(ray, left, models) if ray else _processes(left, workers, models):
        ended += 1
        if trouble:
            wrong[job.name] = trouble
        gather(folder, jobs)
        if report is not None:
            report(job.name, ended, len(jobs))
    if wrong:
        told = "; ".join(f"{name}: {trouble}" for name, trouble in wrong.items())
        raise DeepenError(f"{where}: {len(wrong)} of {len(jobs)} runs failed: {told}")
    found = gather(folder, jobs)
    measure = suite.measure or made[suite.baseline].measure
    return {
        "suite": where,
        "budget": suite.budget.model_dump(),
        "seeds": list(suite.seeds),
        "summary": summary(found, suite.baseline, measure),
    }


def gather(folder: Path, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The finished runs, in the order of the suite; writes them as lines."""
    found = [
        {"variant": job.variant, "seed": job.seed, **json.loads((job.folder / RUN).read_text(encoding="utf-8"))}
        for job in jobs
        if (job.folder / RUN).is_file()
    ]
    with atomic_file(folder / LINES) as file:
        file.writelines(json.dumps(each) + "\n" for each in found)
    return found


def _prepare(folder: Path, suite: Suite, jobs: Sequence[Job], recipes: Mapping[Job, str]) -> None:
    """Makes the folders, or finds that they are of the same suite."""
    text = yaml.safe_dump(suite.model_dump(mode="json", exclude_none=True), sort_keys=False)
    stored = folder / SUITE
    if stored.is_file() and stored.read_text(encoding="utf-8") != text:
        raise UsageError(
            f"{folder} holds runs of another suite (see {stored}); give a new folder, or that suite to go on with it"
        )
    if folder.exists() and not stored.is_file() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty and holds no suite; give a new folder")
    try:
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"cannot make {folder}: {error.strerror}; give another folder") from error
    with atomic_file(stored) as file:
        file.write(text)
    for job in jobs:
        place = job.folder / RECIPE
        if place.is_file() and place.read_text(encoding="utf-8") != recipes[job]:
            raise UsageError(f"{place}: the budget was solved otherwise by another version; give a new folder")
        with atomic_file(place) as file:
            file.write(recipes[job])


def _processes(jobs: Sequence[Job], workers: int, models: bool) -> Iterator[tuple[Job, str]]:
    """Runs jobs in processes; yields each as it ends, with what was wrong or nothing."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    own, made, stopped = threading.local(), list[Worker](), threading.Event()

    def run(job: Job) -> tuple[Job, str]:
        if stopped.is_set():
            return job, "stopped"
        if not hasattr(own, "worker"):
            own.worker = Worker(threads)
            made.append(own.worker)
        return job, own.worker.run(job.folder, models)

    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in as_completed([pool.submit(run, job) for job in jobs]):
                yield done.result()
        finally:
            stopped.set()
            for worker in made:
                worker.stop()
            for worker in made:
                worker.end()


def _on_ray(address: str, jobs: Sequence[Job], models: bool) -> Iterator[tuple[Job, str]]:
    from deepen.compare.cluster import on_ray

    return on_ray(address, jobs, models)
