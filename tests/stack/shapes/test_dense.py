"""DenseNet and DC-Bi-LSTM: published counts, growth, old channels kept, and gradients at depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.shapes.dc_bilstm import DCBiLSTM, DCBiLSTMConfig
from deepen.stack.shapes.densenet import DenseBlock, DenseNet, DenseNetConfig


@pytest.mark.method("densenet")
def test_densenet_121_has_the_published_count() -> None:
    config = DenseNetConfig(growth=32, width=64, stem="large", classes=1000)
    assert (config.entries, config.exits) == ((64, 128, 256, 512), (256, 512, 1024, 1024))
    assert config.parameters == 7_978_856
    model = DenseNet(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_978_856
    names = set(model.state_dict())
    assert {"features.conv0.weight", "features.norm0.bias", "features.denseblock4.denselayer16.conv2.weight"} <= names
    assert {"features.transition3.norm.weight", "features.norm5.running_var", "classifier.bias"} <= names


@pytest.mark.method("densenet")
def test_a_layer_reads_all_channels_before_it_and_leaves_them_as_they_are() -> None:
    block = DenseBlock(5, 4, 3, bottleneck=True)
    x = torch.randn(2, 5, 6, 6)
    y = block(x)
    assert y.shape == (2, 5 + 4 * 3, 6, 6)
    assert torch.equal(y[:, :5], x)
    assert [layer.conv1.in_channels for layer in block.children()] == [5, 8, 11, 14]
    # the second layer reads what the first has added
    nn.init.zeros_(block.denselayer1.conv2.weight)
    changed = block(x)
    assert not changed[:, 5:8].any()
    assert not torch.equal(changed[:, 8:11], y[:, 8:11])


@pytest.mark.method("densenet")
def test_a_compression_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a compression of 0\.01 leaves no channels"):
        DenseNetConfig.read({"compression": 0.01})
    with pytest.raises(UsageError, match=r"every block needs a layer, got \(2, 0\)"):
        DenseNetConfig.read({"blocks": (2, 0)})


@pytest.mark.method("dc-bi-lstm")
def test_each_layer_reads_the_words_and_all_layers_before() -> None:
    config = DCBiLSTMConfig(vocabulary=9, width=6, layers=4, units=3, last=7)
    assert [reads for reads, _ in config.plan] == [6 + 2 * 3 * layer for layer in range(4)]
    model = DCBiLSTM(config)
    assert [layer.input_size for layer in model.layers] == [6, 12, 18, 24]
    e = model.embedding(torch.tensor([[1, 2, 3, 4]]))
    h = [e]
    for layer in model.layers:
        h.append(layer(torch.cat(h, dim=-1))[0])
    expected = model.head(h[-1].mean(dim=1))
    assert torch.allclose(model(torch.tensor([[1, 2, 3, 4]])), expected, atol=1e-6)


@pytest.mark.method("dc-bi-lstm")
def test_places_after_the_end_are_not_read() -> None:
    model = DCBiLSTM(DCBiLSTMConfig(vocabulary=9, width=4, layers=3, units=3, last=5))
    tokens = torch.tensor([[1, 2, 3, 7, 7], [4, 5, 6, 7, 8]])
    both = model(tokens, torch.tensor([3, 5]))
    assert torch.allclose(both[:1], model(tokens[:1, :3]), atol=1e-6)
    assert torch.allclose(both[1:], model(tokens[1:]), atol=1e-6)
    for lengths in ([0, 5], [3, 6]):
        with pytest.raises(UsageError, match="tokens in 5 places; expected 1 to 5"):
            model(tokens, torch.tensor(lengths))


@pytest.mark.method("dc-bi-lstm")
def test_at_depth_20_the_first_layer_learns_where_the_plain_stack_does_not() -> None:
    sizes = {}
    for dense in (True, False):
        model = DCBiLSTM(DCBiLSTMConfig(vocabulary=20, width=16, layers=20, units=8, last=8, dense=dense))
        tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(1))
        nn.functional.cross_entropy(model(tokens), torch.tensor([0, 1, 0, 1])).backward()
        gradient = model.layers[0].weight_hh_l0.grad
        sizes[dense] = float(gradient.norm())
    assert sizes[True] > 1000 * sizes[False] > 0


def answers(dense: bool) -> float:
    """The share of right answers, after 50 steps, to whether a sentence has more words 0 than words 1."""
    generator = torch.Generator().manual_seed(0)
    model = DCBiLSTM(DCBiLSTMConfig(vocabulary=8, width=16, layers=15, units=8, last=16, dense=dense))
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    share = 0.0
    for batch in [32] * 50 + [256]:
        words = torch.randint(0, 8, (batch, 8), generator=generator)
        more = ((words == 0).sum(1) > (words == 1).sum(1)).long()
        logits = model(words)
        share = float((logits.argmax(-1) == more).float().mean())
        optimiser.zero_grad()
        nn.functional.cross_entropy(logits, more).backward()
        optimiser.step()
    return share


@pytest.mark.slow
@pytest.mark.method("dc-bi-lstm")
def test_15_layers_learn_where_the_plain_stack_answers_the_same_to_all() -> None:
    assert answers(dense=True) > 0.95
    assert answers(dense=False) < 0.75
