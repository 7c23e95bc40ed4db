"""Logprobs, entropy and the largest of a vocabulary that is spread over ranks, beside one rank that has all of it."""

from __future__ import annotations

import pytest
import torch
from helpers.vocabulary_jobs import head_outputs

GENERATOR = torch.Generator().manual_seed(2)
HIDDEN, ROWS = 6, 7
NEEDS = ("logprobs", "entropy", "topk_logprobs")


def by_hand(weight, vocab, states, targets, given, temperature):
    """All of it on one rank, without padding, and the gradients of its sum."""
    weight, states = weight[:vocab].clone().requires_grad_(), states.clone().requires_grad_()
    log_p = (states @ weight.T / temperature).log_softmax(-1)
    found = {
        "logprobs": log_p.gather(-1, targets[:, None])[:, 0],
        "entropy": torch.distributions.Categorical(logits=log_p).entropy(),
        "topk_logprobs": log_p.gather(-1, given),
    }
    sum(value.sum() for value in found.values()).backward()
    return found, log_p.detach(), states.grad, weight.grad


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("vocab", "padded", "at_once"),
    [(20, 20, 10**6), (13, 16, 10**6), (5, 16, 10**6), (13, 16, 24)],
    ids=["full", "padded", "one rank has padding alone", "in pieces"],
)
def test_a_spread_head_gives_what_a_whole_one_gives(ranks, world, vocab, padded, at_once):
    weight = torch.randn(padded, HIDDEN, generator=GENERATOR)
    states = torch.randn(ROWS, HIDDEN, generator=GENERATOR)
    targets = torch.randint(0, vocab, (ROWS,), generator=GENERATOR)
    given = torch.randint(0, vocab, (ROWS, 3), generator=GENERATOR)
    want, _, of_states, of_weight = by_hand(weight, vocab, states, targets, given, 0.7)
    answers = ranks(head_outputs, world, weight, vocab, states, targets, given, NEEDS, 0.7, at_once)
    for answer in answers:
        for name in NEEDS:
            torch.testing.assert_close(answer[name], want[name].detach())
    # a rank has the gradient of its part: the transposition before the head adds them up
    torch.testing.assert_close(sum(answer["gradient of states"] for answer in answers), of_states)
    gathered = torch.cat([answer["gradient of weight"] for answer in answers])
    torch.testing.assert_close(gathered[:vocab], of_weight)
    assert not gathered[vocab:].any()


@pytest.mark.parametrize("world", [1, 2])
def test_the_largest_are_found_on_whichever_rank_they_are(ranks, world):
    vocab, weight = 5, torch.randn(8, HIDDEN, generator=GENERATOR)
    states = torch.randn(ROWS, HIDDEN, generator=GENERATOR)
    targets, given = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, 1, dtype=torch.long)
    _, log_p, _, _ = by_hand(weight, vocab, states, targets, given, 1.0)
    for count, kept in ((3, 3), (9, 5)):  # of a vocabulary of five
        want = log_p.topk(kept, -1)
        for answer in ranks(
            head_outputs,
            world,
            weight,
            vocab,
            states,
            targets,
            given,
            [f"topk:{count}"],
            1.0,
            10**6,
        ):
            assert torch.equal(answer["topk_ids"], want.indices)
            torch.testing.assert_close(answer["topk_logprobs"], want.values)
