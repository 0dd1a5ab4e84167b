"""Stacks that read images and series and give classes, with any wiring and program."""

from __future__ import annotations

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.heads import Patches, Pieces
from deepen.stack.stack import Stack

IMAGE = {"input": "patches", "image": [2, 6, 4], "patch": 2, "output": "classes", "classes": 3, "causal": False}
SERIES = {"input": "series", "channels": 2, "patch": 3, "output": "classes", "classes": 3, "causal": False}
BODY = {"layers": 3, "width": 16, "heads": 2}


def test_a_patch_is_a_square_of_the_image_and_patches_go_row_by_row() -> None:
    image = torch.randn(2, 2, 6, 4)
    patches = Patches((2, 6, 4), 2, 5)
    found = patches(image)
    assert found.shape == (2, 6, 5)
    for place, (row, column) in enumerate((row, column) for row in range(3) for column in range(2)):
        square = image[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
        assert torch.allclose(found[:, place], square @ patches.weight.T, atol=1e-6)
    with pytest.raises(UsageError, match=r"images of \(2, 6, 4\), got \(2, 4, 6\)"):
        patches(image.transpose(2, 3))


def test_a_piece_has_all_channels_and_the_last_one_ends_with_zeros() -> None:
    series = torch.randn(2, 2, 7)
    pieces = Pieces(2, 3, 5)
    found = pieces(series)
    assert found.shape == (2, 3, 5)
    whole = torch.cat([series, torch.zeros(2, 2, 2)], 2)
    for place in range(3):
        assert torch.allclose(
            found[:, place], whole[:, :, 3 * place : 3 * place + 3].flatten(1) @ pieces.weight.T, atol=1e-6
        )
    with pytest.raises(UsageError, match="series of 2 channels"):
        pieces(series[:, :1])


@pytest.mark.parametrize("wiring", ["pre-ln", {"name": "hyper-connections", "streams": 2}, "deepnorm"])
@pytest.mark.parametrize("program", ["0-2", "0 (1)*2 2", "0 {1|2}"])
@pytest.mark.parametrize("ends", [IMAGE, SERIES], ids=["images", "series"])
def test_classes_under_wirings_and_programs(
    wiring: str | dict[str, object], program: str, ends: dict[str, object]
) -> None:
    stack = Stack(StackConfig.read({**BODY, **ends, "wiring": wiring, "program": program}), seed=1)
    inputs = torch.randn(4, 2, 6, 4) if ends is IMAGE else torch.randn(4, 2, 7)
    logits = stack(inputs).logits
    assert logits.shape == (4, 3)
    assert torch.allclose(stack(inputs[1:2]).logits, logits[1:2], atol=1e-5)
    logits.square().sum().backward()
    assert stack.embedding.weight.grad.abs().sum() > 0
    assert stack.head.weight.grad.abs().sum() > 0


def test_classes_are_read_from_the_mean_or_the_last_position() -> None:
    inputs = torch.randn(4, 2, 7)
    for pool in ("mean", "last"):
        stack = Stack(StackConfig.read({**BODY, **SERIES, "pool": pool, "causal": True}), seed=1)
        result = stack(inputs)
        read = result.stream.mean(1) if pool == "mean" else result.stream[:, -1]
        assert torch.allclose(result.logits, read @ stack.head.weight.T, atol=1e-6)
    with pytest.raises(UsageError, match="takes no cache"):
        stack(inputs, cache=stack.new_cache())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, "needs image"),
        ({"patch": 4}, "no whole patches of 4"),
        ({"classes": None}, "needs the number of classes"),
        ({"tied": True}, "tied is about tokens"),
        ({"output": "tokens", "classes": None}, "has no tokens to predict"),
        ({"positions": "learned", "context": 5}, "6 patches, more than a context of 5"),
        ({"patch": 0}, "patch"),
    ],
)
def test_ends_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StackConfig.read({**BODY, **IMAGE, **changes})


def test_ids_can_be_classified_and_a_configuration_comes_back_from_its_fields() -> None:
    config = StackConfig.read({**BODY, "output": "classes", "classes": 4, "vocabulary": 9})
    assert not config.tied
    assert StackConfig.read(config.model_dump(mode="json")) == config
    assert Stack(config)(torch.randint(0, 9, (2, 5))).logits.shape == (2, 4)
    assert StackConfig.read(BODY).tied
