"""Every search method on a model whose best program is known, and what any search must keep."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import deepen
from deepen.adaptive.search.budget import executed
from deepen.adaptive.search.moves import MOVES, Bank
from deepen.adaptive.search.problem import Finished, Problem, normal
from deepen.adaptive.search.search import Found, frontier, halves, search
from deepen.adaptive.search.state import Candidate, State
from deepen.errors import DataError, FamilyError, SaveError, UsageError
from deepen.probe.trie import Evaluator
from deepen.program import Index, Ref, Seq
from deepen.registry import methods
from tests.adaptive.planted import BEST, planted
from tests.cli.models import TEXT, checkpoint

CONTEXT = 16
METHODS = ("random", "contiguous", "greedy", "beam", "evolution", "mcts")
READING: dict[str, Any] = {"context": CONTEXT, "tokens": None, "held_out_tokens": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder, text = planted(tmp_path_factory.mktemp("search") / "model", letters=320)
    return deepen.open(folder), text


def found_by(model: tuple[Any, str], method: str, **options: Any) -> Found:
    ck, text = model
    return search(ck, text, **{"budget": "2/3", "method": method, "candidates": 60, **READING, **options})


def same(one: Found, two: Found) -> bool:
    """Equal in everything but time and the visits that were run."""
    names = ("program", "cost", "limit", "frontier", "candidates", "ended")
    pairs = [(getattr(one, name), getattr(two, name)) for name in names]
    pairs += [(one.searched.difference, two.searched.difference), (one.held_out.difference, two.held_out.difference)]
    return all(left == right for left, right in pairs)


def test_the_planted_program_is_the_best_of_all_four_layers(model: tuple[Any, str]) -> None:
    ck, text = model
    programs = [" ".join(map(str, kept)) for kept in combinations(range(6), 4)]
    losses, _ = deepen.evaluate_many(ck, programs, halves(text)[0], context=CONTEXT)
    ranked = sorted(zip([found.nll for found in losses], programs, strict=True))
    assert ranked[0][1] == "0 1 4 5"
    assert ranked[1][0] > 1.05 * ranked[0][0]


@pytest.mark.parametrize("method", [pytest.param(name, marks=pytest.mark.method(name)) for name in METHODS])
def test_the_planted_optimum_is_found(model: tuple[Any, str], method: str) -> None:
    found = found_by(model, method, moves=["drop", "restore"])
    assert found.program == BEST
    assert found.cost == pytest.approx(4)
    assert found.held_out.difference.value == 0.0
    assert found.held_out.best.window_nll == found.held_out.whole.window_nll
    assert found.candidates <= 60


def test_every_registered_method_is_tried_here() -> None:
    assert sorted(METHODS) == [found.name for found in methods("search")]


@pytest.mark.method("contiguous")
def test_contiguous_drops_the_block_of_the_least_distance(model: tuple[Any, str]) -> None:
    whole = tuple(Ref(Index(layer)) for layer in range(6))
    for first in range(5):
        distances = np.full((6, 7), 0.5)
        distances[5, 2:] = math.nan
        distances[first, 2] = 0.1
        distances[:, 3] = 0.0
        distances[:, 1] = 0.0
        problem = toy(whole, limit=4, distances=distances)
        problem_method("contiguous")(problem)
        assert list(problem.asked) == [normal((*whole[:first], *whole[first + 2 :]))]


@pytest.mark.method("greedy")
@pytest.mark.method("beam")
def test_a_beam_finds_what_greed_misses() -> None:
    """Leaving out 0 is the best single removal, but 1 and 2 can only go together."""
    whole = tuple(Ref(Index(layer)) for layer in range(4))

    def loss(layers: Sequence[int]) -> float:
        gone = frozenset(range(4)) - frozenset(layers)
        harm = {0: 1.0, 1: 1.5, 2: 1.5, 3: 9.0}
        return 10 + (0.1 if gone == {1, 2} else sum(harm[layer] for layer in gone))

    found = {}
    for name in ("greedy", "beam"):
        problem = toy(whole, limit=2, loss=loss, moves=("drop",))
        problem_method(name)(problem)
        best = problem.best()
        assert best is not None
        found[name] = best.program
    assert found["beam"] == "0 3"
    assert found["greedy"] != "0 3"


@pytest.mark.method("mcts")
@pytest.mark.method("evolution")
@pytest.mark.method("random")
@pytest.mark.parametrize("method", ["random", "evolution", "mcts"])
def test_repeats_are_found_where_they_pay(method: str) -> None:
    """The loss falls with each visit of layer 2, so the best program within five visits repeats it."""
    whole = tuple(Ref(Index(layer)) for layer in range(4))
    loss = lambda layers: 10.0 - min(2, list(layers).count(2)) - len(set(layers)) / 4  # noqa: E731
    problem = toy(whole, limit=5, loss=loss, moves=("drop", "repeat", "swap"))
    problem_method(method)(problem)
    best = problem.best()
    assert best is not None
    assert best.nll == 10 - 2 - 1


@pytest.mark.slow
@pytest.mark.method("evolution")
def test_what_is_learned_guides_the_draws() -> None:
    """Of 16 layers 8 may go at no harm; evolution gets nearer to these than as many random draws do."""
    whole = tuple(Ref(Index(layer)) for layer in range(16))
    loss = lambda layers: 10.0 + sum(layer % 2 == 1 for layer in set(range(16)) - set(layers))  # noqa: E731
    reached = {}
    for name in ("random", "evolution"):
        values = []
        for seed in range(3):
            problem = toy(whole, limit=8, loss=loss, moves=("drop", "restore"), candidates=150, seed=seed)
            with suppress(Finished):
                problem_method(name)(problem)
            best = problem.best()
            assert best is not None
            values.append(best.nll)
        reached[name] = sum(values)
    assert reached["evolution"] < reached["random"]


def problem_method(name: str) -> Any:
    return next(found.implementation for found in methods("search") if found.name == name)


def toy(
    whole: tuple[Ref, ...],
    *,
    limit: float,
    loss: Any = lambda layers: 1.0,
    moves: Sequence[str] = ("drop",),
    distances: Any = None,
    candidates: int | None = 400,
    seed: int = 0,
) -> Problem:
    """A search over programs whose loss is a function of the layers visited."""

    def visited(text: str) -> list[int]:
        return [visit.key.layer for visit in deepen.Program.parse(text).plan(len(whole), ["af"] * len(whole)).visits]

    return Problem(
        whole=whole,
        bank=Bank(len(whole), "af"),
        moves={name: MOVES[name] for name in moves},
        measure=lambda items: float(executed(Seq(items), [{"a": Fraction(1, 2), "f": Fraction(1, 2)}] * len(whole))),
        limit=limit,
        dice=Random(seed),
        state=State({}),
        evaluate=lambda texts: [loss(visited(text)) for text in texts],
        distances=lambda: distances,
        candidates=candidates,
    )


@pytest.mark.parametrize(
    "method", ["greedy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("random", "evolution", "mcts"))]
)
def test_the_seed_gives_the_result(model: tuple[Any, str], method: str, tmp_path: Path) -> None:
    options = {"budget": "0.5", "candidates": 40, "moves": ["drop", "part", "repeat", "swap"]}
    one = found_by(model, method, seed=3, path=tmp_path / "one.json", **options)
    two = found_by(model, method, seed=3, path=tmp_path / "two.json", **options)
    assert same(one, two)
    assert order(tmp_path / "one.json") == order(tmp_path / "two.json")
    if method != "greedy":
        found_by(model, method, seed=4, path=tmp_path / "three.json", **options)
        assert order(tmp_path / "three.json") != order(tmp_path / "one.json")


def order(path: Path) -> list[list]:
    return json.loads(path.read_text())["candidates"]


@pytest.mark.parametrize(
    "method", ["beam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("evolution", "mcts"))]
)
@pytest.mark.parametrize("after", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_search_ends_as_if_undisturbed(
    model: tuple[Any, str], method: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"budget": "0.5", "candidates": 40, "seed": 1}
    undisturbed = found_by(model, method, path=tmp_path / "whole.json", **options)
    evaluate, calls = Evaluator.evaluate, []

    def dying(self: Evaluator, programs: Sequence[str], *given: Any, **more: Any):
        calls.append(len(programs))
        if len(calls) > after:
            raise KeyboardInterrupt
        return evaluate(self, programs, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", dying)
        with pytest.raises(KeyboardInterrupt):
            found_by(model, method, path=tmp_path / "killed.json", **options)
    kept = order(tmp_path / "killed.json")
    assert len(kept) == sum(calls[:after])
    assert kept == order(tmp_path / "whole.json")[: len(kept)]
    evaluated: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Evaluator,
            "evaluate",
            lambda self, programs, *given, **more: (
                evaluated.extend(map(str, programs)) or evaluate(self, programs, *given, **more)
            ),
        )
        resumed = found_by(model, method, path=tmp_path / "killed.json", resume=True, **options)
    assert same(resumed, undisturbed)
    assert order(tmp_path / "killed.json") == order(tmp_path / "whole.json")
    # the last two readings are of the best program and the whole model, once for each half
    assert not {program for program, *_ in kept} & set(evaluated[:-4])


@pytest.mark.slow
def test_more_candidates_go_on_where_fewer_ended(model: tuple[Any, str], tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    few = found_by(model, "evolution", candidates=20, path=path)
    first = order(path)
    more = found_by(model, "evolution", candidates=50, path=path, resume=True)
    assert (few.ended, few.candidates, more.candidates) == (False, 20, 50)
    assert order(path)[:20] == first
    assert same(more, found_by(model, "evolution", candidates=50))


@pytest.mark.parametrize("method", METHODS)
def test_held_out_text_is_read_once_at_the_end(
    model: tuple[Any, str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = model
    searched, held_out = halves(text)
    assert searched + held_out == text
    evaluate, read = Evaluator.evaluate, []

    def noting(self: Evaluator, programs: Sequence[str], text: str, **more: Any):
        read.append((list(map(str, programs)), text))
        return evaluate(self, programs, text, **more)

    monkeypatch.setattr(Evaluator, "evaluate", noting)
    found = found_by(model, method, candidates=20)
    assert [text for _, text in read].count(held_out) == 1
    assert read[-1] == ([found.program, "0-5"], held_out)
    assert {text for _, text in read[:-1]} == {searched}


@pytest.mark.slow
def test_the_held_out_text_decides_nothing(model: tuple[Any, str]) -> None:
    ck, text = model
    searched, held_out = halves(text)
    other = searched + held_out[0] + "".join(reversed(held_out[1:]))
    one, two = (found_by((ck, each), "beam", candidates=30, budget="0.5") for each in (text, other))
    assert (one.program, one.frontier) == (two.program, two.frontier)
    assert one.held_out.best.nll != two.held_out.best.nll


def test_the_figures_are_those_of_perplexity(model: tuple[Any, str]) -> None:
    ck, text = model
    found = found_by(model, "greedy", budget="0.5", candidates=20)
    for half, part in zip(halves(text), (found.searched, found.held_out), strict=True):
        for program, got in ((found.program, part.best), ("0-5", part.whole)):
            expected = deepen.perplexity(ck.apply(program).load(), ck.tokenizer(), half, context=CONTEXT)
            assert got.nll == expected.nll
        moved = part.best.nll / part.best.tokens - part.whole.nll / part.whole.tokens
        assert part.difference.value == pytest.approx(moved)
        assert part.difference.low <= part.difference.value <= part.difference.high


def test_the_frontier_is_cheaper_or_better_at_each_step() -> None:
    rows = [("a", 5.0, 3), ("b", 4.0, 3), ("c", 4.5, 2), ("d", 9.0, 1), ("e", 4.0, 4), ("f", math.inf, 0.5)]
    points = frontier([Candidate(*row) for row in rows])
    assert [one.program for one in points] == ["d", "c", "b"]


def test_time_that_is_up_ends_the_search_with_what_there_is(model: tuple[Any, str], tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    with pytest.raises(UsageError, match="none of the 0 programs evaluated is within layers="):
        found_by(model, "evolution", minutes=1e-12, path=path)
    found_by(model, "evolution", candidates=20, path=path, resume=True)
    # what is known costs no time
    found = found_by(model, "evolution", minutes=1e-12, path=path, resume=True)
    assert (found.candidates, found.ended) == (20, False)


def test_programs_that_overflow_lose() -> None:
    whole = tuple(Ref(Index(layer)) for layer in range(3))
    problem = toy(
        whole, limit=2, loss=lambda layers: math.inf if 0 not in layers else 7.0 - 2 * len(layers) + layers[-1]
    )
    problem_method("greedy")(problem)
    best = problem.best()
    assert best is not None
    assert best.program == "0-1"


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_few_candidates_still_give_a_program(model: tuple[Any, str], method: str) -> None:
    found = found_by(model, method, candidates=3, budget="0.5")
    assert found.cost <= 3
    assert not found.ended


@pytest.mark.slow
def test_a_beam_search_shares_its_visits(tmp_path: Path) -> None:
    ck = deepen.open(checkpoint(tmp_path / "deep", num_hidden_layers=30))
    found = search(ck, TEXT[:200], budget="0.75", method="beam", candidates=200, **READING)
    assert found.cost <= 22.5
    run, separate = found.visits
    assert separate >= 1.8 * run


BAD = [
    ({"budget": "0.1"}, UsageError, "cannot be met.* nearest that can is layers=0.1667"),
    ({"budget": "0"}, UsageError, "expected a share"),
    ({"budget": "flop=0.5"}, UsageError, "did you mean 'flops'"),
    ({"method": "greedly"}, UsageError, "no search method 'greedly' .did you mean 'greedy'"),
    ({"moves": ["dorp"]}, UsageError, "no move 'dorp' .did you mean 'drop'"),
    ({"moves": ["swap"]}, UsageError, "make no program smaller; add drop or part"),
    ({"candidates": 0}, UsageError, "at least 1 candidate"),
    ({"minutes": 0}, UsageError, "more than 0 minutes"),
    ({"tokens": 20}, UsageError, "20 searched tokens are fewer than two windows of 16"),
    ({"held_out_tokens": 20}, UsageError, "20 held-out tokens are fewer than two windows"),
    ({"context": 64, "budget": "0.5", "text": "a" * 130}, DataError, "fewer than two windows of 64"),
    ({"resume": True, "path": "missing.json"}, DataError, "does not exist, so there is no search"),
]


@pytest.mark.parametrize("options, error, words", BAD)
def test_bad_input(
    model: tuple[Any, str], options: dict, error: type, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ck, text = model
    with pytest.raises(error, match=words):
        search(ck, options.pop("text", text), **{"budget": "0.5", "method": "greedy", **READING, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_causal_head_is_refused(tmp_path: Path) -> None:
    ck = deepen.open(checkpoint(tmp_path / "bert", "bert"))
    with pytest.raises(FamilyError, match="no causal head"):
        search(ck, TEXT, budget="0.75", **READING)


def test_a_state_of_another_search_is_refused_by_what_differs(model: tuple[Any, str], tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    found_by(model, "contiguous", path=path)
    before = path.read_bytes()
    with pytest.raises(SaveError, match="exists already"):
        found_by(model, "contiguous", path=path)
    for options, words in (
        ({"budget": "0.5"}, "budget was layers=0.666667, now it is layers=0.5"),
        ({"seed": 9}, "seed was 0, now it is 9"),
        ({"context": 20}, "context was 16, now it is 20"),
    ):
        with pytest.raises(UsageError, match=words):
            found_by(model, "contiguous", path=path, resume=True, **options)
    with pytest.raises(UsageError, match="method was contiguous, now it is greedy"):
        found_by(model, "greedy", path=path, resume=True)
    other = deepen.open(checkpoint(tmp_path / "other"))
    with pytest.raises(UsageError, match="model was"):
        found_by((other, model[1]), "contiguous", path=path, resume=True)
    with pytest.raises(UsageError, match="text was"):
        found_by((model[0], model[1] + "abc"), "contiguous", path=path, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"setup": {}, "candidates": [[1]]}', '{"candidates": 3}'])
def test_a_file_that_is_no_state_is_refused(model: tuple[Any, str], content: str, tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    path.write_text(content)
    with pytest.raises(DataError, match="not the state of a search"):
        found_by(model, "contiguous", path=path, resume=True)
    assert path.read_text() == content


def test_it_is_exported() -> None:
    assert deepen.search is search
    assert deepen.Found is Found
