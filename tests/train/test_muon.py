"""Muon and AdamW as one optimiser: groups, the update, and what is saved of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.train.learner import Learner
from deepen.train.muon import CpuMuon, Mixed, matrices, optimiser_of, orthogonal
from deepen.train.schedule import Scheduled

CONFIG = StackConfig(layers=2, width=16, heads=2, vocabulary=11)


@pytest.mark.parametrize("shape", [(12, 12), (8, 30), (30, 8)])
def test_the_update_is_close_to_orthogonal_and_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ found @ v.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-3


def test_the_steps_are_those_of_torch_but_for_its_half_precision() -> None:
    torch.manual_seed(1)
    one = nn.Parameter(torch.randn(12, 20))
    two = nn.Parameter(one.detach().clone())
    settings = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = CpuMuon([one], **settings), torch.optim.Muon([two], **settings)  # pyright: ignore
    start = one.detach().clone()
    for _ in range(5):
        one.grad = torch.randn(12, 20)
        two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    moved = (two - start).norm()
    assert (one - two).norm() < 0.03 * moved
    assert torch.allclose(ours.state[one]["momentum_buffer"], theirs.state[two]["momentum_buffer"], atol=1e-6)


def test_matrices_of_the_layers_go_to_muon_and_all_else_to_adamw_each_once() -> None:
    learner = Learner(Stack(CONFIG))
    mixed = optimiser_of(learner, Scheduled(optimiser="muon", weight_decay=0.1))
    assert isinstance(mixed, Mixed)
    muon = {id(each) for group in mixed.parts[1].param_groups for each in group["params"]}
    assert muon == {id(each) for each in matrices(learner)}
    names = {name for name, each in learner.stack.named_parameters() if id(each) in muon}
    assert names == {f"layers.{i}.{part}.sublayer.{name}.weight" for i in (0, 1)
                     for part, name in (("a", "qkv"), ("a", "out"), ("f", "up"), ("f", "down"))}  # fmt: skip
    every = [id(each) for group in mixed.param_groups for each in group["params"]]
    assert sorted(every) == sorted(id(each) for each in learner.parameters())
    assert all("factor" in group for group in mixed.param_groups)


def test_rates_and_states_of_the_whole_are_those_of_its_parts() -> None:
    learner = Learner(Stack(CONFIG))
    mixed = optimiser_of(learner, Scheduled(optimiser="muon"))
    still = copy.deepcopy(learner.state_dict())
    learner(torch.randint(0, 11, (2, 5))).logits.square().sum().backward()
    for group in mixed.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    mixed.step()
    assert all(torch.equal(each, still[name]) for name, each in learner.state_dict().items())
    for group in mixed.param_groups:
        group["lr"] = 0.01
    mixed.step()
    assert not any(torch.equal(each, still[name]) for name, each in learner.named_parameters())
    kinds = {name: set(mixed.state[each]) for name, each in learner.stack.named_parameters()}
    assert kinds["embedding.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    assert kinds["layers.0.f.sublayer.up.weight"] == {"momentum_buffer"}
