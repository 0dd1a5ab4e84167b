"""Random program texts over the whole grammar, as people might write them: odd blanks, nested postfixes, `**`, `^n`.

`random_text` is a plain generator, so that tens of thousands of texts take seconds; `texts` hands its dice to
hypothesis, which can then shrink a failure.
"""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

DEPTH = 8
SEPARATORS = (" ", " ", " ", "  ", "\n", "\t", "; ", ", ", ",", " # a note\n")
VISIT_ATTRS = ("lora=2", "lora=4", "kv=own", "kv=none", "kv=shared", "shard=0")
NODE_ATTRS = (
    *("scale=1/2", "scale=.5", "scale=0.25", "scale=0", "scale=1", "emb", "norm", "gate=token", "p=0.1"),
    *("when=decode", "res=1/2", "res=1/4,down=attn", "cap=1/2", "cap=0.5,route=token", "topo=replace, res=1/2"),
)
LOOP_ATTRS = ("kv=first", "kv=last", "kv=mean", "kv=cyc:2", "grad=1", "emb", "scale=1/2", "lora=8", "norm")


def random_text(dice: Random) -> str:
    """A text that is usually a program; a rule such as "a label once" may still refuse it."""
    # a copy of a labelled copy is an error: a text has fresh copies or labels
    writer = _Writer(dice, copies=dice.random() < 0.7)
    items = [writer.item(2) for _ in range(dice.randint(1, 3))]
    if dice.random() < 0.3:
        items.insert(dice.randint(0, len(items)), dice.choice(("@e", "?x", "?x[conf=0.9]", "?main")))
    if dice.random() < 0.3:
        items = ["@start", *items, f"({writer.ref()})[inject=start{dice.choice(('', ':concat', ':add'))}]"]
    if dice.random() < 0.1:
        items.append("(0-3)[solve=idn:2]")
    return dice.choice(SEPARATORS).join(items)


class _Writer:
    def __init__(self, dice: Random, copies: bool) -> None:
        self.dice, self.copies = dice, copies

    def index(self) -> str:
        dice = self.dice
        return f"^{dice.randint(1, DEPTH)}" if dice.random() < 0.15 else f"{dice.randrange(DEPTH)}"

    def ref(self) -> str:
        dice = self.dice
        text = self.index()
        if dice.random() < 0.4:
            text += f"-{self.index()}{dice.choice(('', '', '/2', '/3'))}"
        if not self.copies and dice.random() < 0.3:
            text += dice.choice(("!b", "!b=zero", "!c", "!tail"))
        return text

    def seq(self, height: int) -> str:
        items = [self.item(height - 1) for _ in range(self.dice.randint(1, 2))]
        return self.dice.choice(SEPARATORS).join(items)

    def item(self, height: int) -> str:
        dice = self.dice
        kind = dice.random()
        if height == 0 or kind < 0.4:
            core = self.ref() if kind > 0.03 else "_"
        elif kind < 0.75:
            core = f"({self.seq(height)})" if dice.random() < 0.8 else f"( {self.seq(height)} )"
        else:
            branches = [dice.choice(("_", "", *[self.seq(height)] * 4)) for _ in range(dice.randint(1, 3))]
            core = "{" + "|".join(branches) + "}" + dice.choice(("", "", "[comb=mean]", "[comb=gate]", "[comb=sum]"))
        return core + "".join(self.postfix() for _ in range(dice.choice((0, 0, 0, 1, 1, 2))))

    def postfix(self) -> str:
        dice = self.dice
        count = dice.choice((0, 1, 1, 2, 2, 3))
        kind = dice.randrange(9 if self.copies else 7)
        if kind == 0:
            return dice.choice((".a", ".f"))
        if kind == 1:
            return f"*{count}"
        if kind == 2:
            return f"*{count}..{count + dice.randint(0, 2)}"
        if kind == 3:
            return f"**{count}"
        if kind == 4:
            return f"[{dice.choice(VISIT_ATTRS + NODE_ATTRS)}]"
        if kind == 5:
            return f"*{count}[{dice.choice(LOOP_ATTRS)}]"
        if kind == 6:
            values = ":".join(dice.choice(("1", "1/2", "1/4")) for _ in range(max(count, 1)))
            return f"*{max(count, 1)}[{dice.choice(('scale', 'res', 'cap'))}={values}]"
        return f"*!{count}" if kind == 7 else dice.choice(("!", "!", "!zero", "!rand", "!copy"))


def texts() -> st.SearchStrategy[str]:
    """The same texts for hypothesis."""
    return st.randoms(use_true_random=False).map(random_text)
