r"""Visit a stretch of layers several times, damped or not, without training.

    damped    x_{k+1} = x_k + s (G(x_k) - x_k),   s = 1/K for K turns       0-9 (10-13)*2[scale=1/2] 14-29
    plain     x_{k+1} = G(x_k)                                              0-9 (10-13)*2 14-29

    x --> [ 10 11 12 13 ] --> x + s (G(x) - x) --> [ 10 11 12 13 ] --> ...

G is the stretch. A frozen stretch was trained to be run once: K plain turns overshoot, K steps of 1/K go as far as one
turn does. Where G only adds a constant, K damped turns equal one visit, for every K. K = 1 is the identity.

Cost: K - 1 more visits of the stretch in FLOPs and cache; no parameters.

Training-free looped transformers, arXiv:2605.23872.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepen.errors import UsageError
from deepen.program import transforms
from deepen.registry import method
from deepen.surgery.place import require_layers, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@method(
    "damped-loop",
    family="surgery",
    source="arXiv:2605.23872",
    title="Training-free looped transformers",
    mechanism="K turns of a stretch, each a step of 1/K: x + (G(x) - x) / K",
    cost="K - 1 more visits of the stretch; no parameters",
)
def loop(
    ck: Checkpoint, first: int, last: int, times: int, *, scale: float | Sequence[float] | None = None, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Visits the stretch from layer `first` to layer `last`, both included, `times` over.

        looped, report = deepen.loop(ck, 10, 13, 2)

    Args:
        ck: what to change.
        first: the first layer of the stretch.
        last: the last layer of the stretch.
        times: turns, at least 1.
        scale: the step of each turn, or one step a turn; None is 1 / times, and 1 the plain loop.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: less than one turn, or not as many steps as turns.
        ProgramError: the two layers do not stand once each, in this order, outside of groups and loops.
    """
    found, key = tower_key(ck, tower)
    require_layers(ck, found, (first, last))
    if times < 1:
        raise UsageError(f"loop: a stretch is visited at least once, got {times} turns")
    if isinstance(scale, Sequence) and len(scale) != times:
        raise UsageError(f"loop: {times} turns need {times} steps, got {len(scale)}")
    if times == 1 and scale in (None, 1):
        return ck, report(ck, ck, found.name, "damped-loop", "one turn: nothing changed")
    program, note = transforms.loop(ck.program, first, last, times, ck.depth[found.name], _steps(scale, times), key)
    made = ck.apply(program)
    return made, report(ck, made, found.name, "damped-loop", note)


def _steps(scale: float | Sequence[float] | None, times: int) -> str:
    """The attribute that states the steps; none for the plain loop."""
    if scale is None:
        return f"scale=1/{times}"
    steps = scale if isinstance(scale, Sequence) else (scale,)
    return "" if set(steps) == {1} else "scale=" + ":".join(f"{step:g}" for step in steps)
