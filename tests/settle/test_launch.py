"""A configuration from its file to its last stage: what is done is not done again."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

import attrs
import pytest
from helpers.job_texts import BASE, STAGES, WITHOUT_REWARD
from helpers.jobs import jobs
from helpers.tiny import REWARDS, learning

from hybridflow.core.controller import RunOutcome
from hybridflow.core.errors import ConfigError, HybridFlowError, RewardError
from hybridflow.core.running import supervised
from hybridflow.settle import launch
from hybridflow.settle.launch import load_config, run, summarise

ROWS = ["data.limit=8", "validation.data.limit=2"]
TINY = ["run.device=cpu", "run.steps=1", "run.trackers=['jsonl']", *ROWS]
ONE = [*TINY, "algorithm.prompts_per_step=2", "algorithm.group_size=2"]
FAILS_ONCE = """

def fails_once(sample):
    # The folders are emptied after the reward was tried.
    emptied = not pathlib.Path("runs/two/second/done.json").exists()
    if emptied and not pathlib.Path("failed").exists():
        pathlib.Path("failed").write_text("yes")
        raise KeyError("no such unit")
    return 1.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder with the configs and the rewards, from which they are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards.py").write_text(REWARDS + FAILS_ONCE)
    (tmp_path / "one.toml").write_text(BASE)
    (tmp_path / "two.toml").write_text(STAGES)
    return tmp_path


def written() -> dict[Path, int]:
    """When each file of the runs was written last."""
    files = [path for path in Path("runs").rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


def steps(folder: str) -> list[float]:
    return [row["step"] for row in learning(Path("runs") / folder)]


# --- the file ---


def test_a_file_gives_its_name_and_overrides_lie_over_it():
    [job] = load_config("one.toml", ["run.steps=7", "algorithm.group_size=2"])
    assert (job.name, str(job.folder), job.run.steps) == ("one", "runs/one", 7)
    assert job.algorithm.config.group_size == 2 and job.algorithm.config.prompts_per_step == 4
    assert [job.stage for job in load_config("two.toml")] == ["first", "second"]


def test_all_problems_of_a_file_are_told_at_once_and_a_missing_one_is_named():
    with pytest.raises(ConfigError) as error:
        load_config("one.toml", ["run.stepz=7", "pools.main=[0]"])
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config("none.toml")


def test_a_reward_of_a_later_stage_is_tried_before_the_first_one_starts(here):
    (here / "only_right.py").write_text(
        "def reward(sample):\n    return 1.0 if sample.response == sample.answer else None\n"
    )
    broken = ["stages.second.reward.function=only_right:reward", *TINY]
    with pytest.raises(RewardError, match=r"tried on row 0 of train.* returned None"):
        run("two.toml", broken)
    assert not Path("runs").exists()


def test_what_is_probably_not_meant_is_said_when_the_run_begins(capsys):
    run("one.toml", [*ONE, "run.checkpoint_every=5"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("one: grpo on 8 train rows")
    assert lines[0].startswith("note: run.checkpoint_every: is 5 and the run has 1 steps")


def test_tables_are_run_as_a_file_with_them_is():
    tables = tomllib.loads(BASE)
    before = copy.deepcopy(tables)
    outcome = run({**tables, "run": {"steps": 1, "device": "cpu"}}, ONE)
    assert (outcome.state, outcome.step) == ("finished", 1) and steps("run")[0] == 1
    assert tables == before
    assert [str(job.folder) for job in load_config(tables, ["run.name=mine"])] == ["runs/mine"]
    with pytest.raises(ConfigError, match=r"run\.stepz"):
        run({**tables, "run": {"stepz": 1}})


def test_a_module_beside_the_file_is_found_from_another_folder(tmp_path, monkeypatch):
    there = tmp_path / "there"
    there.mkdir()
    (there / "beside.py").write_text("def fine(sample):\n    return 1.0\n")
    (there / "one.toml").write_text(BASE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(there)])
    [job] = load_config("there/one.toml", ["reward.function=beside:fine"])
    assert job.rewards[0].function == "beside:fine" and str(there) in sys.path


# --- stages ---


def test_a_stage_begins_with_what_the_one_before_it_wrote_and_neither_is_done_twice(capsys):
    outcome = run("two.toml", TINY)
    assert (outcome.state, outcome.step, list(outcome.validations)) == ("finished", 1, [1])
    for stage in ("first", "second"):
        assert Path(f"runs/two/{stage}/export/actor/model.safetensors").is_file()
    done = json.loads(Path("runs/two/second/done.json").read_text())
    assert done["step"] == 1 and list(done["validations"]) == ["1"]
    score, where = capsys.readouterr().out.splitlines()[-2:]
    assert score.startswith("validation exact match: first 0.") and ", final 0." in score
    assert "runs/two/second/export/actor; --resume with more run.steps goes on from step 1" in where

    before = written()
    again = run("two.toml", TINY, resume=True)
    finished = [f"{stage}: finished already, at step 1" for stage in ("first", "second")]
    assert again == outcome and capsys.readouterr().out.splitlines() == [*finished, score, where]
    assert written() == before


def test_a_sigterm_that_came_too_late_for_a_stage_stops_before_the_next_one(monkeypatch):
    def asked(*arguments, **more):
        return attrs.evolve(run_job(*arguments, **more), asked=True)

    run_job = launch.run_job
    monkeypatch.setattr(launch, "run_job", asked)
    assert run("two.toml", TINY).state == "stopped"
    assert Path("runs/two/first/done.json").exists() and not Path("runs/two/second").exists()
    outcome = run("two.toml", TINY, resume=True)
    assert outcome.state == "finished"  # no other stage is left


def test_a_supervisors_start_replaces_what_the_one_before_has_left(monkeypatch):
    """It has died before its first checkpoint."""
    run("one.toml", [*ONE, "run.steps=1"])
    for name in ("done.json", "checkpoints", "export"):
        path = Path("runs/one") / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ConfigError, match="would be replaced"):
        run("one.toml", [*ONE, "run.steps=2"], resume=True)
    monkeypatch.setattr(supervised, "_again", True)
    assert run("one.toml", [*ONE, "run.steps=2"], resume=True).step == 2


def test_a_stage_is_run_alone_from_what_the_one_before_has_left():
    with pytest.raises(ConfigError, match="the model of first"):
        run("two.toml", TINY, stage="second")
    assert not Path("runs/two").exists()
    run("two.toml", TINY, stage="first")
    before = written()
    run("two.toml", TINY, stage="second")
    assert set(steps("two/second")) == {1}
    assert {path: at for path, at in written().items() if "first" in path.parts} == before


def test_a_stage_is_not_replaced_under_a_later_one():
    run("two.toml", TINY)
    with pytest.raises(ConfigError, match="second has begun with its model; remove"):
        run("two.toml", TINY, overwrite=True, stage="first")
    run("two.toml", TINY, overwrite=True, stage="second")
    mark = json.loads(Path("runs/two/second/run.json").read_text())
    assert mark["beside"] == str(Path.cwd())


def test_a_stage_that_the_config_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=r"no such stage.*\(stages: first, second\)"):
        run("two.toml", TINY, stage="third")
    with pytest.raises(ConfigError, match=r"\(stages: none\)"):
        run("one.toml", ONE, stage="first")


