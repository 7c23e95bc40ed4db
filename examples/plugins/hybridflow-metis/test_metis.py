"""METIS: by hand, under hybridflow's kit, and what it trains on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hybridflow_metis import (
    METIS,
    JudgementLoss,
    METISConfig,
    judgement,
    judgement_rewards,
    variances,
)

from hybridflow.kit.testing import AlgorithmConformance, LossConformance, TinyRun
from hybridflow.kit.testing.runs import MODEL

TEXTS = {"instruction": "", "example": "{prompt}{variance:.2f}?", "question": "{prompt}?"}
"""Of a language of digits."""
TABLES = {
    "tokenizer": {"characters": "0123456789+=.?"},
    "data": {"max_prompt_tokens": 48},
    "actor": {"model": {"config": {**MODEL, "vocab_size": 20, "max_position_embeddings": 64}}},
}


def metis(**settings) -> METIS:
    return METIS(METISConfig(**{"prompts_per_step": 4, "group_size": 4, **TEXTS, **settings}))


class TestMETIS(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return metis(mini_batch_size=8, correction="truncate")

    def tables(self):
        return TABLES


class TestJudgementLoss(LossConformance):
    @pytest.fixture
    def losses(self):
        return {"actor": JudgementLoss(METISConfig())}


def test_a_judgement_is_the_last_number():
    assert judgement("hard, 3 steps: 0.2.") == 0.2
    assert judgement(".13") == 0.13
    assert judgement("7") == 0.25  # more than a variance of rewards in [0, 1] can be
    assert math.isnan(judgement("I cannot say"))


def test_variances_are_those_of_the_population_and_leave_failed_rewards_out():
    found = variances(
        np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [1, 0, math.nan, math.nan], [math.nan] * 4])
    )
    np.testing.assert_allclose(found, [3 / 16, 0.0, 0.25, math.nan])


def test_a_judgement_is_rewarded_by_its_distance():
    found = judgement_rewards(
        np.array([0.25, 0.0, 0.1, math.nan, 0.1]), np.array([0.25, 0.25, 0.15, 0.1, math.nan])
    )
    # 1 - 0, 1 - 1, 1 - 0.2^2, and what cannot be read is as wrong as can be
    np.testing.assert_allclose(found, [1.0, 0.0, 0.96, 0.0, math.nan])


def test_rewards_are_compared_with_their_moving_average():
    algorithm = metis(decay=0.5)
    np.testing.assert_allclose(algorithm.compared(np.array([1.0, 0.0, math.nan])), [0.5, -0.5, 0.0])
    assert algorithm.baseline == 0.5
    np.testing.assert_allclose(algorithm.compared(np.array([1.0, 1.0])), [0.5, 0.5])
    assert algorithm.baseline == 0.75
    assert not algorithm.compared(np.array([math.nan])).any() and algorithm.baseline == 0.75


def test_the_last_prompts_are_shown_with_their_variances():
    algorithm = metis(examples=2)
    algorithm.remember(["1+1=", "2+2=", "3+3="], np.array([0.25, 0.0, math.nan]))
    algorithm.remember(["4+4="], np.array([0.1]))
    assert algorithm.asked("9+9=") == "2+2=0.00?4+4=0.10?9+9=?"
    assert metis(chat=True).asked("9+9=") == [{"role": "user", "content": "9+9=?"}]
    none = metis(examples=0)
    none.remember(["1+1="], np.array([0.25]))
    assert none.asked("9+9=") == "9+9=?"


def test_the_loss_of_judgements_is_reinforce_with_its_coefficient():
    config = METISConfig(judgement_coef=0.01, how="token-mean", old_logprobs="rollout")
    loss = JudgementLoss(config)
    assert loss.reads == ["advantages"]
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    batch = {"advantages": torch.tensor([[3.0, 3.0]]), "loss_mask": torch.ones(1, 2)}
    term = loss(batch, {"logprobs": logprobs, "entropy": torch.zeros(1, 2)})
    assert (term.name, term.weight, term.how) == ("judgement_loss", 0.01, "token-mean")
    term.value.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-3.0, -3.0]]))  # -A grad log p


def test_the_prompts_that_are_judged_to_vary_most_are_answered(monkeypatch):
    algorithm = metis(pool_factor=4)
    with TinyRun(algorithm, TABLES) as run:
        seen, generate = [], type(run.ctx.actor).generate
        updates, update = [], type(run.ctx.actor).update

        def watched(handle, prompts, **settings):
            seen.append(prompts)
            return generate(handle, prompts, **settings)

        def watched_update(handle, pairs):
            updates.append(pairs)
            return update(handle, pairs)

        monkeypatch.setattr(type(run.ctx.actor), "generate", watched)
        monkeypatch.setattr(type(run.ctx.actor), "update", watched_update)
        said = iter(range(100))
        monkeypatch.setattr("hybridflow_metis.judgement", lambda text: next(said) % 16 / 64)
        run.step()
        questions, answered = seen
        asked = run.ctx.decode(questions, "prompt_ids")
        prompts = run.ctx.decode(answered, "prompt_ids")
        [[(mini, _), (judged, _)]] = updates
        judged_texts = run.ctx.decode(judged, "prompt_ids")
        scores, better = mini["scores"].values.numpy(), judged["better"].values.numpy()
    assert len(asked) == len(prompts) == 16
    best = [text.removesuffix("?") for text in asked[:-5:-1]]
    assert prompts == [text for text in best for _ in range(4)]
    # Each judgement is rewarded by the rewards to its own prompt, less the first mean.
    assert judged_texts == [f"{text}?" for text in best]
    said = np.array([15, 14, 13, 12]) / 64
    rewards = 1 - (4 * (said - scores.reshape(4, 4).var(1))) ** 2
    np.testing.assert_allclose(better, rewards - rewards.mean(), atol=1e-6)
