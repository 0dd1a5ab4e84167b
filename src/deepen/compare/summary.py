"""What the runs of a suite say: figures of each variant, paired differences from the baseline, mean curves.

A run is a plain table, one JSON line of `runs.jsonl`; see `deepen.compare.run`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from deepen.compare.reach import reach
from deepen.compare.statistics import paired

# Measures of which more is better; of all others less is.
HIGHER = ("accuracy", "exact_match")


def summary(runs: Sequence[Mapping[str, Any]], baseline: str, measure: str) -> dict[str, Any]:
    """The summary of finished runs.

    Args:
        runs: of any variants and seeds; pairs are made of the seeds that both sides have. One whose loss was not
            finite is named, and left out of all figures.
        baseline: the variant that the others are compared with.
        measure: a name in the results of the last held-out part.
    """
    failed = [run for run in runs if "failed" in run]
    runs = [run for run in runs if "failed" not in run]
    names = list(dict.fromkeys(run["variant"] for run in runs))
    own = {name: {run["seed"]: run for run in runs if run["variant"] == name} for name in names}
    return {
        "baseline": baseline,
        "measure": measure,
        "higher_is_better": measure in HIGHER,
        "variants": [_figures(name, list(own[name].values()), measure) for name in names],
        "comparisons": [
            found
            for name in names
            if name != baseline and baseline in own
            for found in _compared(name, own[name], own[baseline], measure)
        ],
        "curves": {name: curve(list(own[name].values()), measure) for name in names},
        "failed": [{"name": run["variant"], "seed": run["seed"], "why": run["failed"]} for run in failed],
        "uncommitted": any(run["source"]["uncommitted"] for run in [*runs, *failed]),
    }


def value(run: Mapping[str, Any], measure: str) -> float:
    """What a run reached on the last held-out part."""
    return run["results"][run["split"]][measure]


def curve(runs: Sequence[Mapping[str, Any]], measure: str) -> list[dict[str, float]]:
    """The mean over seeds of what was measured while training, at the steps that all seeds looked at.

    Returns:
        Of each look `step`, `flops`, `seconds` and `value`.
    """
    looks = [{point["step"]: point for point in run["curve"] if measure in point} for run in runs]
    steps = sorted(set.intersection(*map(set, looks))) if looks else []
    return [
        {
            "step": step,
            "flops": statistics.fmean(look[step]["flops"] for look in looks),
            "seconds": statistics.fmean(look[step]["seconds"] for look in looks),
            "value": statistics.fmean(look[step][measure] for look in looks),
        }
        for step in steps
    ]


def verdict(shown: str, higher_is_better: bool) -> str:
    """`better` or `worse` of what a paired comparison shows."""
    if shown == "not told apart":
        return shown
    return "better" if (shown == "higher") == higher_is_better else "worse"


def _figures(name: str, runs: Sequence[Mapping[str, Any]], measure: str) -> dict[str, Any]:
    values = [value(run, measure) for run in runs]
    first = runs[0]
    return {
        "name": name,
        "seeds": [run["seed"] for run in runs],
        "values": values,
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        **{key: first[key] for key in ("parameters", "flops_per_token", "cache_bytes_per_token", "steps", "flops")},
        "program": first["program"],
        "width": first["width"],
        "seconds": statistics.fmean(run["seconds"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def _compared(
    name: str, one: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]], measure: str
) -> list[dict[str, Any]]:
    seeds = sorted(set(one) & set(base))
    if not seeds:
        return []
    here, there, higher = [one[seed] for seed in seeds], [base[seed] for seed in seeds], measure in HIGHER
    found = paired([value(run, measure) for run in here], [value(run, measure) for run in there])
    return [
        {
            "name": name,
            "verdict": verdict(found.shown, higher),
            **found.to_json(),
            "reach": reach(
                [one[seed] for seed in seeds], [base[seed] for seed in seeds], measure, higher_is_better=higher
            ),
        }
    ]
