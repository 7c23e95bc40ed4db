"""Configurations become jobs; what cannot work is said, all of it, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import ALGORITHM, BASE, MODEL, STAGES, WITHOUT_ALGORITHM, WITHOUT_REWARD
from helpers.jobs import job, jobs, model_folder, problem, problems

from hybridflow.core.contracts.tokenizer import TokenizerConfig

ENVIRONMENT = """
from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.errors import ConfigError

class Sums(Environment):
    def __init__(self, size=1):
        if size == 0:
            raise ConfigError("option size is 0")
        self.size = 6 / (size - 1) if size else 0
    def step(self, turn):
        return Answer(done=True)
"""


def test_a_small_config_becomes_a_job():
    made = job()
    assert made.algorithm_name == "grpo" and made.runtime == "inline" and made.main_pool == "main"
    assert list(made.models) == ["actor"] and list(made.scorers) == ["reward"]
    actor = made.models["actor"]
    assert (
        actor.spec.engine == "transformers"
        and actor.spec.optimizer is not None
        and actor.layout.world == 1
    )
    assert made.rewards[0].function == "exact_match" and made.folder == Path("runs/tiny")


def test_the_order_of_rows_follows_the_seed_of_the_run_unless_it_is_given():
    validated = ("validation.every=1", "validation.data.options={ split = 'held-out' }")
    made = job("run.seed=7", *validated)
    assert made.data.seed == 7 and made.validation_data.seed == 7
    made = job("run.seed=7", "data.seed=3", *validated)
    assert made.data.seed == 3 and made.validation_data.seed == 3


def test_a_model_of_an_earlier_stage_brings_its_tokenizer_whatever_the_tokenizer_table_says():
    first, second = jobs(text=STAGES)
    assert first.tokenizer.train == "char" and first.tokenizer_path is None
    assert (
        second.tokenizer == TokenizerConfig()
        and second.tokenizer_path == "runs/tiny/first/tokenizer"
    )


def test_a_reward_may_be_given_by_its_name_alone():
    assert job("reward=math", text=WITHOUT_REWARD).rewards[0].function == "math"


def test_the_model_folder_brings_the_tokenizer_where_none_is_configured(tmp_path):
    model_folder(tmp_path / "model")
    text = BASE.replace(f"actor.model.config = {MODEL}", 'actor.model.path = "model"')
    assert job(text=text).tokenizer_path is None  # tokenizer.characters is given
    assert (
        job(text=text.replace('tokenizer.characters = "0123456789+="', "")).tokenizer_path
        == "model"
    )


def test_all_problems_of_a_config_are_reported_at_once():
    found = problems(
        "steps=3", "run.stepz=3", "sampling.top_p=1.5", "data.limit=-1", "tokenizer.train=word", "pools.main=[1]",
        "pools.spare=[]", "algorithm.group_siz=2", "algorithm.kl_coef=0.1", "actor.layout.tp=3", "actor.colour=red",
        "ref.model.path=/no/such/folder", "critc.pool=x", "critic.optimizer.lrr=1", "reward.function=exact_mach",
        "reward.layout.tp=1", "runtime.threadz=1",
    )  # fmt: skip
    for said in (
        "steps: unknown key; did you mean `run.steps`?", "run.stepz: unknown key; did you mean `steps`?",
        "sampling.top_p: must be above 0", "data.limit: must be 0 or more", 'tokenizer.train: expected one of "char", "bpe"',
        "algorithm.group_siz: unknown key; did you mean `group_size`?", "actor.layout: tp 3",
        "actor.colour: unknown key", "ref.model.path: there is no folder", "critc: unknown key; did you mean `critic`?",
        "critic.optimizer.lrr: unknown key", "reward.layout: is for models", "pools.spare: expected devices per node",
        "runtime.threadz: unknown key",
    ):  # fmt: skip
        assert any(p.startswith(said) for p in found), (said, found)


def test_the_problems_of_all_stages_are_reported_with_the_stage_and_common_ones_once():
    found = problems(
        "actor.optimizer.lr=-1",
        "stages.first.algorithm.batch_size=0",
        "stages.second.reward.function=nope",
        text=STAGES,
    )
    assert len([p for p in found if "actor.optimizer.lr" in p]) == 1
    assert any(p.startswith("stage first: algorithm.batch_size: must be at least 1") for p in found)
    assert any(p.startswith("stage second: reward: unknown reward 'nope'") for p in found)


def test_a_stage_that_follows_a_broken_one_is_not_blamed():
    assert problem("stages.first.algorithm.batch_size=0", text=STAGES).startswith("stage first: ")


def test_what_hangs_on_a_section_that_has_problems_is_not_looked_at():
    found = problem("algorithm={name='sft'}", "data.respons={answer}", text=WITHOUT_ALGORITHM)
    assert found.startswith("data.respons:")


def test_a_role_of_one_stage_may_stand_among_the_common_tables(tmp_path):
    (tmp_path / "panel.py").write_text(
        ALGORITHM.format(body="", roles="Role('actor', trained=True), Role('juror')")
    )
    text = STAGES.replace('{ name = "grpo", prompts_per_step = 4, group_size = 4 }', '"panel:Mine"')
    second = jobs("juror.micro_batch_tokens=9", text=text)[1]
    assert second.models["juror"].spec.micro_batch_tokens == 9
    assert "did you mean `juror`?" in problem("juror2.micro_batch_tokens=9", text=text)


def test_a_tracker_is_a_name_or_a_table_with_its_settings():
    made = job("run.trackers=['jsonl', {name='tensorboard'}]")
    assert [tracker.name for tracker in made.trackers] == ["jsonl", "tensorboard"]
    found = problem("run.trackers=['jsonl', {name='jsonl', colour=1}]")
    assert found.startswith("run.trackers.1.colour: unknown key")


@pytest.mark.parametrize("table", ["{}", "{name=3}", "{name=['jsonl']}"])
def test_a_tracker_without_a_name_is_refused(table):
    found = problem(f"run.trackers=[{table}]")
    assert found.startswith("run.trackers.0: give the name of a tracker (jsonl")


def test_an_environment_must_be_one_and_take_its_options(tmp_path):
    (tmp_path / "sums_by_turns.py").write_text(ENVIRONMENT)
    made = job("environment={name='sums_by_turns:Sums', max_turns=3, options={size=2}}")
    assert (made.environment.max_turns, made.environment.options) == (3, {"size": 2})
    found = problem("environment={name='sums_by_turns:Sums', options={sizes=2}}")
    assert found.startswith("environment: the options {'sizes': 2} do not fit environment 'sums_by")
    assert problem("environment={name='sums_by_turns:Sums', options={size=0}}") == (
        "environment: option size is 0"
    )
    assert problem("environment.name='sums_by_turns:Sums'") == (
        "environment.options: the environment cannot be made of them "
        "(ZeroDivisionError: division by zero)"
    )
    assert "'no_such_turns:Sums'" in problem("environment.name=no_such_turns:Sums")
    assert problem("environment={}").startswith("environment.name: required")


def test_the_held_out_set_is_the_data_with_its_own_fields_on_top_and_in_order():
    made = job("validation.data={limit=3}", "data.limit=9")
    assert (made.data.limit, made.data.shuffle) == (9, True)
    assert (made.validation_data.limit, made.validation_data.shuffle) == (3, False)
    assert made.validation_data.source == made.data.source == "arithmetic"


def test_an_algorithm_without_a_reward_is_validated_by_the_one_that_is_given():
    supervised = ("algorithm={name='sft', batch_size=4}", "data.response='{answer}'")
    validated = job(*supervised, "validation.every=1", text=WITHOUT_ALGORITHM)
    assert list(validated.scorers) == ["reward"]
    assert validated.models["actor"].spec.engine == "transformers"
    plain = job(*supervised, text=WITHOUT_ALGORITHM)
    assert not plain.scorers and plain.unused == ("reward",)
    assert plain.models["actor"].spec.engine is None
