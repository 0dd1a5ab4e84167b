"""Random programs of what checkpoints execute: order, repeats, copies, parts, groups, scales, loops, kv=first."""

from __future__ import annotations

from random import Random


def random_program(dice: Random, depth: int, *, parts: bool = True, zero: bool = True, kv: bool = True) -> str:
    """A program of a few items over a bank of `depth` layers that visits at least one layer."""
    writer = _Writer(dice, depth, parts, zero, kv)
    return " ".join([writer.run(), *(writer.item(2) for _ in range(dice.randint(1, 4)))])


class _Writer:
    def __init__(self, dice: Random, depth: int, parts: bool, zero: bool, kv: bool) -> None:
        self.dice, self.depth, self.parts, self.zero, self.kv = dice, depth, parts, zero, kv

    def run(self) -> str:
        first = self.dice.randrange(self.depth)
        last = min(self.depth - 1, first + self.dice.randint(0, 2))
        text = f"{first}-{last}" if self.dice.random() < 0.8 else f"{last}-{first}"
        return f"{first}" if first == last else text

    def layer(self) -> str:
        text = f"{self.dice.randrange(self.depth)}"
        if self.parts and self.dice.random() < 0.25:
            text += self.dice.choice((".a", ".f"))
        if self.dice.random() < 0.2:
            text += self.dice.choice(("!", "!zero") if self.zero else ("!",))
        return text

    def sequence(self, height: int) -> str:
        return " ".join(self.item(height - 1) for _ in range(self.dice.randint(1, 2)))

    def item(self, height: int) -> str:
        kind = self.dice.random()
        if height <= 0 or kind < 0.35:
            return self.layer()
        if kind < 0.5:
            return self.run()
        if kind < 0.65:
            rule = self.dice.choice(("", "", "[kv=first]")) if self.kv else ""
            return f"({self.sequence(height)})*{self.dice.randint(1, 3)}{rule}"
        if kind < 0.72:
            return f"({self.sequence(height)})*1..2"
        if kind < 0.85:
            comb = self.dice.choice(("", "[comb=mean]"))
            branches = "|".join(self.dice.choice((self.sequence(height), self.layer(), "_")) for _ in range(2))
            return f"{{{branches}}}{comb}"
        return f"({self.sequence(height)})[scale={self.dice.choice(('1/2', '0', '2', '0.25'))}]"
