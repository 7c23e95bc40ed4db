"""AdamW on pieces, against torch's own on whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridflow.backends.fsdp.optimizer import ShardedAdamW
from hybridflow.core.contracts.training import OptimizerConfig

CONFIG = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.05)
ONCE = {"a": 1, "b": 1}


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 3), "b": (5,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def torchs(given):
    return torch.optim.AdamW(
        given.values(),
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-3,
        weight_decay=0.05,
    )


def with_gradients(step, *models):
    """The same gradients for each."""
    generator = torch.Generator().manual_seed(step)
    for name in ("a", "b"):
        grad = torch.randn(models[0][name].shape, generator=generator)
        for model in models:
            model[name].grad = grad.clone()


def assert_alike(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_steps_are_those_of_torch_with_scaled_gradients_and_a_rate_of_their_own():
    ours, theirs = parameters(), parameters()
    optimizer, reference = ShardedAdamW(ours, ONCE, CONFIG), torchs(theirs)
    for step, (rate, scale) in enumerate([(0.1, 1.0), (0.02, 0.25), (0.3, 1.0)]):
        with_gradients(step, ours, theirs)
        optimizer.step(rate, scale)
        for parameter in theirs.values():
            parameter.grad.mul_(scale)
        reference.param_groups[0]["lr"] = rate
        reference.step()
    assert_alike(ours, theirs)
    assert ours["a"].grad is None


def test_an_element_counts_once_in_the_norm_however_many_ranks_hold_it():
    model = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(4))}
    optimizer = ShardedAdamW(model, {"a": 1, "b": 2}, CONFIG)
    assert optimizer.grad_norm(1, torch.device("cpu")) == 0.0
    model["a"].grad = torch.tensor([3.0, 4.0])
    model["b"].grad = torch.full((4,), 2.0)
    assert optimizer.grad_norm(1, torch.device("cpu")) == pytest.approx((25 + 16 / 2) ** 0.5)
    optimizer.clear()
    assert optimizer.grad_norm(1, torch.device("cpu")) == 0.0


def test_moments_that_are_written_go_on_as_if_the_steps_had_been_made():
    whole = parameters()
    optimizer = ShardedAdamW(whole, ONCE, CONFIG)
    for values in optimizer.moments()["a"].values():
        assert not values.any()
    for step in (0, 1):
        with_gradients(step, whole)
        optimizer.step(0.1, 1.0)

    again = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in whole.items()}
    other = ShardedAdamW(again, ONCE, CONFIG)
    for name, moments in optimizer.moments().items():
        for moment, values in moments.items():
            other.moments()[name][moment].copy_(values)
    other.set_step(2)
    with_gradients(2, whole, again)
    optimizer.step(0.1, 1.0)
    other.step(0.1, 1.0)
    assert_alike(again, whole)


def test_storage_that_has_moved_is_followed():
    kept, moved = parameters(), parameters()
    first, second = ShardedAdamW(kept, ONCE, CONFIG), ShardedAdamW(moved, ONCE, CONFIG)
    for step in (0, 1):
        with_gradients(step, kept, moved)
        first.step(0.1, 1.0)
        second.step(0.1, 1.0)
        old = moved["a"].detach()
        before = old.clone()
        moved["a"].data = old.clone()
        second.relink({"a": moved["a"], "frozen": nn.Parameter(torch.ones(1))})
    with_gradients(2, kept, moved)
    first.step(0.1, 1.0)
    second.step(0.1, 1.0)
    assert_alike(moved, kept)
    assert torch.equal(old, before)


def test_a_rank_that_holds_nothing_of_the_model_takes_its_steps():
    model = {"a": nn.Parameter(torch.zeros(0, 3))}
    optimizer = ShardedAdamW(model, {"a": 1}, CONFIG)
    model["a"].grad = torch.zeros(0, 3)
    assert optimizer.grad_norm(1, torch.device("cpu")) == 0.0
    optimizer.step(0.1, 0.5)
    optimizer.set_step(3)
    assert optimizer.moments() == {}
