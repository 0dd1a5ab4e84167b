"""The sections of a comparison: what each variant reached, paired differences, curves against FLOPs and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from deepen.report.chart import CURVES, Curve, curves, number
from deepen.report.page import Chart, Charts, Facts, Section, Table, Text


def comparison(document: Mapping[str, Any]) -> Iterator[Section]:
    """The sections of what `deepen compare` kept."""
    summary, budget = document["summary"], document["budget"]
    measure = str(summary["measure"]).replace("_", " ")
    better = "more is better" if summary["higher_is_better"] else "less is better"
    rows = [
        (
            f"{each['name']} (baseline)" if each["name"] == summary["baseline"] else each["name"],
            f"{each['mean']:.4g}",
            "" if each["deviation"] is None else f"{each['deviation']:.2g}",
            str(len(each["values"])),
            number(each["parameters"]),
            number(each["flops_per_token"]),
            number(each["flops"]),
            str(each["steps"]),
            f"{each['seconds']:.0f}",
            number(each["peak_bytes"]) + "B",
            str(each["width"]),
            each["program"],
        )
        for each in summary["variants"]
    ]
    equal = str(budget["equal"])
    told = [f"Every variant has the same {equal}"]
    told += [f", solved for by {budget['vary']}"] if equal in ("parameters", "flops") else []
    told += [f", within {budget['tolerance']:.1%} of the baseline"] if equal in ("parameters", "flops") else []
    blocks: list[Any] = [Text("".join(told) + ".")]
    if summary["uncommitted"]:
        blocks.append(Facts([("marked", "made from a source tree with uncommitted changes")]))
    blocks.append(
        Table(
            ["variant", measure, "deviation", "seeds", "parameters", "FLOPs/token", "FLOPs in all", "steps", "seconds",
             "peak memory", "width", "program"],
            rows,
            f"{measure} on the last held-out part, the mean over seeds with the deviation between them; {better}. "
            "FLOPs are those of training: three times the products of a forward pass.",
            tuple(range(1, 11)),
        )
    )  # fmt: skip
    if summary["failed"]:
        rows = [(each["name"], str(each["seed"]), each["why"]) for each in summary["failed"]]
        blocks.append(Table(["variant", "seed", "what stopped it"], rows, "Left out of all other figures."))
    yield Section("Comparison", blocks)
    if summary["comparisons"]:
        yield Section("Differences from the baseline", [_differences(summary), *_reach(summary)])
    if charts := _curves(summary, measure):
        yield Section("On the way", [Charts(charts)])


def _differences(summary: Mapping[str, Any]) -> Table:
    return Table(
        ["variant", "difference", "95 % interval", "bootstrap", "seeds below : above", "sign test p", "verdict"],
        [
            (
                each["name"],
                f"{each['mean']:+.4g}",
                _interval(each["low"], each["high"]),
                _interval(each["bootstrap_low"], each["bootstrap_high"]),
                f"{each['below']} : {each['above']}",
                f"{each['sign_p']:.2g}",
                each["verdict"],
            )
            for each in summary["comparisons"]
        ],
        f"Each variant less {summary['baseline']}, seed by seed. The interval is Student's, over the seeds; the "
        "verdict needs it to leave out 0. The bootstrap takes the seeds at hand for all there are and is too narrow "
        "for a few; n seeds of one sign have p = 2 / 2^n in the sign test.",
        (1, 2, 3, 4, 5),
    )


def _reach(summary: Mapping[str, Any]) -> Iterator[Table]:
    known = [each for each in summary["comparisons"] if each.get("reach", {}).get("reached")]
    if known:
        yield Table(
            ["variant", "share of the FLOPs", "95 % interval", "share of the seconds", "95 % interval", "seeds there"],
            [
                (
                    each["name"],
                    *(cell for axis in ("flops", "seconds") for cell in _share(each["reach"][axis])),
                    f"{each['reach']['reached']} of {each['reach']['seeds']}",
                )
                for each in known
            ],
            f"When each variant was first as good as {summary['baseline']} at its last look, as a share of what "
            "that one had spent: the geometric mean over seeds, with Student's interval. It has no mean where a "
            "seed never got there. Measured on the first held-out part.",
            (1, 2, 3, 4, 5),
        )


def _share(found: Mapping[str, float | None]) -> tuple[str, str]:
    if found["mean"] is None:
        return "", ""
    if found["low"] is None or found["high"] is None:
        return f"{found['mean']:.3g}", "one seed, none"
    return f"{found['mean']:.3g}", f"{found['low']:.3g} to {found['high']:.3g}"


def _interval(low: float | None, high: float | None) -> str:
    return "one seed, none" if low is None or high is None else f"{low:+.4g} to {high:+.4g}"


def _curves(summary: Mapping[str, Any], measure: str) -> list[Chart]:
    # the baseline first, so that it looks the same in every chart
    names = sorted(summary["curves"], key=lambda name: name != summary["baseline"])
    known = {name: summary["curves"][name] for name in names if len(summary["curves"][name]) > 1}
    charts = []
    for at in range(0, len(known) - 1, CURVES - 1):
        shown = [names[0], *[name for name in names[1:] if name in known][at : at + CURVES - 1]]
        for axis, across in (("flops", "training FLOPs"), ("seconds", "seconds")):
            drawn = [
                Curve(name, [(point[axis], point["value"]) for point in known[name] if math.isfinite(point["value"])])
                for name in shown
                if name in known
            ]
            charts.append(
                Chart(
                    f"{measure} against {across}",
                    curves(drawn, across, measure),
                    "The mean over seeds, on the first held-out part.",
                    [each.name for each in drawn],
                )
            )
    return charts
