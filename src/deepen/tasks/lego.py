"""LEGO: chains of signed assignments in any order; every variable's value is asked for.

    c = - b ; a = + 1 ; b = - a ; ? b c a           b is -, c is +, a is +

The value of a variable needs as many steps as it stands away from the one that is given.

Source: Zhang et al., Unveiling Transformers with LEGO: a synthetic reasoning task, arXiv:2206.04301. There the classes
are the two signs too; the questions at the end, in an order of their own, are a choice made here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from deepen.tasks.reasoning import DEEPER, TEST, Question, Range, Reasoning, between

SIGNS = ("+", "-")


class Lego(Reasoning):
    """Chains of assignments.

    Attributes:
        names: different variables to choose from.
        steps: variables of a chain.
        deeper: variables beyond training.
    """

    about: ClassVar[str] = "the signs of variables that are defined by each other, in any order"

    name: Literal["lego"] = "lego"
    names: int = Field(default=26, ge=1, le=26)
    steps: Range = (2, 6)
    deeper: Range = (7, 10)

    @model_validator(mode="after")
    def _fits(self) -> Lego:
        if max(self.steps[1], self.deeper[1]) > self.names:
            raise ValueError(
                f"a chain of {max(self.steps[1], self.deeper[1])} variables needs more than {self.names} names"
            )
        return self

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*(chr(97 + name) for name in range(self.names)), *SIGNS, "1", "=", ";", "?")

    @property
    def parts(self) -> tuple[str, ...]:
        return TEST, DEEPER

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        steps = between(drawn, self.deeper if part == DEEPER else self.steps)
        variables = [chr(97 + name) for name in drawn.permutation(self.names)[:steps]]
        signs = [SIGNS[sign] for sign in drawn.integers(0, 2, steps)]
        values, negative = {}, False
        for variable, sign in zip(variables, signs, strict=True):
            negative ^= sign == "-"
            values[variable] = SIGNS[negative]
        clauses = [
            [variable, "=", sign, before, ";"]
            for variable, sign, before in zip(variables, signs, ["1", *variables], strict=False)
        ]
        text = [word for clause in drawn.permutation(steps) for word in clauses[clause]]
        asked = [variables[place] for place in drawn.permutation(steps)]
        return [*text, "?", *asked], [None] * (len(text) + 1) + [values[variable] for variable in asked]
