"""Monte-Carlo tree search over chains of layers: skip, repeat, reorder.

    node     the path so far and the layers still to come
    actions  go on with the next layer | skip 1-4 | repeat the last 1-4 of the path | the next two in reverse
    rollout  the rest as it is, shrunk at random into the budget
    choose   argmax  Q / N + c sqrt(ln N_parent / N),  c = 1.41      Q: sum of the rewards, from 0 to 1

"Skip a Layer or Loop It? Test-Time Depth Adaptation of Pretrained LLMs" (CoLa), arXiv:2507.07996, which searches for
each input with its known answer. Here one program is searched for a text under a hard budget. So the reward is not
right or wrong but the loss of the whole program over that of the candidate, stretched to the range seen so far, and
several rollouts are made before their losses are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deepen.adaptive.search.moves import Items
from deepen.adaptive.search.problem import Problem, normal
from deepen.registry import method

EXPLORATION = 1.41
LONGEST, ROLLOUTS, MOST = 4, 8, 400
# Rounds in a row that find no new program before the search ends.
STALE = 25


@dataclass
class _Node:
    """The path so far, where it goes on in the whole program, and what came of it."""

    path: Items
    next: int
    parent: _Node | None = None
    repeated: bool = False
    children: list[_Node] = field(default_factory=list)
    untried: list[_Node] | None = None
    visits: int = 0
    reward: float = 0.0


@method(
    "mcts",
    family="search",
    source="arXiv:2507.07996",
    title="Skip a Layer or Loop It? Test-Time Depth Adaptation of Pretrained LLMs",
    mechanism="Monte-Carlo tree search over chains of layers: skip, repeat, reorder",
    cost="one evaluation a simulation that ends in a new program",
)
def mcts(problem: Problem) -> None:
    """Simulates until all candidates are used up, or no new programs come."""
    base = problem.ask([problem.whole])[0]
    root, span = _Node((), 0), _Span()
    seen: set[str] = set()
    stale = 0
    while stale < STALE and len(seen) < (problem.candidates or MOST):
        leaves = []
        for _ in range(ROLLOUTS):
            leaf = _expanded(problem, _selected(problem, root, span))
            rest = problem.whole[leaf.next :]
            leaves.append((leaf, _completed(problem, leaf.path, rest)))
            # counted now, so that the next rollout of the round goes elsewhere
            _walk_up(leaf, 1, 0.0)
        new = {normal(items) for _, items in leaves} - seen
        seen |= new
        stale = 0 if new else stale + 1
        losses = problem.ask([items for _, items in leaves])
        for (leaf, _), loss in zip(leaves, losses, strict=True):
            _walk_up(leaf, 0, span.seen(base / loss if 0 < loss < math.inf and math.isfinite(base) else 0.0))


@dataclass
class _Span:
    """The range of the rewards seen: losses differ by little, and the bound is made for rewards from 0 to 1."""

    low: float = math.inf
    high: float = -math.inf

    def seen(self, reward: float) -> float:
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        return reward

    def stretched(self, reward: float) -> float:
        """The reward from 0 to 1; the middle while there is only one."""
        return (reward - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def _selected(problem: Problem, node: _Node, span: _Span) -> _Node:
    """The node to expand: down by the bound while every action has been tried."""
    while True:
        if node.untried is None:
            node.untried = _actions(problem, node)
        if node.untried or not node.children:
            return node
        node = max(node.children, key=lambda child: _bound(child, span))


def _bound(node: _Node, span: _Span) -> float:
    assert node.parent is not None
    exploration = EXPLORATION * math.sqrt(math.log(max(1, node.parent.visits)) / node.visits)
    return span.stretched(node.reward / node.visits) + exploration


def _expanded(problem: Problem, node: _Node) -> _Node:
    if not node.untried:
        return node
    child = node.untried.pop(problem.dice.randrange(len(node.untried)))
    node.children.append(child)
    return child


def _actions(problem: Problem, node: _Node) -> list[_Node]:
    whole, path, at = problem.whole, node.path, node.next
    found = []
    if at < len(whole):
        found.append(_Node((*path, whole[at]), at + 1, node))
    if "drop" in problem.moves:
        found += [_Node(path, at + count, node) for count in range(1, LONGEST + 1) if at + count <= len(whole)]
    if "swap" in problem.moves and at + 1 < len(whole):
        found.append(_Node((*path, whole[at + 1], whole[at]), at + 2, node))
    if {"repeat", "loop"} & problem.moves.keys() and not node.repeated:
        lengths = range(1, min(LONGEST if "loop" in problem.moves else 1, len(path)) + 1)
        found += [_Node((*path, *path[-length:]), at, node, repeated=True) for length in lengths]
    # a path that is over the budget by itself leads nowhere
    return [child for child in found if not child.path or problem.fits(child.path)]


def _completed(problem: Problem, path: Items, rest: Items) -> Items:
    """The path and as much of the rest as fits; what goes is drawn at random."""
    left = list(rest)
    while left and not problem.fits((*path, *left)):
        left.pop(problem.dice.randrange(len(left)))
    return problem.shrunk((*path, *left) or (problem.dice.choice(problem.whole),))


def _walk_up(node: _Node | None, visits: int, reward: float) -> None:
    while node is not None:
        node.visits += visits
        node.reward += reward
        node = node.parent
