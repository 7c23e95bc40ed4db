"""What --resume lets change, and what it refuses by name."""

from __future__ import annotations

import json

import attrs
import pytest
from helpers.job_texts import BASE, STAGES
from helpers.jobs import job, jobs

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.sealed import write_sealed
from hybridflow.settle.changes import Change, changes, check_changes, settings


@pytest.fixture
def begun(tmp_path):
    """`begun(*overrides)`: a job in a folder in which the same job without them has begun."""

    def begun(*overrides, text=BASE):
        own = f"run.folder={tmp_path}"
        for stage in jobs(own, text=text):
            stage.folder.mkdir(parents=True, exist_ok=True)
            write_sealed(stage.folder / "run.json", {"settings": settings(stage)})
        return jobs(own, *overrides, text=text)[-1]

    return begun


def test_what_may_change_is_told_with_both_values(begun):
    changed = check_changes(begun("actor.optimizer.lr=1e-4", "run.steps=7"))
    before = job().models["actor"].spec.optimizer.lr
    assert list(map(str, changed)) == [
        f"actor.optimizer.lr {json.dumps(before)} -> 0.0001",
        "run.steps 100 -> 7",
    ]
    assert check_changes(begun()) == []


@pytest.mark.parametrize(
    "override, key",
    [
        ("algorithm.group_size=2", "algorithm.group_size 4 -> 2"),
        ("algorithm=rloo", 'algorithm.name "grpo" -> "rloo"'),
        ("actor.model.config.hidden_size=32", "actor.model.config.hidden_size 64 -> 32"),
        ("actor.model.init_seed=1", "actor.model.init_seed 0 -> 1"),
        ("data.options.split=train", 'data.options.split (not set) -> "train"'),
        ("tokenizer.characters=0123456789+=-", "tokenizer.characters"),
        ("sampling.max_tokens=3", "sampling.max_tokens 4 -> 3"),
        ("run.seed=1", "run.seed 0 -> 1"),
        # A key of a role's table, which means something else here
        ("data.options.offload=true", "data.options.offload (not set) -> true"),
        ("reward.options.ignore_case=true", "reward.options.ignore_case (not set) -> true"),
        ("reward.function=math", 'reward.function "exact_match" -> "math"'),
        ("actor.backend={lora={rank=2}}", "actor.backend.lora (not set) -> {"),
    ],
)
def test_what_decides_the_result_is_refused_by_name(begun, override, key):
    with pytest.raises(ConfigError) as error:
        check_changes(begun(override))
    assert any(key in problem for problem in error.value.problems)


@pytest.mark.parametrize(
    "override",
    [
        "run.export=false",
        "runtime=ray",
        "rollout.max_sequences=8",
        "validation={every=2}",
        "actor.micro_batch_tokens=512",
        "actor.offload=true",
        "actor.generation.keep=false",
        "actor.sync.bucket_mb=1.0",
        "actor.backend.precision=bf16",
        "actor.optimizer={schedule='cosine', total_steps=9}",
    ],
)
def test_where_how_fast_and_how_watched_may_change(begun, override):
    # A plugin that was not there before brings settings of its own, which are no changes.
    assert all(change.allowed for change in check_changes(begun(override)))


def test_the_stage_is_named_and_all_problems_are_told_at_once(begun):
    changed = begun("sampling.max_tokens=3", "run.seed=2", text=STAGES)
    with pytest.raises(ConfigError) as error:
        check_changes(changed)
    # The order of the rows follows the run's seed.
    changes = ("data.seed 0 -> 2", "run.seed 0 -> 2", "sampling.max_tokens 4 -> 3")
    assert [problem.split(": ")[:3] for problem in error.value.problems] == [
        ["stage second", "--resume", change] for change in changes
    ]


def test_a_folder_of_an_older_version_has_nothing_to_compare(tmp_path):
    mine = attrs.evolve(job(), folder=tmp_path)
    assert changes(mine) is None
    write_sealed(tmp_path / "run.json", {"config": {}})
    assert changes(mine) is None and check_changes(mine) is None
    # A setting that only one of the two versions has is not a change.
    known = {key: value for key, value in settings(mine).items() if key != "run.export"}
    write_sealed(tmp_path / "run.json", {"settings": {**known, "run.gone": 1}})
    assert check_changes(mine) == []


def test_a_change_without_a_value_says_so():
    assert str(Change("data.path", None, "a.jsonl")) == 'data.path (not set) -> "a.jsonl"'
