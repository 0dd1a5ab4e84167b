"""Synthetic reasoning: answers against a brute force, sizes of the parts, batches that depend on the seed alone."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from deepen.errors import UsageError
from deepen.tasks.batch import IGNORED
from deepen.tasks.read import TASKS, read_task
from deepen.tasks.reasoning import Reasoning

NAMES = ("p-hop", "modular", "listops", "lego", "parity", "dyck", "copying")
Asked = list[str | None]


def p_hop(inputs: Sequence[str]) -> Asked:
    hops = inputs.count("+")
    x = inputs[hops:]

    def find(i: int) -> int | None:
        return max((j for j in range(1, i + 1) if x[j - 1] == x[i]), default=None)

    answers: Asked = [None] * hops
    for i in range(len(x)):
        at: int | None = i
        for _ in range(hops):
            at = find(at) if at is not None else None
        answers.append("?" if at is None else x[at])
    return answers


def modular(inputs: Sequence[str]) -> Asked:
    text = "0"
    for word in ("+", *inputs[:-1]):
        text = f"({text}){word}" if word in "+-*" else f"{text}{word}"
    return [None] * (len(inputs) - 1) + [str(calculated(text) % 7)]


def calculated(text: str) -> int:
    """An expression whose every operation stands in brackets."""
    while inner := re.search(r"\((-?\d+)\)([+*-])(\d+)", text):
        a, sign, b = inner.groups()
        numbers = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        text = text[: inner.start()] + str(numbers[sign]) + text[inner.end() :]
    return int(text)


def listops(inputs: Sequence[str]) -> Asked:
    text = " ".join(inputs[:-1])
    rules = {
        "MAX": max,
        "MIN": min,
        "MED": lambda values: int(np.floor(statistics.median(values))),
        "SM": lambda values: sum(values) % 10,
    }
    while inner := re.search(r"\[(\w+) ([\d ]+) \]", text):
        result = rules[inner[1]](list(map(int, inner[2].split())))
        text = text[: inner.start()] + str(result) + text[inner.end() :]
    return [None] * (len(inputs) - 1) + [text]


def lego(inputs: Sequence[str]) -> Asked:
    mark = inputs.index("?")
    clauses = [inputs[at : at + 4] for at in range(0, mark, 5)]
    value = {"1": 1}
    for _ in clauses:
        value |= {name: (1 if sign == "+" else -1) * value[of] for name, _, sign, of in clauses if of in value}
    return [None] * (mark + 1) + ["+" if value[name] == 1 else "-" for name in inputs[mark + 1 :]]


def parity(inputs: Sequence[str]) -> Asked:
    return ["odd" if inputs[: end + 1].count("1") % 2 else "even" for end in range(len(inputs))]


def dyck(inputs: Sequence[str]) -> Asked:
    answers: Asked = []
    for end in range(len(inputs)):
        text = " ".join(inputs[: end + 1])
        while (shorter := re.sub(r"<(\d+) ?\1> ?", "", text)) != text:
            text = shorter
        left = text.split()
        assert all(word.startswith("<") for word in left)
        answers.append(f"{left[-1][1:]}>" if left else ".")
    return answers


def copying(inputs: Sequence[str]) -> Asked:
    mark = inputs.index("=")
    sequence = list(inputs[:mark])
    return [None] * mark + sequence


BRUTE = {"p-hop": p_hop, "modular": modular, "listops": listops, "lego": lego, "parity": parity, "dyck": dyck,
         "copying": copying}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_a_brute_force_on_every_part(name: str) -> None:
    task = read_task({"name": name})
    assert isinstance(task, Reasoning)
    for part in ("train", *task.parts):
        drawn = np.random.default_rng(7)
        answers = set()
        for _ in range(40):
            inputs, asked = task.draw(drawn, part)
            assert list(asked) == BRUTE[name](inputs)
            answers |= {answer for answer in asked if answer is not None}
        assert len(answers) > 1


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_functions_of_step_and_seed_and_held_out_parts_of_nothing(name: str) -> None:
    one, other = (read_task({"name": name, "examples": 24}).data() for _ in range(2))
    assert torch.equal(one.batch(3, 5, 1).inputs, other.batch(3, 5, 1).inputs)
    drawn = [one.batch(step, 5, seed).inputs.tolist() for step, seed in ((3, 1), (4, 1), (3, 2))]
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[2]
    for part in one.splits:
        whole = list(one.held_out(part, 100))
        assert len(whole) == 1
        assert len(whole[0]) == 24
        pieces = torch.cat([batch.targets for batch in other.held_out(part, 7)])
        assert torch.equal(whole[0].targets, pieces)
        assert int(whole[0].inputs.max()) < one.stack["vocabulary"]
        assert whole[0].inputs.shape[1] <= one.stack["context"]
    assert one.digest == other.digest != read_task({"name": name, "examples": 25}).data().digest


@pytest.mark.parametrize(
    ("options", "part", "size"),
    [
        ({"name": "p-hop", "longer": [70, 71]}, "longer", lambda inputs: len(inputs) - inputs.count("+")),
        ({"name": "p-hop", "deeper": [70, 71]}, "deeper", lambda inputs: inputs.count("+")),
        ({"name": "modular", "deeper": [70, 71]}, "deeper", lambda inputs: len(inputs) // 2 - 1),
        ({"name": "parity", "longer": [70, 71]}, "longer", len),
        ({"name": "dyck", "longer": [70, 71]}, "longer", len),
        ({"name": "copying", "longer": [70, 71]}, "longer", lambda inputs: inputs.index("=")),
        ({"name": "lego", "deeper": [20, 21]}, "deeper", lambda inputs: inputs.count("=")),
    ],
)
def test_parts_beyond_training_have_their_sizes(options: dict[str, object], part: str, size: object) -> None:
    task = read_task(options)
    assert isinstance(task, Reasoning)
    wanted = options[part]
    drawn = np.random.default_rng(0)
    sizes = {size(list(task.draw(drawn, part)[0])) for _ in range(60)}  # pyright: ignore[reportCallIssue]
    assert sorted(sizes) == wanted
    others = {size(list(task.draw(drawn, "train")[0])) for _ in range(60)}  # pyright: ignore[reportCallIssue]
    assert max(others) < wanted[0]  # pyright: ignore[reportIndexIssue]


def nesting(inputs: Sequence[str]) -> int:
    steps = [1 if word.startswith(("[", "<")) else -1 if word.endswith(("]", ">")) else 0 for word in inputs]
    return max(np.cumsum(steps))


@pytest.mark.parametrize("name", ["listops", "dyck"])
def test_deeper_questions_nest_deeper_than_any_in_training(name: str) -> None:
    task = read_task({"name": name})
    assert isinstance(task, Reasoning)
    drawn = np.random.default_rng(0)
    trained, deeper = ([nesting(task.draw(drawn, part)[0]) for _ in range(60)] for part in ("train", "deeper"))
    assert max(trained) < min(deeper)


def test_only_the_end_of_a_parity_can_be_asked_for_and_a_copy_can_run_backwards() -> None:
    drawn = np.random.default_rng(0)
    end = read_task({"name": "parity", "every": False, "length": [9, 9]})
    assert isinstance(end, Reasoning)
    inputs, asked = end.draw(drawn, "train")
    assert list(asked) == [None] * 8 + ["odd" if inputs.count("1") % 2 else "even"]
    back = read_task({"name": "copying", "backwards": True})
    assert isinstance(back, Reasoning)
    inputs, asked = back.draw(drawn, "train")
    mark = list(inputs).index("=")
    assert [*reversed(asked)][:mark] == list(inputs[:mark])


def test_padding_is_never_asked_for_and_pieces_share_the_loss_of_the_whole() -> None:
    data = read_task({"name": "copying"}).data()
    batch = data.batch(0, 8, 0)
    padding = data.stack["vocabulary"] - 1
    assert bool((batch.inputs == padding).any())
    assert int((batch.targets == padding).sum()) == 0
    pieces = batch.chunk(4)
    assert sum(piece.asked for piece in pieces) == batch.asked == int((batch.targets != IGNORED).sum())
    assert {piece.share for piece in pieces} == {batch.asked / 4}


def test_unknown_tasks_and_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'listops'"):
        read_task({"name": "listop"})
    for options in ({"hop": 3}, {"hops": [4, 2]}, {"length": [0, 2]}, {"letters": 0}):
        with pytest.raises(ValidationError):
            read_task({"name": "p-hop", **options})
    with pytest.raises(ValidationError, match="needs more than 4 names"):
        read_task({"name": "lego", "names": 4})
    assert all(getattr(read_task({"name": name}), "name", "") == name for name in TASKS)
