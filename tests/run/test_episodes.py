"""Several turns in a step: an environment answers, and its tokens are not trained on."""

from __future__ import annotations

import pytest
import torch
from helpers.episodes import Echo
from helpers.steps import Watched, column

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.kit.testing import TinyRun


def tables(max_turns: int = 8, max_tokens: int = 16, **options):
    section = {"name": "helpers.episodes:Echo", "options": options, "max_turns": max_turns}
    # the stop often: the model speaks in short turns
    sampling = {"max_tokens": max_tokens, "logit_bias": {"14": 2.0}}
    return {"environment": section, "sampling": sampling, "reward": {"function": "environment"}}


class Kept(Watched, GRPO):
    pass


def run(**given):
    return TinyRun(Kept(GRPOConfig(prompts_per_step=4, group_size=4)), tables(**given))


def rows(batch):
    names = ("response_ids", "loss_mask", "turn", "rollout_logprobs", "weight_version")
    per_token = [list(batch[name]) for name in names]
    return list(
        zip(*per_token, batch["turn_rewards"].values, batch["turn_states"].values, strict=True)
    )


def test_answers_stand_between_turns_and_are_not_trained_on():
    Echo.closed.clear()
    with run() as tiny:
        stop, eos = (
            int(tiny.session.prepared.tokenizer.encode("=")[0]),
            tiny.session.prepared.tokenizer.eos_id,
        )
        said = tiny.session.prepared.tokenizer.encode("12").tolist()
        metrics = tiny.step()
        batch = tiny.algorithm.batch
    seen = 0
    for ids, mask, turn, logprobs, version, rewards, states in rows(batch):
        assert torch.equal(mask.bool(), turn >= 0)
        assert (
            (logprobs[mask == 0] == 0).all()
            and (version[mask == 0] == -1).all()
            and (logprobs[mask == 1] < 0).all()
        )
        assert len(rewards) == len(states) and states[0] == "begin"
        for number in range(
            len(rewards) - 1
        ):  # every turn but the last ends with a stop, and is answered
            places = (turn == number).nonzero()[:, 0]
            assert ids[places[-1]] == stop and not (ids[places[:-1]] == stop).any()
            answer = ids[places[-1] + 1 :][: len(said)].tolist()
            assert answer == said[: len(answer)]
            seen += 1
        if (ids == eos).any():
            assert ids[-1] == eos and states[1:] == [f"after {n}" for n in range(len(rewards) - 1)]
    assert seen > 4, "the test needs answered turns"
    assert len(Echo.closed) == 16
    returns = [sum(r) for r in batch["turn_rewards"].values]
    assert column(batch, "episode_return").tolist() == pytest.approx(returns)
    assert column(batch, "scores").tolist() == pytest.approx(returns)
    assert metrics["actor/turns"] > 1 and metrics["actor/episode_return"] == pytest.approx(
        sum(returns) / 16
    )


def test_the_trainers_logprobs_are_the_rollouts_in_every_turn():
    with run() as tiny:
        batch = tiny.ctx.actor.generate(tiny.ctx.prompts(8))
        again = tiny.ctx.actor.logprobs(batch)["old_logprobs"].padded()
        mask, made = column(batch, "loss_mask").bool(), column(batch, "rollout_logprobs")
        tiny.ctx.finish()
    assert (column(batch, "turn") > 0).any()
    torch.testing.assert_close(again[mask], made[mask], atol=1e-4, rtol=0)
