"""The dynamic programme over segments, its transformer analogue, and exact merges of convolutions."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.errors import ProgramError, UsageError
from deepen.surgery.convolutions import fold_norm, fold_skip, merge_convs
from deepen.surgery.layermerge import Segment, best_segments
from tests.surgery.cases import checkpoint, layer, off, outputs, silence


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    def plant(model: Any) -> None:
        silence(layer(model, 1), "self_attn.o_proj", "mlp.down_proj")

    return checkpoint(tmp_path_factory.mktemp("layermerge") / "llama", "llama", plant)


def covers(segments: list[Segment], length: int) -> list[tuple[Segment, ...]]:
    """Every choice of segments that covers the places, by trying all."""
    found: list[tuple[Segment, ...]] = []

    def extend(chosen: tuple[Segment, ...], at: int) -> None:
        if at == length:
            found.append(chosen)
        for each in segments:
            if each.start == at:
                extend((*chosen, each), each.end)

    extend((), 0)
    return found


@pytest.mark.method("layer-merge")
@pytest.mark.parametrize("length", [1, 2, 4, 6, 8])
def test_the_programme_is_as_good_as_trying_everything(length: int) -> None:
    draw = random.Random(length)
    for _ in range(20):
        segments = [
            Segment(start=start, end=end, way=f"{way}", time=draw.randint(0, 9), gain=round(draw.uniform(-2, 2), 2))
            for start, end in itertools.combinations(range(length + 1), 2)
            if end - start <= 3
            for way in range(2)
        ]
        choices = covers(segments, length)
        least = min(sum(each.time for each in choice) for choice in choices)
        for budget in (least, least + 3, 9 * length):
            fitting = [choice for choice in choices if sum(each.time for each in choice) <= budget]
            best = max(round(sum(each.gain for each in choice), 7) for choice in fitting)
            found = best_segments(segments, length, budget)
            assert (found[0].start, found[-1].end) == (0, length)
            assert all(one.end == two.start for one, two in itertools.pairwise(found))
            assert sum(each.time for each in found) <= budget
            assert sum(each.gain for each in found) == pytest.approx(best, abs=1e-6)
            shortest = min(sum(each.time for each in choice) for choice in fitting
                           if round(sum(each.gain for each in choice), 7) == best)  # fmt: skip
            assert sum(each.time for each in found) == shortest
        with pytest.raises(UsageError, match=f"no segments fit a budget of {least - 1}: the least time is {least}"):
            best_segments(segments, length, least - 1)


def test_places_that_nothing_covers_are_told() -> None:
    only = [Segment(start=0, end=1, way="keep", time=1, gain=0.0)]
    with pytest.raises(UsageError, match="no choice covers every place"):
        best_segments(only, 2, 5)
    with pytest.raises(UsageError, match="expected places within 0 to 2"):
        best_segments([Segment(start=1, end=4, way="keep", time=1, gain=0.0)], 2, 5)


@pytest.mark.slow
def test_a_layer_that_adds_nothing_goes_first(llama: Checkpoint) -> None:
    before = outputs(llama)

    def gain(ck: Checkpoint) -> float:
        return -(outputs(ck) - before).square().mean().item()

    whole, told = deepen.layer_merge(llama, gain, budget=1.0, longest=1)
    assert (told.figures["gain"], str(whole.program)) == (0, "0 2-5")
    small, told = deepen.layer_merge(llama, gain, budget=5 / 6, longest=3)
    assert (told.note, str(small.program)) == ("drop 1", "0 2-5")
    assert told.figures["cost"] == pytest.approx(5 / 6)
    assert off(outputs(small), before) < 1e-6


def test_runs_are_fused_where_that_is_worth_more_than_dropping(llama: Checkpoint) -> None:
    calls: list[str] = []

    def gain(ck: Checkpoint) -> float:
        calls.append(str(ck.program))
        fused = sum(key.layer >= 6 for key in ck.plan().keys)
        return -0.1 * fused - 1.0 * (6 - len(ck.plan().keys) - fused)

    small, told = deepen.layer_merge(llama, gain, budget=0.9, longest=2)
    assert sum("6" in call for call in calls) == 5
    assert told.note.startswith("fuse ")
    assert told.merged.keys() == {key.layer for key in small.plan().keys if key.layer >= 6}
    assert told.figures["cost"] <= 0.9 + 1e-3
    run = next(iter(told.merged.values()))
    alone, _ = deepen.fuse(llama, run[0], run[-1], mixer=True)
    if len(told.merged) == 1:
        assert torch.equal(outputs(small), outputs(alone))
    assert outputs(small).isfinite().all()


def test_a_measured_cost_may_stand_for_flops(llama: Checkpoint) -> None:
    seconds = {0: 5.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}

    def cost(ck: Checkpoint) -> float:
        return 2.0 + sum(seconds.get(key.layer, 9.0) for key in ck.plan().keys)

    small, told = deepen.layer_merge(llama, lambda ck: float(len(ck.plan().keys)), budget=0.5, longest=1, cost=cost)
    assert str(small.program) == "1-5"
    assert told.figures["cost"] == pytest.approx(0.5)


def worth(ck: Checkpoint) -> float:
    """Every checkpoint is worth the same."""
    return 1.0


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.layer_merge(ck, worth, budget=0), UsageError, "the budget is a share above 0"),
        (lambda ck: deepen.layer_merge(ck, worth, longest=0), UsageError, "at least 1 layer"),
        (lambda ck: deepen.layer_merge(ck.apply("0-4 5.f"), worth), UsageError, "layer 5 is visited in part"),
        (lambda ck: deepen.layer_merge(ck.apply("0 (1-2)*2 3-5"), worth), ProgramError, "not a plain list"),
        (lambda ck: deepen.layer_merge(ck.apply("0-2 1"), worth), ProgramError, "layer 1 is visited at 2 places"),
        (lambda ck: deepen.layer_merge(ck, lambda each: float("nan")), UsageError, "gain of a checkpoint is nan"),
        (lambda ck: deepen.layer_merge(ck, worth, cost=lambda each: 1.0), UsageError, "does not lower the cost"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)


def conv(into: int, out: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(into, out, **options).double()


def padded(convolution: nn.Conv2d, padding: Any) -> nn.Conv2d:
    made = conv(convolution.in_channels, convolution.out_channels, kernel_size=convolution.kernel_size,
                stride=convolution.stride, padding=padding, dilation=convolution.dilation, groups=convolution.groups,
                bias=convolution.bias is not None)  # fmt: skip
    made.load_state_dict(convolution.state_dict())
    return made


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "padding": 1}),
        ({"kernel_size": 5, "padding": 2, "stride": 2}, {"kernel_size": 3, "padding": 1, "stride": 2}),
        ({"kernel_size": 3, "groups": 2, "bias": False}, {"kernel_size": 1, "groups": 2}),
        ({"kernel_size": (1, 3), "padding": (0, 1)}, {"kernel_size": (3, 1), "dilation": 2, "bias": False}),
        ({"kernel_size": 3, "dilation": 2, "bias": False}, {"kernel_size": 3, "padding": 2, "bias": False}),
    ],
    ids=["same", "strides", "groups", "sides", "dilation"],
)
def test_two_convolutions_are_one(one: dict[str, Any], two: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first, second = conv(4, 8, **one), conv(8, 6, **two)
    merged = merge_convs(first, second)
    image = torch.randn(2, 4, 31, 28, dtype=torch.float64)
    with torch.no_grad():
        found, before = merged(image), second(first(image))
        steps = (first.stride[0], first.stride[1])
        pads = tuple(int(a) + s * int(b) for a, s, b in zip(first.padding, steps, second.padding, strict=True))
        moved = padded(second, 0)(padded(first, pads)(image))
    assert found.shape == before.shape
    assert (found - moved).abs().max() < 1e-12
    edge = (slice(None), slice(None), slice(2, -2), slice(2, -2))
    assert (found[edge] - before[edge]).abs().max() < 1e-12
    if any(int(pad) for pad in second.padding) and first.bias is not None:
        assert (found - before).abs().max() > 1e-3


def test_a_convolution_that_does_nothing_merges_to_no_change() -> None:
    torch.manual_seed(0)
    first, nothing = conv(3, 5, kernel_size=3, padding=1), conv(5, 5, kernel_size=1, bias=False)
    with torch.no_grad():
        nothing.weight.copy_(torch.eye(5)[:, :, None, None])
    merged = merge_convs(first, nothing)
    assert torch.equal(merged.weight, first.weight)
    assert merged.bias is not None
    assert first.bias is not None
    assert torch.equal(merged.bias, first.bias)
    assert merged.padding == (1, 1)


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_and_a_skip_are_folded(affine: bool) -> None:
    torch.manual_seed(0)
    convolution = conv(6, 6, kernel_size=3, padding=1, groups=3, bias=affine)
    norm = nn.BatchNorm2d(6, eps=0.1, affine=affine).double().train()
    image = torch.randn(4, 6, 9, 9, dtype=torch.float64)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        norm(3 * convolution(image) + 1)
        norm.eval()
        assert (fold_norm(convolution, norm)(image) - norm(convolution(image))).abs().max() < 1e-12
        assert (fold_skip(convolution)(image) - convolution(image) - image).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: merge_convs(conv(3, 4, kernel_size=1), conv(5, 6, kernel_size=1)), "gives 4 channels .* reads 5"),
        (lambda: merge_convs(conv(3, 4, kernel_size=3, padding="same"), conv(4, 6, kernel_size=1)), "'same' of zeros"),
        (lambda: merge_convs(conv(3, 4, kernel_size=3, padding=1, padding_mode="reflect"), conv(4, 4, kernel_size=1)),
         "of reflect cannot be merged"),
        (lambda: fold_norm(conv(3, 4, kernel_size=1), nn.BatchNorm2d(5)), "gives 4 channels, the norm has 5"),
        (lambda: fold_norm(conv(3, 4, kernel_size=1), nn.BatchNorm2d(4, track_running_stats=False)), "no running"),
        (lambda: fold_skip(conv(4, 4, kernel_size=3, stride=2, padding=1)), "an output of its own shape"),
        (lambda: fold_skip(conv(4, 4, kernel_size=2, padding=1)), "a kernel of 2 x 2 has no middle"),
    ],
)  # fmt: skip
def test_convolutions_that_cannot_be_merged_are_refused(call: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        call()
