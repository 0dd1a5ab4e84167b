"""Programs: the one-line language that says which layer of a bank is visited when.

`Program` is the text and its tree, `Plan` the program expanded for a bank, the tape what an executor runs.
"""

from deepen.program.attributes import ATTRIBUTES, MARK_ATTRIBUTES, Attribute, register
from deepen.program.cost import Cost, Ends, LayerCost, cost
from deepen.program.draw_svg import draw_svg
from deepen.program.draw_text import draw_text
from deepen.program.notation import Form
from deepen.program.owned import Own
from deepen.program.plan import LoopInfo, Plan, Use, Visit
from deepen.program.program import Program, read_program
from deepen.program.tape import Back, Blend, Enter, Fork, Gate, Grad, Join, Op, Record, Run, Turn
from deepen.program.tree import Attr, Copy, Group, Index, Key, Loop, Mark, Node, Ref, Scope, Seq

__all__ = [
    "ATTRIBUTES",
    "MARK_ATTRIBUTES",
    "Attr",
    "Attribute",
    "Back",
    "Blend",
    "Copy",
    "Cost",
    "Ends",
    "Enter",
    "Fork",
    "Form",
    "Gate",
    "Grad",
    "Group",
    "Index",
    "Join",
    "Key",
    "LayerCost",
    "Loop",
    "LoopInfo",
    "Mark",
    "Node",
    "Op",
    "Own",
    "Plan",
    "Program",
    "Record",
    "Ref",
    "Run",
    "Scope",
    "Seq",
    "Turn",
    "Use",
    "Visit",
    "cost",
    "draw_svg",
    "draw_text",
    "read_program",
    "register",
]
