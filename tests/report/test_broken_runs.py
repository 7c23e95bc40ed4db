"""Runs that are broken on purpose: the report names what was broken, and nothing else; healthy runs raise no alarm.

All of them begin with the same half-trained adder. `make healthy` tries twenty healthy ones, and the slowest of the
broken ones.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
from helpers.paths import matrix
from helpers.tiny import MODEL, killing, ran_here, write

from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.rollouts import same_ranks
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column
from hybridflow.core.workers import episodes, generation, model_worker
from hybridflow.kit.runs import find_runs
from hybridflow.report.contents import run_contents

GRPO = 'name = "grpo", prompts_per_step = 4, group_size = 4, mini_batch_size = 8'
SFT = 'name = "sft", batch_size = 64'
HEALTHY = 'name = "grpo", prompts_per_step = 16, group_size = 8'
REWARDS = '''
import time


def fives(sample):
    """Meant as a hint that answers have fives in them."""
    ended = sample.finish_reason == "stop"
    return ended * (0.25 * (sample.response == sample.answer) + 0.25 * sample.response.count("5"))


def noise(sample):
    """Says nothing of the response, if it ends; whatever is drawn first is learned."""
    import zlib

    return (sample.finish_reason == "stop") * (zlib.crc32(repr(sample).encode()) % 97) / 97


def at_a_judge(sample, folder):
    """One of two judges is slow."""
    import os, pathlib

    mark = pathlib.Path(folder) / "slow"
    if not mark.exists():
        mark.write_text(str(os.getpid()))
    if mark.read_text() == str(os.getpid()):
        time.sleep(0.01)
    return digits(sample)
'''
STEPS = 16


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A half-trained adder."""
    folder = tmp_path_factory.mktemp("policy")
    write(folder, **{GRPO: SFT})
    settings = ('data.response="{answer}"', "run.steps=120", "run.report=false")
    ran_here(folder, *settings, "actor.optimizer.lr=3e-3")
    return folder / "runs/tiny/export/actor"


@pytest.fixture
def configured(tmp_path, policy) -> Path:
    """A folder with a config that goes well."""
    write(tmp_path, **{GRPO: HEALTHY, f"model.config = {MODEL}": f'model.path = "{policy}"'})
    text = (tmp_path / "tiny.toml").read_text()
    text = text.replace('[tokenizer]\ncharacters = "0123456789+="', "[tokenizer]")
    (tmp_path / "tiny.toml").write_text(text)
    (tmp_path / "rewards.py").write_text((tmp_path / "rewards.py").read_text() + REWARDS)
    return tmp_path


def alarms(folder: Path) -> list[str]:
    """The rules that alarm, and what they say where a test fails."""
    [run] = find_runs(folder / "runs/tiny")
    found = [one for one in run_contents(run)["findings"] if one["level"] == "alarm"]
    print(*(one["text"] for one in found), sep="\n")
    return [one["rule"] for one in found]


def reported(folder: Path, policy: Path, *settings: str) -> list[str]:
    common = (
        f"run.steps={STEPS}",
        f"tokenizer.path={policy}",
        "run.export=false",
        "run.final_checkpoint=false",
        "run.report=false",
        "reward.function=rewards:digits",
        "actor.optimizer.lr=5e-4",
    )
    ran_here(folder, *common, *settings)
    return alarms(folder)


def changed(batch: Batch, name: str, change) -> Batch:
    """The batch with another column of that name."""
    columns = {key: batch[key] for key in batch.names}
    columns[name] = Column(change(columns[name].values), columns[name].lengths)
    return Batch(columns, batch.metrics)


def test_healthy_runs_raise_no_alarm(configured, policy):
    for seed in range(int(os.environ.get("HYBRIDFLOW_SEEDS", "1"))):
        found = reported(configured, policy, f"run.seed={seed}", "run.steps=40", "--overwrite")
        assert found == [], f"seed {seed}"


