"""What a job says of itself."""

from __future__ import annotations

import attrs
from helpers.job_texts import STAGES, WITHOUT_ALGORITHM, WITHOUT_REWARD
from helpers.jobs import job, jobs

from hybridflow.core.contracts.role import Role
from hybridflow.core.job.job import Rewards
from hybridflow.core.job.sections import EnvironmentSection, RewardPart, SyncConfig


def test_a_stage_is_exported_where_a_later_one_begins_with_it():
    first, second = jobs(text=STAGES)
    assert second.follows_stage(first) and not first.follows_stage(second)


def test_a_job_names_its_registered_plugins_and_none_that_is_named_by_a_path(tmp_path):
    (tmp_path / "judging.py").write_text("def judge(sample):\n    return 1.0\n")
    disk = "actor.sync.transport={name='disk', folder='/tmp'}"
    held_out = ("validation.data.source=jsonl", "validation.every=1", "data.answer='{answer}'")
    others = ("run.trackers=['jsonl']", "tokenizer.name=huggingface")
    made = job("reward.function=judging:judge", *others, disk, *held_out)
    assert sorted(made.plugins()) == [
        ("algorithm", "grpo"),
        ("data_source", "arithmetic"),
        ("data_source", "jsonl"),
        ("planner", made.planner),
        ("rollout_engine", "transformers"),
        ("runtime", "inline"),
        ("tokenizer", "huggingface"),
        ("tracker", "jsonl"),
        ("training_backend", "fsdp"),
        ("transport", "disk"),
    ]


def test_an_environment_that_is_registered_is_named_too():
    section = EnvironmentSection("sums")
    assert ("environment", "sums") in attrs.evolve(job(), environment=section).plugins()
    assert not any(kind == "environment" for kind, _ in job().plugins())


def test_data_and_rewards_live_where_the_actor_is():
    apart = ("algorithm={name='ppo', prompts_per_step=4}", "actor.pool=second", "critic.pool=main")
    made = job("pools={main=[1], second=[1]}", *apart, text=WITHOUT_ALGORITHM)
    assert made.main_pool == "second"
    assert attrs.evolve(made, models={}).main_pool == "main"  # the first there is


APART = (
    "pools={main=[1], engines=[4]}",
    "actor.generation={pool='engines', tp=2}",
    "runtime.name=ray",
)


def test_engines_that_are_alone_in_their_pool_have_a_process_group_each():
    made = job(*APART)
    assert made.residents("engines") == {"actor.rollout"}
    assert made.residents("main") == {"actor", "reward", "data", "tasks"}
    assert made.launched("engines").groups == ((0, 1), (2, 3))
    assert made.launched("main").groups is None
    beside = job(*APART, "reward.pool=engines")
    assert beside.residents("engines") == {"actor.rollout", "reward"}
    assert beside.launched("engines").groups is None
    assert beside.launched("engines").process_groups == ((0, 1, 2, 3),)


def test_the_rewards_are_those_of_reward_or_of_the_first_that_scores():
    made = job("reward={parts=[{name='a', function='math'}]}", text=WITHOUT_REWARD)
    other = Rewards(Role("cost", "reward"), (RewardPart("b", "exact_match"),))
    both = attrs.evolve(made, scorers={"cost": other, **made.scorers})
    assert [part.name for part in both.rewards] == ["a"]
    assert [part.name for part in attrs.evolve(made, scorers={"cost": other}).rewards] == ["b"]
    assert attrs.evolve(made, scorers={}).rewards == ()


def test_a_bucket_is_given_in_millions_of_bytes():
    assert SyncConfig(bucket_mb=0.5).bucket_bytes == 500_000
