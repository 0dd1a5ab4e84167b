"""Laws of every score that only watches, and of the pass that feeds them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import deepen
from deepen.errors import DataError, UsageError
from deepen.probe.scores.collect import Seen, collect
from deepen.probe.scores.reading import open_reading, watching
from deepen.probe.scores.score import TOGETHER, choose, score_reading
from tests.cli.models import TEXT
from tests.probe.scores.planted import CONTEXT, planted

JUDGING = ("block_influence", "angular", "contribution", "geometry", "cka")


def test_a_visit_that_does_nothing_ranks_last_by_every_score_that_judges(tmp_path: Path) -> None:
    got = deepen.score(planted(tmp_path / "model", idle=(3,)), text=TEXT[:160], context=CONTEXT)
    judging = [column for column in got.columns.values() if column.matters != "neither"]
    assert {column.name for column in judging} == {*JUDGING, "contribution.a", "contribution.f"}
    for column in judging:
        assert got.rank(column.name)[3] == 6, column.name
        assert sorted(rank or 0 for rank in column.ranks) == [1, 2, 3, 4, 5, 6], column.name


@pytest.mark.parametrize("batch", [2, 3])
def test_batches_change_nothing(tmp_path: Path, batch: int) -> None:
    ck = planted(tmp_path / "model")
    # 11 windows, the last one shorter
    one, many = (deepen.score(ck, text=TEXT[: 10 * CONTEXT + 9], context=CONTEXT, batch=size) for size in (1, batch))
    for name, column in one.columns.items():
        np.testing.assert_allclose(many.columns[name].values, column.values, rtol=2e-5, atol=1e-6, err_msg=name)
        assert many.columns[name].count == column.count
    for name, matrix in one.matrices.items():
        np.testing.assert_allclose(many.matrices[name].values, matrix.values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_together_and_alone_give_the_same(tmp_path: Path) -> None:
    reading = open_reading(
        planted(tmp_path / "model"), TEXT[:96], tower="", context=CONTEXT, tokens=None, batch=1, device="cpu",
        dtype=None,
    )  # fmt: skip
    together, calls, _ = score_reading(reading, choose(TOGETHER))
    assert set(calls.values()) == {6}
    assert reading.calls == 6
    for name in TOGETHER:
        alone, _, _ = score_reading(reading, choose((name,)))
        np.testing.assert_equal(
            [column.values for column in alone[name].columns], [column.values for column in together[name].columns]
        )


def test_watching_changes_no_bit_of_the_output(tmp_path: Path) -> None:
    reading = open_reading(
        planted(tmp_path / "model"), TEXT[:96], tower="", context=CONTEXT, tokens=None, batch=1, device="cpu",
        dtype=None,
    )  # fmt: skip
    ids, _ = next(reading.groups())
    with torch.no_grad():
        before = reading.model(ids).logits
        seen: Counter[int] = Counter()
        with watching(reading.visits, lambda visit, *streams: seen.update([visit]), parts=True):
            during = reading.model(ids).logits
        collect(reading, [kind(reading.depth) for kind in choose(TOGETHER).values()])
        after = reading.model(ids).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert seen == Counter(range(6))


def test_each_turn_of_a_loop_and_each_part_is_a_row(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model").apply("0 (1-2)*2 3.a 4.f 5")
    got = deepen.score(ck, "contribution", text=TEXT[:96], context=CONTEXT)
    assert [row.layer for row in got.rows] == ["0", "1", "2", "1", "2", "3.a", "4.f", "5"]
    norm, mixer, feed = (got.columns[f"contribution{part}"].values for part in ("", ".a", ".f"))
    assert np.isnan(feed[5])
    assert np.isnan(mixer[6])
    assert norm[5] == pytest.approx(mixer[5], rel=1e-5)
    assert norm[6] == pytest.approx(feed[6], rel=1e-5)


def test_streams_in_a_group_are_those_of_its_branches(tmp_path: Path) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Keep:
        parts = False

        def watch(self, what: Seen) -> None:
            seen.append((what.before.values.clone(), what.after.values.clone()))

    reading = open_reading(
        planted(tmp_path / "model").apply("0 {1|2} 3"), TEXT[:CONTEXT], tower="", context=CONTEXT, tokens=None,
        batch=1, device="cpu", dtype=None,
    )  # fmt: skip
    collect(reading, [Keep()])  # pyright: ignore[reportArgumentType]
    (_, first), (one, one_out), (two, two_out), (joined, _) = seen
    assert torch.equal(one, first)
    assert torch.equal(two, first)
    torch.testing.assert_close(joined, first + (one_out - first) + (two_out - first))


@pytest.mark.parametrize(
    "family, words", [("gemma2", "not what the layer adds"), ("bert", "normalises after the addition")]
)
def test_parts_that_are_not_separable_are_named(tmp_path: Path, family: str, words: str) -> None:
    got = deepen.score(planted(tmp_path / "model", family), "contribution", text=TEXT[:64], context=CONTEXT)
    assert list(got.columns) == ["contribution", "contribution.cosine"]
    assert words in got.notes["contribution"]


@pytest.mark.parametrize("family", ["gpt_neox", "mamba", "qwen3_moe", "opt"])
def test_other_families(tmp_path: Path, family: str) -> None:
    got = deepen.score(planted(tmp_path / "model", family), text=TEXT[:96], context=32)
    assert all(np.isfinite(column.values).any() for column in got.columns.values())
    assert {row.layer for row in got.rows} == {str(at) for at in range(len(got.rows))}


def test_half_precision_is_close(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model")
    full, half = (
        deepen.score(ck, "block_influence", "contribution", text=TEXT[:96], context=CONTEXT, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert not half.notes
    for name in ("block_influence", "contribution", "contribution.a", "contribution.f"):
        np.testing.assert_allclose(half.columns[name].values, full.columns[name].values, rtol=0.1, atol=0.02)


def test_a_stream_that_overflows_is_refused(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model")
    model = ck.load()
    with torch.no_grad():
        model.base_model.embed_tokens.weight[:, 0] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    ck.tokenizer().save_pretrained(tmp_path / "broken")
    with pytest.raises(DataError, match="not finite"):
        deepen.score(deepen.open(tmp_path / "broken"), text=TEXT[:64], context=CONTEXT)


def test_an_unknown_score_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'angular'"):
        deepen.score(planted(tmp_path / "model"), "angluar", text=TEXT, context=CONTEXT)


def test_progress_counts_every_window(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    got = deepen.score(
        planted(tmp_path / "model"), "angular", text=TEXT[:100], context=CONTEXT, batch=2,
        progress=lambda count, total: calls.append((count, total)),
    )  # fmt: skip
    assert sum(count for count, _ in calls) == got.windows == 7
    assert {total for _, total in calls} == {7}