def test_a_planted_mismatch(configured, policy, monkeypatch):
    whole = generation.generate_rows

    def off(*args, **kwargs):
        return changed(whole(*args, **kwargs), "rollout_logprobs", lambda values: values + 0.05)

    monkeypatch.setattr(model_worker, "generate_rows", off)
    assert reported(configured, policy, "run.mismatch_stop=inf") == ["mismatch"]


def test_weights_that_do_not_arrive(configured, policy, monkeypatch):
    first: dict = {}

    class Old(same_ranks.ShardReader):
        """Reads the weights of the first sync for ever, which nothing checks."""

        def read(self, name, box):
            return first.setdefault((name, str(box)), super().read(name, box).clone())

    monkeypatch.setattr(same_ranks, "ShardReader", Old)
    monkeypatch.setattr(same_ranks, "differing", lambda *args: {})
    settings = ("run.mismatch_stop=inf", "actor.optimizer.lr=3e-3", "actor.sync.alias=false")
    assert reported(configured, policy, *settings) == ["stale weights"]


def test_a_reward_that_pays_for_something_else(configured, policy):
    settings = ("reward.function=rewards:fives", "run.steps=40", "actor.optimizer.lr=3e-3")
    assert reported(configured, policy, *settings) == ["reward hacked"]


def test_an_entropy_that_collapses(configured, policy):
    settings = ("reward.function=rewards:noise", "run.steps=40", "actor.optimizer.lr=2e-2")
    found = reported(configured, policy, *settings)
    assert found == ["entropy collapsed"]


@matrix
def test_groups_without_spread(configured, policy):
    # For a policy that is seldom right, right and wrong say little.
    found = reported(configured, policy, "reward.function=exact_match")
    assert found == ["groups without spread"]


def test_a_batch_that_is_too_small(configured, policy):
    assert reported(configured, policy, "algorithm.prompts_per_step=1") == ["small batch"]


class Slow(Environment):
    """A tool that thinks about every answer."""

    def reset(self, start):
        return Answer()

    def step(self, turn):
        time.sleep(0.5)
        return Answer("", reward=random.Random(turn.text).random(), done=True)


@matrix
def test_a_slow_tool(configured, policy):
    settings = (
        f"environment.name={__name__}:Slow",
        "reward.function=environment",
        "algorithm.prompts_per_step=4",
        "run.steps=10",
    )
    assert reported(configured, policy, *settings) == ["slow tool"]


class Talks(Environment):
    def reset(self, start):
        return Answer()

    def step(self, turn):
        return Answer("1+1=", reward=random.Random(turn.text).random(), done=turn.number > 0)


@matrix
def test_a_mask_that_is_wrong(configured, policy, monkeypatch):
    whole = episodes.episode_batch

    def all_ones(played):
        return changed(whole(played), "loss_mask", torch.ones_like)

    monkeypatch.setattr("hybridflow.core.workers.episode_runner.episode_batch", all_ones)
    settings = (
        f"environment.name={__name__}:Talks",
        "reward.function=environment",
        "sampling.max_tokens=16",
        "algorithm.prompts_per_step=4",
        "run.mismatch_stop=inf",
    )
    assert reported(configured, policy, *settings) == ["mask"]


@matrix
def test_a_rank_that_is_slower(configured, policy, ray_cluster):
    settings = (
        "runtime=ray",
        "pools={main=[1], judges={devices=[2], device='cpu'}}",
        "reward.pool=judges",
        "reward.function=rewards:at_a_judge",
        f"reward.options.folder={configured}",
    )
    assert reported(configured, policy, *settings) == ["slow rank"]


@pytest.mark.skipif("HYBRIDFLOW_SEEDS" not in os.environ, reason="make healthy runs it")
def test_an_engine_that_is_started_again(configured, policy):
    settings = (
        f"run.steps={STEPS}",
        f"tokenizer.path={policy}",
        "rollout.own_process=true",
        "rollout.restarts=1",
        "reward.function=rewards:digits",
        "actor.optimizer.lr=5e-4",
    )
    code, printed, kills = killing(configured, 1, "run", "tiny.toml", *settings)
    assert code == 0 and kills == 1, printed
    assert alarms(configured) == ["engine restarts"]
