"""Many programs at once against each by itself: same figures, fewer visits, bounded memory."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.load import quiet
from deepen.errors import DataError, FamilyError, ProgramError, UsageError
from deepen.probe.once import read_once
from deepen.probe.perplexity import Evaluation, perplexity
from deepen.probe.trie import Evaluator, evaluate_many
from deepen.probe.trie_bank import Bank
from deepen.probe.trie_tapes import Branch, Step, grow, held, moves_of, steps, within
from tests.assets import shakespeare_text, smollm2_gguf
from tests.cli.models import TEXT, checkpoint
from tests.laws.programs import random_program

CONTEXT = 16
REMOVALS = [" ".join(str(at) for at in range(6) if at != gone) for gone in range(6)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return deepen.open(checkpoint(tmp_path_factory.mktemp("trie") / "llama"))


def alone(ck: Checkpoint, program: str, **options: int | None) -> Evaluation:
    return perplexity(ck.apply(program).load(), ck.tokenizer(), TEXT[:150], context=CONTEXT, **options)


# Serial and parallel layers, sliding windows, experts, recurrence, and a stream that is scaled outside of the parts.
FAMILIES = ["llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "qwen3_moe", "mamba", "falcon", "opt", "granite"]


@pytest.mark.parametrize(
    "family", [*FAMILIES[:2], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[2:])]
)
def test_equals_separate_evaluation_bit_for_bit(family: str, tmp_path: Path) -> None:
    ck = deepen.open(checkpoint(tmp_path / family, family))
    parts = ck.family.tower("").parts
    dice = Random(5)
    programs = []
    while len(programs) < 12:
        text = random_program(dice, ck.depth["text"], parts=False, zero=not parts.post_norm, kv=family == "llama")
        programs.append(text)
    programs += ["0-2 4-5", "5-0", "0-5", "0-2 3*2 4-5"]
    found, visits = evaluate_many(ck, programs, TEXT[:150], context=CONTEXT, batch=2)
    assert visits.reason == ""
    for program, got in zip(programs, found, strict=True):
        expected = alone(ck, program, batch=2)
        assert got.window_nll == expected.window_nll, program
        assert (got.nll, got.tokens, got.bytes) == (expected.nll, expected.tokens, expected.bytes)
        assert (got.windows, got.read) == (expected.windows, expected.read)
    assert visits.run < visits.separate


def test_parts_groups_and_scales_share_what_they_begin_with(llama: Checkpoint) -> None:
    programs = [
        "0-2 {3|4.f|_} 5",
        "0-2 {3|4.a} 5",
        "0-2 {3|4.a}[comb=mean] 5",
        "0-1 (2-4)[scale=1/2] 5",
        "0-1 (2 3)*2 5",
    ]
    found, visits = evaluate_many(llama, programs, TEXT[:150], context=CONTEXT)
    assert [got.window_nll for got in found] == [alone(llama, program).window_nll for program in programs]
    assert visits.run == found[0].windows * distinct_prefixes(llama, programs)


def distinct_prefixes(ck: Checkpoint, programs: list[str]) -> int:
    """What one window must run: the distinct beginnings that end in a visit."""
    prefixes = set()
    for program in programs:
        moves = moves_of(ck.apply(program).plan())
        assert moves is not None
        prefixes |= {moves[: at + 1] for at, move in enumerate(moves) if isinstance(move, Step)}
    return len(prefixes)


def test_single_removals_need_half_of_the_visits(tmp_path: Path) -> None:
    """Thirty layers, as SmolLM2 has: 1 + 2 + .. + 29 visits after each place, and one prefix of 29."""
    ck = deepen.open(checkpoint(tmp_path / "deep", num_hidden_layers=30))
    programs = [" ".join(str(at) for at in range(30) if at != gone) for gone in range(30)]
    _, visits = evaluate_many(ck, programs, TEXT[:64], context=CONTEXT)
    assert visits.separate == 4 * 30 * 29
    assert visits.run == 4 * (sum(range(30)) + 29) <= 0.55 * visits.separate


def test_the_trie_of_single_removals_keeps_one_stream(llama: Checkpoint) -> None:
    tapes = {at: moves_of(llama.apply(program).plan()) or () for at, program in enumerate(REMOVALS)}
    root = grow(tapes)
    assert root.need == 1
    assert leaves(root) == tapes


def leaves(branch: Branch, before: tuple = ()) -> dict[int, tuple]:
    """Each program's tape, read back from the trie."""
    moves = before + branch.moves
    found = dict.fromkeys(branch.ends, moves)
    for child in branch.children:
        found |= leaves(child, moves)
    return found


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 100])
def test_a_limit_of_streams_holds_and_loses_no_program(llama: Checkpoint, limit: int) -> None:
    dice = Random(3)
    programs = [random_program(dice, 6, zero=False, kv=False) for _ in range(60)] + REMOVALS
    tapes = {at: moves for at, text in enumerate(programs) if (moves := moves_of(llama.apply(text).plan())) is not None}
    root, free = within(grow(tapes), limit), grow(tapes)
    assert leaves(root) == tapes
    assert root.need <= limit
    assert free.visits <= root.visits <= sum(steps(moves) for moves in tapes.values())
    assert (root.visits == free.visits) == (free.need <= limit)


