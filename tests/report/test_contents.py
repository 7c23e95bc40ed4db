"""What a page shows: all of a small run, and of a large one as much as fits, evenly."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from helpers.recorded import made_run, metrics_of, row_of, spans_of

from hybridflow.core.errors import ConfigError
from hybridflow.report.contents import contents, samples_contents, timeline_contents


def test_a_run_is_shown_as_it_was(tmp_path):
    made_run(tmp_path / "a", {"reward.options": {"api_key": "hunter2"}, "judge.token": "hunter2"})
    found = contents([tmp_path])
    [run] = found["runs"]
    assert run["settings"]["reward.options"] == '{"api_key": "***"}'
    assert (run["algorithm"], run["state"], run["step"]) == ("grpo", "finished", 40)
    assert "hunter2" not in json.dumps(found) and "api_key=***" in run["starts"][0]["command"]
    assert run["console"] == ["2026-11-27 22:34:43 a line"]
    assert run["metrics"]["step"] == list(range(1, 41))
    assert run["metrics"]["columns"]["actor/entropy"][0] == pytest.approx(2.0 - 1.5 / 40)
    assert found["differing"] == [] and found["seeds"] == []
    json.dumps(found, allow_nan=False)


def test_a_row_has_its_tokens_by_their_texts_and_one_number_where_all_are_equal(tmp_path):
    logprobs = np.array([-0.5, -1.0, -1.5], np.float32)
    row = row_of(
        3,
        1,
        length=3,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs + np.array([0.0, 0.25, -0.125], np.float32),
        values_of_two=np.zeros((2,), np.float32),
        score_of_all=float("nan"),
    )
    made_run(tmp_path / "a", rows=[row])
    shown = samples_contents(tmp_path / "a", 1000, 100)
    [one] = shown["rows"]
    assert [shown["pieces"][piece] for piece in one["response"]] == row["response_tokens"]
    prompt = shown["prompts"][one["prompt"]]
    assert [shown["pieces"][piece] for piece in prompt] == row["prompt_tokens"]
    assert one["tokens"] == {
        "rollout_logprobs": [-0.5, -1.0, -1.5],
        "mismatch": [0.0, 0.25, -0.125],  # the trainer's less the engine's
        "loss_mask": 1.0,
        "weight_version": 2.0,
        "advantages": -0.5,
    }
    assert one["values"]["scores"] == 1.0 and one["values"]["outcome"] == "complete"
    assert one["values"]["score_of_all"] is None and json.loads(one["meta"]) == {"answer": "a1"}


def test_what_an_environment_wrote_has_no_logprobs(tmp_path):
    row = row_of(1, 0, length=2, weight_version=np.array([0, -1], np.int32))
    made_run(tmp_path / "a", rows=[row])
    [one] = samples_contents(tmp_path / "a", 1000, 100)["rows"]
    assert one["tokens"]["rollout_logprobs"] == [-0.5, None]
    assert one["tokens"]["mismatch"] == [0.0, None]


def test_of_a_long_run_whole_groups_of_steps_that_lie_evenly_are_shown(tmp_path):
    rows = [row_of(step, at) for step in range(1, 201) for at in range(8)]
    validations = [row_of(step, at, data="validation") for step in (50, 100) for at in range(2)]
    made_run(tmp_path / "a", rows=[*rows, *validations], metrics=[], spans=[])
    shown = samples_contents(tmp_path / "a", 10**9, 300)
    assert shown["recorded"] == 1604 and len(shown["rows"]) <= 300
    trained = [row for row in shown["rows"] if row["data"] == "train"]
    steps = sorted({row["step"] for row in trained})
    assert {after - before for before, after in pairwise(steps[:-1])} == {8}
    assert steps[-1] == 200
    sizes = {(row["step"], row["group"]): 0 for row in trained}
    for row in trained:
        sizes[row["step"], row["group"]] += 1
    assert set(sizes.values()) == {4}
    assert {row["step"] for row in shown["rows"] if row["data"] == "validation"} == {50, 100}

    # By tokens
    shown = samples_contents(tmp_path / "a", 600, 10**9)
    assert 0 < sum(len(row["response"]) for row in shown["rows"]) <= 600
    # One group that is larger than all
    assert len(samples_contents(tmp_path / "a", 3, 2)["rows"]) == 2


def test_a_timeline_has_its_slowest_steps_and_sums_over_all(tmp_path):
    spans = [span for step in range(1, 101) for span in spans_of(step)]
    for span in spans:
        if span["step"] == 37:
            span["seconds"] *= 10
    made_run(tmp_path / "a", spans=spans, metrics=[], rows=[])
    shown = timeline_contents(tmp_path / "a", 140)
    assert 37 in shown["steps"] and 100 in shown["steps"] and shown["recorded"] == 100
    assert sum(map(len, shown["steps"].values())) <= 140
    assert shown["busy"]["main/1"] == pytest.approx(99 * 0.95 + 9.5)
    waits = {(process, cause): seconds for process, cause, seconds in shown["waits"]}
    assert waits["main/0", "reward/score@main/0"] == pytest.approx(2.0)
    assert waits["controller", "actor/update@main/0"] == pytest.approx(99 * 0.35 + 3.5)
    [process, role, name, start, length, *_] = shown["steps"][1][2]
    texts = shown["texts"]
    assert [texts[process], texts[role], texts[name]] == ["main/0", "actor", "update"]
    assert (start, length) == (620.0, 350.0)  # milliseconds since the step's first span


def test_runs_that_differ_by_their_seeds_alone_belong_together(tmp_path):
    for name, settings in {
        "a": {"run.seed": 0},
        "b": {"run.seed": 1, "run.name": "b"},
        "c": {"actor.optimizer.lr": 0.1},
    }.items():
        made_run(tmp_path / name, settings, rows=[], spans=[])
    found = contents([tmp_path])
    assert [run["folder"] for run in found["runs"]] == [str(tmp_path / name) for name in "abc"]
    assert found["seeds"] == [[0, 1]]
    keys = [one["key"] for one in found["differing"]]
    assert keys == ["run.seed", "run.name", "actor.optimizer.lr"]
    assert found["differing"][0]["values"] == ["0", "1", "0"]
    # The same folder twice is one run.
    assert len(contents([tmp_path, tmp_path / "a"])["runs"]) == 3


def test_a_curve_of_very_many_steps_is_thinned_out(tmp_path):
    metrics = [metrics_of(step) for step in range(1, 5002)]
    made_run(tmp_path / "a", metrics=metrics, rows=[], spans=[])
    [run] = contents([tmp_path / "a"])["runs"]
    steps = run["metrics"]["step"]
    assert steps[:3] == [1, 4, 7] and steps[-1] == 5001 and run["metrics"]["every"] == 3


def test_what_was_not_recorded_is_empty(tmp_path):
    made_run(tmp_path / "a", metrics=[], rows=[], spans=[])
    (tmp_path / "a/console.log").unlink()
    [run] = contents([tmp_path / "a"])["runs"]
    assert run["samples"]["rows"] == [] and run["timeline"]["steps"] == {}
    assert run["memory"] == [] and run["console"] == [] and run["findings"] == []
    with pytest.raises(ConfigError, match="has no runs"):
        (tmp_path / "empty").mkdir()
        contents([tmp_path / "empty"])


def test_no_torch_is_imported(tmp_path):
    made_run(tmp_path / "a", steps=2)
    script = (
        "import sys; from pathlib import Path; from hybridflow.report.contents import contents; "
        "contents([Path('a')]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
