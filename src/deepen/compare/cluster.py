"""Runs of a suite on a Ray cluster, whose machines have deepen installed and share no disk with this one.

A run goes there as the text of its recipe and comes back as the files of its folder. Each has a process of its own, so
that its peak memory is its own. A run that a machine lost is started anew, by Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.atomic import atomic_file
from deepen.compare.run import RECIPE, RUN, execute
from deepen.errors import DeepenError, UsageError

if TYPE_CHECKING:
    from deepen.compare.compare import Job


def on_ray(address: str, jobs: Sequence[Job], models: bool) -> Iterator[tuple[Job, str]]:
    """Runs jobs on a cluster; yields each as it ends, with what was wrong or nothing.

    Args:
        address: of the cluster, or `local` for one of this machine that ends with the suite.
        jobs: with a recipe in the folder of each.
        models: unsupported there.

    Raises:
        UsageError: Ray is not installed, the cluster cannot be reached, or models are to be kept.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError("--ray needs Ray, which is not installed: pip install 'deepen[ray]'") from error
    if models:
        raise UsageError("--models does not go with --ray: the stacks stay on the machines that trained them")
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: no cluster answers there: {' '.join(str(error).split())}") from error
    run: Any = ray.remote(num_cpus=1, max_calls=1, max_retries=2)(train_there)
    try:
        waiting = {run.remote((job.folder / RECIPE).read_text(encoding="utf-8"), job.name): job for job in jobs}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting))
            job = waiting.pop(done)
            result, wrong = ray.get(done)
            if result is not None:
                with atomic_file(job.folder / RUN) as file:
                    file.write(result)
            yield job, wrong
    finally:
        ray.shutdown()


def train_there(recipe: str, name: str) -> tuple[str | None, str]:
    """One run of that name, on whatever machine it is: the text of its result, or what was wrong."""
    with TemporaryDirectory() as place:
        folder = Path(place) / name
        folder.mkdir()
        (folder / RECIPE).write_text(recipe, encoding="utf-8")
        try:
            execute(folder)
        except DeepenError as error:
            return None, " ".join(str(error).split())
        return (folder / RUN).read_text(encoding="utf-8"), ""
