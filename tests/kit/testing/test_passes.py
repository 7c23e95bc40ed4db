"""Forwards and backwards through the contract: gradients by differences, by AdamW, and by FSDP."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
import torch.distributed as dist
from helpers.faulty_backends import builder

from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.kit.testing.models import Sequences, reference
from hybridflow.kit.testing.passes import (
    Passes,
    gradients,
    memoryless,
    one_rank,
    optimizer_step,
    whole_weights,
)

LENGTHS = ((3, 4), (1, 2), (2, 0))


@pytest.fixture
def build():
    with builder() as build:
        yield build


def passes_of(backend=None, temperature=1.0):
    return Passes(backend, Sequences.random(LENGTHS, seed=4), temperature, seed=4)


def test_one_rank_has_a_group_while_it_lasts_and_keeps_one_that_is_there():
    assert not dist.is_initialized()
    with one_rank(role="critic") as outer:
        assert (outer.role, outer.rank, dist.get_world_size()) == ("critic", 0, 1)
        with one_rank() as inner:
            assert inner.generation is not None
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_step_without_memory_moves_each_weight_by_a_function_of_its_gradient():
    config = memoryless(lr=2.0)
    weights = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    adamw = torch.optim.AdamW(
        [weights],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for _ in range(2):
        before = weights.detach().clone()
        gradient = torch.tensor([500.0, -1000.0, 0.0])
        weights.grad = gradient
        adamw.step()
        moved = before - weights.detach()
        assert moved.tolist() == pytest.approx([2 * 500 / 1500, -2 * 1000 / 2000, 0], rel=1e-5)
    assert config.max_grad_norm == 0


def total_loss(ref, passes):
    """The weighted sum of logprobs."""
    total = 0.0
    for row, weights in enumerate(passes.weights):
        logprobs = passes.expected(ref, row)["logprobs"]
        total += float((weights.double() * logprobs.double()).sum())
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_expected_gradients_are_differences_of_the_loss(temperature):
    original = reference("llama")
    mine = copy.deepcopy(original.model)
    ref = attrs.evolve(original, model=mine)
    passes = passes_of(temperature=temperature)
    found = passes.expected_gradients(ref, ["logprobs"])
    named = dict(mine.named_parameters())
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        at = int(found[name].abs().argmax())
        entry = named[name].data.view(-1)[at]
        step = 1e-2
        kept = float(entry)
        entry.fill_(kept + step)
        above = total_loss(ref, passes)
        entry.fill_(kept - step)
        below = total_loss(ref, passes)
        entry.fill_(kept)
        slope = (above - below) / (2 * step)
        assert float(found[name].view(-1)[at]) == pytest.approx(slope, rel=0.05)
    assert all(p.grad is None for p in mine.parameters())


def test_gradients_read_off_a_step_are_those_that_the_backend_holds(build):
    ref = reference("qwen2")
    held = passes_of(build(ref.spec, memoryless()))
    held.backward(["logprobs"])
    expected = {name: p.grad for name, p in held.backend.parameters.items()}
    split = passes_of(build(ref.spec, memoryless()))
    found = gradients(split, ["logprobs"], [[2], [0, 1]], dummies=1)
    assert set(found) == set(ref.parameters)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], atol=2e-3 * largest)
    twice = gradients(passes_of(build(ref.spec, memoryless())), ["logprobs"], times=2)
    name = "model.norm.weight"
    assert torch.allclose(twice[name], 2 * expected[name], atol=2e-3 * largest)


def test_outputs_are_given_row_by_row_without_padding_whatever_the_plan(build):
    ref = reference("qwen2")
    passes = passes_of(build(ref.spec))
    found = passes.outputs(["logprobs"], plan=[[2, 0], [1]], dummies=2)["logprobs"]
    assert [len(row) for row in found] == [4, 2, 0]
    for row, logprobs in enumerate(found):
        assert torch.allclose(logprobs, passes.expected(ref, row)["logprobs"], atol=1e-4)


def test_given_tokens_come_with_the_rows(build):
    ref = reference("qwen2")
    rows = Sequences.random(LENGTHS, seed=4)
    topk_ids = [torch.arange(2).expand(len(row), 2) for row in rows.responses]
    passes = Passes(build(ref.spec), rows, topk_ids=topk_ids)
    found = passes.outputs(["topk_logprobs"], [[1], [0, 2]])["topk_logprobs"]
    for row in range(len(rows)):
        expected = passes.expected(ref, row)["log_softmax"][:, :2]
        assert torch.allclose(found[row], expected, atol=1e-4)


def test_a_backward_notes_the_micro_batches_whose_loss_was_asked_for(build):
    passes = passes_of(build(reference("qwen2").spec, memoryless()))
    passes.backward(["logprobs"], plan=[[0], [1, 2]], dummies=2)
    assert sorted(passes.called) == [0, 1, 2, 3]


def test_scores_weigh_rows_by_their_number():
    """(1 * a + 2 * b + 3 * c) / 3 of three rows; the gradient of a head is its input."""
    ref = reference("qwen2", "score")
    passes = passes_of()
    found = passes.expected_gradients(ref, ["scores"])["score.weight"]
    hidden = torch.zeros(ref.parameters["score.weight"].shape)
    for row in range(3):
        ids = torch.cat([passes.rows.prompts[row], passes.rows.responses[row]])
        with torch.no_grad():
            last = ref.model.base_model(input_ids=ids[None]).last_hidden_state[:, -1]
        hidden += (row + 1) / 3 * last
    assert torch.allclose(found, hidden, atol=1e-4)


def test_the_twins_step_is_clipped_decayed_and_scheduled():
    """With betas 0 AdamW moves a weight by lr * g / (|g| + eps) and decays it by lr * decay."""
    ref = reference("llama")
    passes = passes_of()
    config = OptimizerConfig(
        lr=0.1,
        betas=(0.0, 0.0),
        eps=0.5,
        weight_decay=0.2,
        max_grad_norm=0.25,
        warmup_steps=4,
    )
    raw = passes.expected_gradients(ref, ["logprobs"])
    norm = sum(float(gradient.double().square().sum()) for gradient in raw.values()) ** 0.5
    assert norm > 0.25
    step = optimizer_step(ref, config)
    found_norm, weights = step(passes, ["logprobs"], 1)
    assert found_norm == pytest.approx(norm, rel=1e-4)
    lr = 0.1 * 2 / 4
    for name, before in ref.parameters.items():
        clipped = raw[name] * 0.25 / norm
        expected = before * (1 - lr * 0.2) - lr * clipped / (clipped.abs() + 0.5)
        assert torch.allclose(weights[name], expected, atol=1e-5)
    untouched = dict(ref.model.named_parameters())
    assert all(torch.equal(untouched[name], before) for name, before in ref.parameters.items())


def test_whole_weights_are_copies(build):
    backend = build(reference("qwen2").spec)
    found = whole_weights(backend)
    for weights in found.values():
        weights.zero_()
    assert all(bool(p.any()) for _, p in backend.full_parameters())
