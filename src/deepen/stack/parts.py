"""Blocks of another form as programs over parts: `l.a` is the mixer of layer l, `l.f` its feed-forward.

    macaron      0   ->   0.f[scale=1/2] 0.a 0.f![scale=1/2]      x + F/2, + A, + F'/2
    parallel     0   ->   {0.a|0.f}                               x + A(norm x) + F(norm' x)
    reordered    0-3 ->   0.a 1.a 2.a 0.f 3.a 1.f 2.f 3.f         any order of mixers and feed-forwards

Each takes a program and gives another and a note of what was done, as `deepen.program.transforms` do, and touches no
weight. In a native stack they run under every wiring that carries what they use: damped stretches, groups. None but
`sandwich_order` with k = 0 keeps the function: they are meant for models that are trained in that form.
"""

from __future__ import annotations

from collections.abc import Callable

from deepen.errors import ProgramError
from deepen.program.normal import normalise
from deepen.program.program import Program
from deepen.program.tree import Node, Ref, Seq, as_seq, rebuild
from deepen.registry import method

# A block of Brainformer: attention, mixture of experts, feed-forward.
BRAINFORMER = "amfamfmf"


@method(
    "macaron",
    family="program",
    source="arXiv:1906.02762",
    title="Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View",
    mechanism="half a feed-forward, the mixer, half a feed-forward: Strang splitting in the place of Lie splitting",
    cost="a second feed-forward a layer; without parameters of its own when it is shared",
)
def macaron(program: Program, depth: int, *, shared: bool = False, tower: str = "") -> tuple[Program, str]:
    """Each layer as half of its feed-forward, its mixer, and half of a second feed-forward.

    Args:
        program: with whole layers; loops and groups of them are kept.
        depth: layers of the bank.
        shared: whether the two halves are one feed-forward; else the second is a copy that begins equal to the first.
            The copy's mixer is never visited.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: a part, a copy, or a layer with attributes.
    """
    second = "f" if shared else "f!"
    form = f"{{0}}.f[scale=1/2] {{0}}.a {{0}}.{second}[scale=1/2]"
    made, layers = _each(program, depth, tower, "macaron", form.format)
    halves = "the halves of one feed-forward" if shared else "halves of two feed-forwards"
    return made, f"set the mixers of {layers} visits between {halves}"


@method(
    "parallel-attention-feed-forward",
    family="program",
    source="arXiv:2305.13297",
    title="Investigating the Role of Feed-Forward Networks in Transformers Using Parallel Attention and Feed-Forward "
    "Net Design",
    mechanism="mixer and feed-forward of a layer read the same stream, each through its own norm",
    cost="none; both can run at once",
)
def parallel_parts(program: Program, depth: int, tower: str = "") -> tuple[Program, str]:
    """Each layer's mixer and feed-forward side by side, with a norm each, as in GPT-NeoX.

    Raises:
        ProgramError: a part, a copy, or a layer with attributes.
    """
    made, layers = _each(program, depth, tower, "parallel_parts", "{{{0}.a|{0}.f}}".format)
    return made, f"set mixer and feed-forward of {layers} visits side by side"


@method(
    "sandwich-order",
    family="program",
    source="arXiv:1911.03864",
    title="Improving Transformer Models by Reordering their Sublayers",
    mechanism="k mixers first, k feed-forwards last, the others in turn between them",
    cost="none",
)
def sandwich_order(program: Program, k: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """The order s^k (sf)^(n-k) f^k of n mixers s and feed-forwards f; k = 0 is the usual one.

    Raises:
        ProgramError: k is below 0 or above n, or the program is not a plain list of whole layers.
    """
    layers = len(_layers(program, depth, tower, "sandwich_order"))
    if not 0 <= k <= layers:
        raise ProgramError(
            f"sandwich_order: {k} mixers cannot stand first, the program has {layers} layers", program.text
        )
    return reorder(program, "a" * k + "af" * (layers - k) + "f" * k, depth, tower)


@method(
    "brainformer",
    family="program",
    source="arXiv:2306.00008",
    title="Brainformers: Trading Simplicity for Efficiency",
    mechanism="blocks of 2 mixers, 3 mixtures of experts and 3 feed-forwards in a searched order",
    cost="6 layers a block, of which 2 mixers are visited",
)
def brainformer(program: Program, depth: int, tower: str = "") -> tuple[Program, str]:
    """Blocks `a m f a m f m f` of 6 layers each; the note says which layers stand for the mixtures m.

    A program does not say what a feed-forward is: that of every second layer should be a mixture of experts, which in
    a decoder chooses experts by token, since experts that choose tokens see later ones.

    Raises:
        ProgramError: the program is not a plain list of whole layers, 6 for each block.
    """
    per = len(BRAINFORMER) - BRAINFORMER.count("a")
    layers = _layers(program, depth, tower, "brainformer")
    if len(layers) % per:
        raise ProgramError(
            f"brainformer: {len(layers)} layers are not blocks of {per}; use a multiple of {per}", program.text
        )
    blocks = len(layers) // per
    made, _ = reorder(program, BRAINFORMER.replace("m", "f") * blocks, depth, tower)
    mixtures = [layer for layer, kind in zip(layers, BRAINFORMER.replace("a", "") * blocks, strict=True) if kind == "m"]
    return made, f"{blocks} blocks; mixtures of experts: layers {', '.join(map(str, mixtures))}"


def reorder(program: Program, order: str, depth: int, tower: str = "") -> tuple[Program, str]:
    """The mixers and the feed-forwards of the layers, each in the order of their layers, in the order that is given.

    Args:
        program: a plain list of whole layers.
        order: `a` for a mixer and `f` for a feed-forward, such as `aaafafff`; what it leaves over is not visited.
        depth: layers of the bank.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: another letter, more parts of one kind than layers, or the program is not a plain list.
    """
    layers = _layers(program, depth, tower, "reorder")
    if wrong := set(order) - set("af"):
        raise ProgramError(f"reorder: {min(wrong)!r} is neither a (mixer) nor f (feed-forward)", program.text)
    if (most := max(order.count("a"), order.count("f"))) > len(layers):
        raise ProgramError(
            f"reorder: the order asks for {most} parts of one kind, the program has {len(layers)} layers", program.text
        )
    rest = {part: iter(layers) for part in "af"}
    text = " ".join(f"{next(rest[part])}.{part}" for part in order)
    return program.with_tower(tower, text), f"ordered {len(order)} parts as {order}"


def _layers(program: Program, depth: int, tower: str, name: str) -> list[int]:
    """The layers of a plain list of whole layers."""
    items = normalise(program.tree(tower), depth, program.text).items
    refs = [item for item in items if isinstance(item, Ref) and item.bare]
    if len(refs) != len(items):
        raise ProgramError(f"{name} needs a plain list of whole layers", program.text)
    return [ref.first.value for ref in refs]


def _each(program: Program, depth: int, tower: str, name: str, text: Callable[[int], str]) -> tuple[Program, int]:
    """The program with each layer written out as other visits, and how many there were."""
    written = 0

    def changed(node: Node) -> Node:
        nonlocal written
        if isinstance(node, Ref):
            if not node.bare:
                raise ProgramError(
                    f"{name} needs whole layers, without copies and attributes of visits", program.text, node.column
                )
            written += 1
            return Program.parse(text(node.first.value)).tree()
        made = rebuild(node, changed)
        if isinstance(made, Seq):
            return Seq(tuple(part for item in made.items for part in as_seq(item).items))
        return made

    return program.with_tower(tower, changed(normalise(program.tree(tower), depth, program.text))), written
