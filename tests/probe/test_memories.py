"""Feed-forwards read as memories, on neurons that were planted and against the feed-forward written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.errors import FamilyError, UsageError
from deepen.probe.memories import contributions, memories
from deepen.probe.scores.memory import firing
from deepen.probe.scores.reading import Reading, open_reading
from tests.cli.models import TEXT, tokenizer
from tests.probe.scores.planted import CONTEXT, planted
from tests.probe.scores.test_memory import speaking

pytestmark = pytest.mark.method("key-value-memories")


def reading_of(ck: deepen.Checkpoint, batch: int = 1) -> Reading:
    return open_reading(ck, TEXT[:96], tower="", context=CONTEXT, tokens=None, batch=batch, device="cpu", dtype=None)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> deepen.Checkpoint:
    return speaking(tmp_path_factory.mktemp("memories") / "gpt2")


def test_the_planted_neuron_is_found(gpt2: deepen.Checkpoint) -> None:
    read, other = memories(reading_of(gpt2), [3, 1], neurons=3, top=2)
    assert (read.visit, read.layer, other.visit) == (3, "3", 1)
    first, *others = read.neurons
    assert (first.visit, first.neuron) == (3, 7)
    assert first.speaks[0] == "k"
    assert len(first.fires) == 2
    assert first.fires[0][1] >= first.fires[1][1] > 30
    for text, _ in first.fires:
        assert text in TEXT
        assert len(text) <= 8
    if first.follows is not None:
        assert first.fires[0][0] + first.follows in TEXT
    assert [each.neuron for each in others] != [7, 7]
    (again,) = memories(reading_of(gpt2, batch=4), [3], neurons=3, top=2)
    assert [(each.neuron, each.speaks) for each in again.neurons] == [(e.neuron, e.speaks) for e in read.neurons]
    assert (again.active, again.compared, again.agreement) == (read.active, read.compared, read.agreement)
    assert again.effective == pytest.approx(read.effective)


def written_out(
    ck: deepen.Checkpoint, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Coefficients [b, t, m], values [m, d], what was written [b, t, d], the model and the ids of a text."""
    model: Any = ck.load()
    ids = torch.tensor(tokenizer()(TEXT[:96]).input_ids).reshape(-1, CONTEXT)
    kept: dict[str, torch.Tensor] = {}
    block = model.transformer.h[index].layer.mlp
    block.c_proj.register_forward_pre_hook(lambda module, args: kept.update(m=args[0]))
    block.register_forward_hook(lambda module, args, out: kept.update(y=out))
    with torch.no_grad():
        model(ids)
    return kept["m"], block.c_proj.weight.detach().clone(), kept["y"], model, ids


def test_contributions_sum_to_the_output_and_each_is_its_own(gpt2: deepen.Checkpoint) -> None:
    m, values, y, model, ids = written_out(gpt2, 2)
    block = model.transformer.h[2].layer.mlp
    parts = contributions(m, values)
    assert parts.shape == (*m.shape, values.shape[1])
    assert torch.allclose(parts.sum(-2) + block.c_proj.bias, y, atol=1e-5)
    kept: list[torch.Tensor] = []
    block.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad():
        block.c_proj.weight[5] = 0
        model(ids)
    assert torch.allclose(kept[0], y - parts[..., 5, :], atol=1e-5)
    # What the probe sees is what the feed-forward computes; keys read the wrong way round give other coefficients,
    # also where a feed-forward is as wide as the stream.
    reading = reading_of(gpt2, batch=6)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with torch.inference_mode(), firing(reading, lambda at, m, v: seen.update({at: (m, v)})):
        for group, _ in reading.groups():
            reading.run(group)
    assert torch.allclose(seen[2][0], m, atol=1e-5)
    assert torch.equal(seen[2][1], values)
    square = torch.randn(32, 32)
    assert not torch.allclose(contributions(m[..., :32], square), contributions(m[..., :32], square.T))


def test_counts_and_agreement_are_their_formulas(gpt2: deepen.Checkpoint) -> None:
    m, values, _, model, ids = written_out(gpt2, 3)
    (read,) = memories(reading_of(gpt2), [3])
    size = m.abs() * values.norm(dim=-1)
    assert read.count == m.shape[-1] == 128
    assert read.active == pytest.approx((m != 0).float().sum(-1).mean().item())
    effective = size.sum(-1).square() / size.square().sum(-1)
    assert read.effective == pytest.approx(effective.mean().item(), rel=1e-4)
    assert 1 <= read.effective < read.count
    same = compared = 0
    for neuron in range(128):
        window, at = divmod(int(m[..., neuron].abs().flatten().argmax()), CONTEXT)
        if at + 1 == CONTEXT:
            continue
        spoken = (model.lm_head.weight @ (m[window, at, neuron].sign() * values[neuron])).argmax()
        same += int(spoken == ids[window, at + 1])
        compared += 1
    assert read.compared == compared > 100
    assert read.agreement == pytest.approx(same / compared)


def test_memories_that_say_what_follows_agree(tmp_path: Path) -> None:
    """A letter is written by a neuron that speaks for the one behind it in the text, or for another letter."""
    agreements = []
    for right in (True, False):
        ck = speaking(tmp_path / f"{right}")
        m, _, _, model, ids = written_out(ck, 2)
        places = m.abs().flatten(0, 1).argmax(0).tolist()
        with torch.no_grad():
            for neuron, place in enumerate(places):
                window, at = divmod(place, CONTEXT)
                after = ids[window, min(at + 1, CONTEXT - 1)]
                row = model.lm_head.weight[after if right else (after + 1) % len(model.lm_head.weight)]
                sign = m[window, at, neuron].sign()
                model.transformer.h[2].layer.mlp.c_proj.weight[neuron] = 1e-4 * sign * row
        reading = reading_of(ck)
        reading.model.load_state_dict(model.state_dict())
        (read,) = memories(reading, [2])
        agreements.append(read.agreement)
    assert agreements[1] is not None
    assert agreements[0] is not None
    assert agreements[0] > agreements[1] + 0.3


def test_relu_memories_are_few(tmp_path: Path) -> None:
    from deepen.checkpoint.tiny import tiny_model

    model = tiny_model("gpt2", activation_function="relu")
    model.save_pretrained(tmp_path / "relu")
    tokenizer().save_pretrained(tmp_path / "relu")
    (read,) = memories(reading_of(deepen.open(tmp_path / "relu")), [1])
    m, *_ = written_out(deepen.open(tmp_path / "relu"), 1)
    assert read.active == pytest.approx((m > 0).float().sum(-1).mean().item())
    assert read.active < 0.8 * read.count


def test_models_without_such_memories(tmp_path: Path) -> None:
    mixture = planted(tmp_path / "mixture", "mixtral")
    with pytest.raises(FamilyError, match="visit 1 has no feed-forward"):
        memories(reading_of(mixture), [1])
    with pytest.raises(FamilyError, match="no causal head"):
        memories(reading_of(planted(tmp_path / "bert", "bert")), [1])
    with pytest.raises(UsageError, match="visit 6 does not exist; the program has 6: 0-5"):
        memories(reading_of(planted(tmp_path / "model")), [0, 6])
