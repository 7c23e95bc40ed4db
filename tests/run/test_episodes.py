"""Several turns: an environment answers, its tokens are not trained on, and what it does wrong is told."""

from __future__ import annotations

import pytest
import torch
from helpers.watched import Watched, column

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.kit.testing import TinyRun

HERE = "tests.run.test_episodes"
CLOSED = []


class Echo(Environment):
    """Answers each call with `said`; a turn that ends the text, or the turn number `last`, ends the episode."""

    stops = ("=",)

    def __init__(self, said: str = "12", opening: str = "", last: int = 99, wrong: str = ""):
        self.said, self.opening, self.last, self.wrong = said, opening, last, wrong
        if wrong == "init":
            raise OSError("no port")

    def reset(self, start):
        assert start.prompt.endswith("=") and "answer" in start.meta and start.seed >= 0
        return Answer(self.opening, state="begin")

    def step(self, turn):
        if self.wrong == "raises":
            raise ValueError("no such tool")
        if self.wrong == "returns":
            return "12"
        if self.wrong == "text":
            return Answer("1", reward="1")
        if self.wrong == "infinite":
            return Answer("1", reward=float("inf"))
        done = turn.ended or turn.number >= self.last
        assert turn.ended != turn.text.endswith("=")
        return Answer(self.said, reward=0.5 + turn.number, done=done, state=f"after {turn.number}")

    def close(self):
        CLOSED.append(self)


def tables(max_turns: int = 8, max_tokens: int = 16, **options):
    section = {"name": f"{HERE}:Echo", "options": options, "max_turns": max_turns}
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
    CLOSED.clear()
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
    assert len(CLOSED) == 16
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


def test_an_opening_stands_before_the_first_turn():
    with run(opening="99+") as tiny:
        batch = tiny.ctx.actor.generate(tiny.ctx.prompts(4))
        tiny.ctx.finish()
        opening = tiny.session.prepared.tokenizer.encode("99+").tolist()
    for ids, mask, *_ in rows(batch):
        assert ids[:3].tolist() == opening and mask[:3].tolist() == [0, 0, 0] and mask[3] == 1


def test_an_episode_ends_by_the_environment_by_turns_and_by_length():
    with run(last=0) as tiny:
        batch = tiny.ctx.actor.generate(tiny.ctx.prompts(8))
        assert all(len(r) == 1 for r in batch["turn_rewards"].values)
        reasons = batch["finish_reason"].values
        assert "stop" in reasons
        tiny.ctx.finish()
    with run(max_turns=2, max_tokens=24) as tiny:
        batch = tiny.ctx.actor.generate(tiny.ctx.prompts(8))
        tiny.ctx.finish()
    turns = [len(r) for r in batch["turn_rewards"].values]
    assert max(turns) == 2
    with run(max_tokens=5) as tiny:
        batch = tiny.ctx.actor.generate(tiny.ctx.prompts(8))
        tiny.ctx.finish()
    lengths, reasons = batch["response_ids"].lengths, batch["finish_reason"].values
    assert max(lengths) == 5 and {r for r, n in zip(reasons, lengths, strict=True) if n < 5} <= {
        "stop"
    }
    assert "length" in reasons


def test_the_same_seed_gives_the_same_episodes():
    found = []
    for _ in range(2):
        with run() as tiny:
            batch = tiny.ctx.actor.generate(tiny.ctx.prompts(6))
            found.append([ids.tolist() for ids in batch["response_ids"]])
            tiny.ctx.finish()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wrong": "raises"}, r"raised ValueError: no such tool \[after .*\[row \d+\]"),
        ({"wrong": "returns"}, r"returned '12'; return an Answer"),
        ({"wrong": "infinite"}, r"gave the reward inf"),
        ({"wrong": "text"}, r"gave the reward '1'; it must be a finite number"),
        ({"wrong": "init"}, r"raised OSError: no port"),
        ({"said": ""}, r"answered '' and the episode is not done"),
        ({"said": "1="}, r"answered '1=' and the episode is not done"),
    ],
)
def test_what_an_environment_does_wrong_is_told(options, said):
    with run(**options) as tiny, pytest.raises(HybridFlowError, match=said):
        for _ in range(3):
            tiny.step()


class TwoTokens(Environment):
    stops = ("10",)

    def step(self, turn):
        return Answer(done=True)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": f"{HERE}:Missing"}, "has no 'Missing'"),
        ({"name": f"{HERE}:tables"}, "must be a class derived from"),
        ({"name": f"{HERE}:Echo", "options": {"color": 1}}, "do not fit environment"),
        ({"name": f"{HERE}:Echo", "turns": 3}, "environment.turns: unknown key"),
        ({"name": f"{HERE}:TwoTokens"}, "which is 2 tokens"),
        ({}, "environment.name: required"),
    ],
    ids=["missing", "no class", "options", "key", "stop", "name"],
)
def test_a_wrong_table_is_told_before_anything_starts(section, said):
    given = {**tables(), "environment": section}
    with pytest.raises(ConfigError, match=said):
        TinyRun(GRPO(GRPOConfig(prompts_per_step=4, group_size=4)), given)


def test_the_reward_of_an_environment_needs_one():
    given = {"reward": {"function": "environment"}}
    said = r"there is no environment; give \[environment\]"
    tiny = TinyRun(GRPO(GRPOConfig(prompts_per_step=4, group_size=4)), given)
    with pytest.raises(HybridFlowError, match=said), tiny:
        raise AssertionError("the models were built")