def test_a_run_in_any_stages_folder_is_told_before_the_first_stage_starts():
    Path("runs/two/second").mkdir(parents=True)
    Path("runs/two/second/run.json").write_text("{}")
    Path("runs/two/second/metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"a run in runs/two/second already; .*--resume"):
        run("two.toml", TINY)
    assert not Path("runs/two/first").exists()


def test_a_run_that_ended_before_it_made_anything_is_begun_again_without_a_word():
    with pytest.raises(HybridFlowError, match="no such unit"):
        run("one.toml", [*ONE, "reward=rewards:fails_once"])
    assert Path("runs/one/run.json").exists()
    assert run("one.toml", [*ONE, "reward=rewards:fails_once"]).state == "finished"
    with pytest.raises(ConfigError, match="a run in runs/one already"):
        run("one.toml", ONE)


def test_more_steps_let_a_finished_run_go_on_from_its_last_checkpoint():
    assert run("one.toml", ONE).step == 1
    assert run("one.toml", [*ONE, "run.steps=2"], resume=True).step == 2
    starts = json.loads(Path("runs/one/run.json").read_text())["starts"]
    assert [start["folder"] for start in starts] == 2 * [os.getcwd()]
    said = Path("runs/one/console.log").read_text()
    assert said.count(" one: grpo on 8 train rows") == 2 and " resuming after step 1" in said
    assert steps("one") == [1, 1, 2, 2]  # each with its validation


def test_a_finished_run_is_exported_when_it_is_asked_for_later(capsys):
    run("one.toml", [*ONE, "run.export=false"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no model is exported; --resume run.export=true writes that of step 1")
    metrics = Path("runs/one/metrics.jsonl").read_text()

    run("one.toml", ONE, resume=True)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("the model is in runs/one/export/actor; ")
    assert Path("runs/one/metrics.jsonl").read_text() == metrics

    # Removed by hand, it is written again, the same to the last bit.
    weights = Path("runs/one/export/actor/model.safetensors").read_bytes()
    shutil.rmtree("runs/one/export")
    run("one.toml", ONE, resume=True)
    assert Path("runs/one/export/actor/model.safetensors").read_bytes() == weights


def test_a_run_that_keeps_nothing_says_so_and_cannot_go_on(capsys):
    nothing = [*ONE, "run.export=false", "run.final_checkpoint=false"]
    run("one.toml", nothing)
    assert "run.export and run.final_checkpoint are false" in capsys.readouterr().out
    for more in ("run.steps=2", "run.export=true"):
        before = written()
        with pytest.raises(ConfigError, match=r"nothing to go on from in runs/one: .*--overwrite"):
            run("one.toml", [*nothing, more], resume=True)
        assert written() == before


def test_resume_of_a_run_that_never_began_begins():
    assert run("one.toml", ONE, resume=True).step == 1


def test_an_earlier_stage_does_not_train_on_when_a_later_one_has_begun_with_its_model():
    run("two.toml", TINY)
    before = written()
    more = [*TINY, "stages.first.run.steps=2"]
    with pytest.raises(ConfigError, match=r"stages\.first\.run\.steps: .* remove runs/two/second"):
        run("two.toml", more, resume=True)
    assert written() == before

    shutil.rmtree("runs/two/second")
    assert run("two.toml", more, resume=True).step == 1
    assert steps("two/first")[-1] == 2


def test_the_last_stage_trains_on():
    run("two.toml", TINY)
    assert run("two.toml", [*TINY, "stages.second.run.steps=2"], resume=True).step == 2


def test_of_a_run_that_is_replaced_no_stage_is_taken_for_done():
    run("two.toml", TINY)
    first = "stages.first.validation.every=1"
    with pytest.raises(HybridFlowError, match="no such unit"):
        run("two.toml", [*TINY, first, "reward=rewards:fails_once"], overwrite=True)
    assert not Path("runs/two/second/done.json").exists()
    shutil.rmtree("runs/two/first")  # it failed before its first checkpoint
    run("two.toml", [*TINY, first, "reward=rewards:fails_once"], resume=True)
    assert Path("runs/two/second/metrics.jsonl").exists()  # it has run again


# --- the last line ---


def validated(**found: dict[int, float]) -> dict[str, RunOutcome]:
    """Outcomes of stages by the scores after steps."""
    outcomes = {}
    for stage, scores in found.items():
        values = {step: {"validation/score": score} for step, score in scores.items()}
        outcomes[stage] = RunOutcome("finished", 9, values)
    return outcomes


def test_the_last_line_has_the_score_before_and_after_each_stage():
    both = jobs("validation.at_start=true", "validation.name=held-out", text=STAGES)
    outcomes = validated(first={0: 0.125, 5: 0.5, 9: 0.625}, second={0: 0.625, 9: 0.97})
    assert summarise(both, outcomes) == "held-out exact match: start 0.12, first 0.62, final 0.97"
    assert summarise(both[1:], outcomes) == "held-out exact match: start 0.62, final 0.97"


def test_a_reward_of_several_parts_is_called_a_score():
    parts = "reward={parts=[{name='a', function='math'}, {name='b', function='exact_match'}]}"
    [job] = jobs(parts, "validation.every=1", text=WITHOUT_REWARD)
    assert summarise([job], validated(tiny={9: 0.5})) == "validation score: final 0.50"


def test_without_a_score_there_is_no_last_line():
    assert summarise(jobs(), validated(tiny={})) is None
    loss_alone = {"tiny": RunOutcome("finished", 9, {9: {"validation/loss": 1.0}})}
    assert summarise(jobs("validation.every=1"), loss_alone) is None


def test_a_last_stage_without_a_validation_leaves_the_line_to_those_before():
    first, second = jobs("stages.first.validation.every=1", text=STAGES)
    assert first.validation is not None and second.validation is None
    found = summarise([first, second], validated(first={9: 0.5}, second={}))
    assert found == "validation exact match: first 0.50"
