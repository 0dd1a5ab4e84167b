"""The standard parametrisation: the recipe's initial values and one learning rate for all.

Every multiplier is 1, so the best learning rate moves with width and depth.

Source: what Yang et al. call the standard parametrisation, Tensor Programs V, arXiv:2203.03466.
"""

from __future__ import annotations

from deepen.registry import method
from deepen.stack.parametrisation import Rule


@method(
    "standard",
    family="parametrisation",
    source="arXiv:2203.03466",
    title="Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer",
    mechanism="one learning rate for all parameters, no factors",
    cost="nothing; the reference",
)
class Standard(Rule):
    """No multipliers."""