def test_no_more_streams_are_alive_than_are_stated(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    run = Bank.run

    def counting(self: Bank, *given):
        nonlocal most
        state = run(self, *given)
        alive.add(state.stream)
        most = max(most, len(alive))
        return state

    monkeypatch.setattr(Bank, "run", counting)
    programs = [f"0 {a} {b} {c}" for a in range(4) for b in range(4) for c in range(4)]
    free, _ = evaluate_many(llama, programs, TEXT[:32], context=CONTEXT)
    tapes = {at: moves_of(llama.apply(text).plan()) or () for at, text in enumerate(programs)}
    # the streams kept, the one that goes into a stretch and the one that comes out
    assert grow(tapes).need == 3
    assert most <= 3 + 2
    most = 0
    bounded, visits = evaluate_many(llama, programs, TEXT[:32], context=CONTEXT, memory=1 * CONTEXT * 32 * 4)
    assert most <= 1 + 2
    assert [got.window_nll for got in bounded] == [got.window_nll for got in free]
    assert visits.run < visits.separate


def test_the_batch_shrinks_before_sharing_is_given_up(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    start = Bank.start
    monkeypatch.setattr(Bank, "start", lambda self, ids: sizes.append(len(ids)) or start(self, ids))
    stream = CONTEXT * 32 * 4
    programs = [f"0 {a} {b}" for a in range(3) for b in range(3)]
    whole, _ = evaluate_many(llama, programs, TEXT[: 8 * CONTEXT], context=CONTEXT, batch=8, memory=16 * stream)
    assert max(sizes) == 8
    sizes.clear()
    small, visits = evaluate_many(llama, programs, TEXT[: 8 * CONTEXT], context=CONTEXT, batch=8, memory=4 * stream)
    assert max(sizes) == 2
    assert visits.run == 8 * (1 + 3 + 9)
    assert [got.nll for got in small] == pytest.approx([got.nll for got in whole], rel=1e-6)


@pytest.mark.parametrize("program", ["0-2 (3-4)*2[kv=first] 5", "0-3 3!zero 4-5"])
def test_what_cannot_be_shared_is_run_by_itself(llama: Checkpoint, program: str) -> None:
    (other, got), visits = evaluate_many(llama, ["0-4", program], TEXT[:150], context=CONTEXT)
    assert moves_of(llama.apply(program).plan()) is None
    assert got.window_nll == alone(llama, program).window_nll
    assert other.window_nll == alone(llama, "0-4").window_nll
    assert visits.run == visits.separate


def test_a_layer_that_depends_on_its_place_is_found_out(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here layer 2 does something else whenever it is called; sharing would give each program another model."""
    evaluator = Evaluator(llama)
    layer = evaluator.bank.layer(2)
    forward, calls = layer.forward, []

    def odd(stream, *args, **kwargs):
        calls.append(1)
        return forward(stream * len(calls), *args, **kwargs)

    monkeypatch.setattr(layer, "forward", odd)
    evaluator.evaluate(["0-5"], TEXT[:32], context=CONTEXT)
    assert "depends on more than the stream" in evaluator.visits.reason


@pytest.mark.slow
def test_evaluations_of_a_real_model() -> None:
    ck = read_once(deepen.open(smollm2_gguf()))
    text = shakespeare_text()[20000:60000]
    programs = ["0-9 {10|11} 12-20 20 21-29", "0-9 10.f (12-13)[scale=1/2] 14-29"]
    found, visits = evaluate_many(ck, programs, text, context=32, tokens=64)
    assert visits.run == 2 * (31 + 29 - 10)
    for program, got in zip(programs, found, strict=True):
        expected = perplexity(ck.apply(program).load(), ck.tokenizer(), text, context=32, tokens=64)
        assert got.window_nll == pytest.approx(expected.window_nll, rel=1e-5), program


def test_logits_that_are_not_finite_are_an_infinite_loss(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "broken")
    with quiet():
        model = deepen.open(folder).load()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = math.nan
    broken = tmp_path / "nan"
    model.save_pretrained(broken)
    deepen.open(folder).tokenizer().save_pretrained(broken)
    (whole, without), _ = evaluate_many(deepen.open(broken), ["0-5", "0-1 3-5"], TEXT[:64], context=CONTEXT)
    assert whole.nll == whole.perplexity == math.inf
    assert math.isfinite(without.nll)


def test_progress_counts_every_window_of_every_program(llama: Checkpoint) -> None:
    calls: list[tuple[int, int]] = []
    programs = [*REMOVALS, "0-2 (3-4)*2[kv=first] 5"]
    evaluate_many(llama, programs, TEXT[:70], context=CONTEXT, progress=lambda count, all: calls.append((count, all)))
    assert sum(count for count, _ in calls) == 5 * 7
    assert {total for _, total in calls} == {5 * 7}


def test_held_counts_the_streams_of_open_forks(llama: Checkpoint) -> None:
    moves = moves_of(llama.apply("0 {1|2|3} 4").plan()) or ()
    sizes = [held(moves[:at]) for at in range(len(moves) + 1)]
    assert sizes == [1, 1, 2, 2, 3, 3, 4, 4, 1, 1]


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"context": 65}, UsageError, "64 positions"),
        ({"batch": 0}, UsageError, "at least 1 window"),
        ({"context": 64, "tokens": 10}, UsageError, "fewer than one window"),
    ],
)
def test_options_that_do_not_fit(llama: Checkpoint, options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        evaluate_many(llama, ["0-5"], TEXT, **{"context": CONTEXT, **options})


def test_bad_input_is_named(llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="layer 9 does not exist"):
        evaluate_many(llama, ["0-5", "0-9"], TEXT, context=CONTEXT)
    with pytest.raises(DataError, match="fewer than one window"):
        evaluate_many(llama, ["0-5"], TEXT[:3], context=CONTEXT)
    for family in ("bert", "t5"):
        with pytest.raises(FamilyError, match="no causal head"):
            evaluate_many(deepen.open(checkpoint(tmp_path / family, family)), ["0-1"], TEXT, context=CONTEXT)


def test_it_is_exported() -> None:
    assert deepen.evaluate_many is evaluate_many
