"""Rules that say what is wrong with a run: each on numbers that show it, and none on healthy ones.

The same rules over runs that were really broken are in tests/report/test_broken_runs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.recorded import made_run, metrics_of, row_of, span_of, spans_of

from hybridflow.kit.runs import find_runs
from hybridflow.report.contents import run_contents

STEPS = range(1, 41)


def found(folder, level="alarm", **options) -> dict[str, dict]:
    """rule -> its finding, of a run with these numbers."""
    made_run(folder / "run", **options)
    [run] = find_runs(folder / "run")
    return {one["rule"]: one for one in run_contents(run)["findings"] if one["level"] == level}


def every_step(**changes):
    """Metrics of all steps; a change may be a function of the step."""
    return [
        metrics_of(
            step,
            **{name: value(step) if callable(value) else value for name, value in changes.items()},
        )
        for step in STEPS
    ]


def every_row(**changes):
    return [
        row_of(
            step,
            at,
            **{
                name: value(step, at) if callable(value) else value
                for name, value in changes.items()
            },
        )
        for step in STEPS
        for at in range(8)
    ]


def test_a_run_that_goes_well_has_no_findings(tmp_path):
    assert found(tmp_path) == {}
    assert found(tmp_path / "notes", "note") == {}


def test_a_run_that_ended_early_is_a_note(tmp_path):
    one = found(tmp_path, "note", done=False)["ended"]
    assert one["first"] == 40 and "--resume" in one["remedy"]


def test_mismatch_from_the_first_step_is_another_computation(tmp_path):
    rules = found(tmp_path, metrics=every_step(actor__mismatch_mean=0.03))
    assert set(rules) == {"mismatch"}
    one = rules["mismatch"]
    assert (one["first"], one["last"]) == (1, 40) and "0.03 nats" in one["text"]


@pytest.mark.parametrize(
    "settings, value, is_told",
    [
        ({}, 0.0003, True),
        ({"rollout.dtype": "bfloat16"}, 0.0003, False),
        ({"rollout.dtype": "bfloat16"}, 0.02, True),
        ({"run.mismatch_warn": 0.5}, 0.02, False),
        ({"run.mismatch_stop": 0.05}, 0.02, True),
        ({"run.mismatch_stop": "inf", "run.mismatch_warn": "inf"}, 0.0003, True),
    ],
)
def test_what_is_expected_of_mismatch_follows_the_precision(tmp_path, settings, value, is_told):
    rules = found(tmp_path, settings=settings, metrics=every_step(actor__mismatch_mean=value))
    assert ("mismatch" in rules) == is_told


def test_mismatch_that_begins_later_is_that_of_stale_weights(tmp_path):
    metrics = every_step(actor__mismatch_mean=lambda step: 0.0 if step < 5 else 0.01 * step)
    rules = found(tmp_path, metrics=metrics)
    assert set(rules) == {"stale weights"} and rules["stale weights"]["first"] == 5


def test_versions_that_stand_still_are_stale_weights(tmp_path):
    rows = every_row(weight_version=lambda step, at: np.full(6, min(step - 1, 20), np.int32))
    one = found(tmp_path, rows=rows)["stale weights"]
    assert one["first"] == 22


def test_tokens_of_an_environment_that_are_trained_on(tmp_path):
    turns = np.array([0, 0, -1, -1, 1, 1], np.int32)
    good = every_row(turn=turns, loss_mask=(turns >= 0).astype(np.uint8))
    assert found(tmp_path / "good", rows=good) == {}
    one = found(tmp_path / "bad", rows=every_row(turn=turns))["mask"]
    assert f"{2 * 8 * 40} recorded tokens" in one["text"]


def test_tokens_of_the_model_that_are_not_trained_on(tmp_path):
    mask = np.array([1, 1, 1, 0, 0, 0], np.uint8)
    assert "50%" in found(tmp_path / "bad", rows=every_row(loss_mask=mask))["mask"]["text"]
    # Of rows that have failed nothing is to be trained on.
    failed = every_row(loss_mask=np.zeros(6, np.uint8), outcome="failed_tool")
    assert "mask" not in found(tmp_path / "failed", rows=failed)


@pytest.mark.parametrize(
    "settings, small",
    [
        ({"algorithm.prompts_per_step": 2}, True),
        ({"algorithm.mini_batch_size": 12}, True),
        ({"algorithm.mini_batch_size": 16}, False),
        ({"algorithm.group_size": None}, False),
    ],
)
def test_few_groups_in_an_update(tmp_path, settings, small):
    assert ("small batch" in found(tmp_path, settings=settings)) == small


def test_a_reward_that_rises_by_the_same_response_to_all(tmp_path):
    same = np.array([5, 5, 5, 5, 5, 5], np.int32)
    rows = every_row(
        response_tokens=lambda step, at: (
            ["t5"] * 6 if step > 20 else [f"t{(13 * step + 7 * at + k) % 97}" for k in range(6)]
        ),
        response_ids=same,
    )
    rules = found(tmp_path, rows=rows)
    assert set(rules) == {"reward hacked"} and "other prompts" in rules["reward hacked"]["text"]


def test_a_reward_that_rises_with_the_length_or_while_a_part_of_it_falls(tmp_path):
    longer = every_step(actor__response_length=lambda step: 10.0 + 5 * step)
    assert "tokens" in found(tmp_path / "a", metrics=longer)["reward hacked"]["text"]
    parts = every_step(
        reward__exact=lambda step: 0.8 - 0.015 * step, reward__exact_min=0.0, reward__exact_max=1.0
    )
    assert "exact fell" in found(tmp_path / "b", metrics=parts)["reward hacked"]["text"]


def test_entropy_that_is_gone_before_the_reward_is_there(tmp_path):
    sure = {"actor__entropy": lambda step: 2.0 * 0.8**step, "reward__equal_groups": 0.95}
    poor = every_step(**sure, reward__scores=0.3)
    assert set(found(tmp_path / "poor", metrics=poor)) == {"entropy collapsed"}
    # A solved task is no collapse.
    good = every_step(**sure, reward__scores=lambda step: min(1.0, step / 10))
    assert found(tmp_path / "good", metrics=good) == {}


def test_groups_that_have_no_spread(tmp_path):
    rules = found(tmp_path, metrics=every_step(reward__equal_groups=0.9, reward__scores=0.05))
    assert set(rules) == {"groups without spread"} and "90%" in next(iter(rules.values()))["text"]


def test_clipped_ratios_and_responses(tmp_path):
    assert set(found(tmp_path / "a", metrics=every_step(actor__clip_fraction=0.4))) == {"clipping"}
    cut = every_step(actor__clipped=0.7, reward__scores=0.2)
    assert set(found(tmp_path / "b", metrics=cut)) == {"truncated"}


def test_steps_that_go_too_far(tmp_path):
    assert set(found(tmp_path / "a", metrics=every_step(actor__approx_kl=0.5))) == {"divergence"}
    grown = every_step(actor__grad_norm=lambda step: 1.0 if step < 20 else 50.0)
    assert "from 1 to 50" in found(tmp_path / "b", metrics=grown)["divergence"]["text"]


def test_rows_that_fail(tmp_path):
    one = found(tmp_path, metrics=every_step(actor__failed_tool=0.1))["failures"]
    assert "10.0%" in one["text"] and "actor/failed_tool" in one["text"]


def test_engines_that_were_started_again(tmp_path):
    metrics = every_step(
        actor__engine_restarts=lambda step: float(step in (7, 9)),
        seconds__step=lambda step: 30.0 if step in (7, 9) else 1.0,
    )
    rules = found(tmp_path, metrics=metrics)
    assert set(rules) == {"engine restarts"}  # which explains that these steps were long
    assert "2 times, in step 7, 9" in rules["engine restarts"]["text"]


def test_an_engine_that_waits_for_environments(tmp_path):
    one = found(tmp_path, metrics=every_step(actor__environment_wait_seconds=0.55))["slow tool"]
    assert "55%" in one["text"] and one["where"] == "time"


def test_a_step_that_stalls(tmp_path):
    metrics = every_step(
        seconds__step=lambda step: 9.0 if step == 30 else 1.0,
        seconds__actor__update=lambda step: 8.4 if step == 30 else 0.35,
    )
    rules = found(tmp_path, metrics=metrics)
    assert set(rules) == {"stall"} and rules["stall"]["first"] == 30
    assert "actor/update (8.40 s)" in rules["stall"]["text"]


def test_a_rank_that_is_slower_than_the_others(tmp_path):
    spans = []
    for step in STEPS:
        own = spans_of(step)
        for span in own:
            if span["process"] == "main/1" and span["name"] == "generate":
                span["seconds"] = 1.5
        spans += own
    rules = found(tmp_path, spans=spans)
    assert set(rules) == {"slow rank"}
    assert rules["slow rank"]["text"].startswith("main/1 takes more than twice as long")


def test_a_process_that_waits_for_most_of_the_time_is_a_note(tmp_path):
    def spans(step):
        waits = {"waited": 0.8, "waited_for": "reward/score@judges/0"}
        return [
            span_of(step, "judges/0", "reward", "score", 1.8e9 + step, 0.9),
            span_of(step, "main/0", "actor", "update", 1.8e9 + step + 0.9, 0.1, **waits),
        ]

    rules = found(tmp_path, "note", spans=[span for step in STEPS for span in spans(step)])
    assert set(rules) == {"idle"} and "reward/score@judges/0" in rules["idle"]["text"]


def test_a_prediction_that_is_off_is_a_note(tmp_path):
    rules = found(tmp_path / "off", "note", metrics=every_step(seconds__predicted=0.4))
    assert set(rules) == {"prediction"}
    assert found(tmp_path / "near", "note", metrics=every_step(seconds__predicted=0.9)) == {}


def test_alarms_come_before_notes(tmp_path):
    made_run(tmp_path / "run", done=False, metrics=every_step(actor__clip_fraction=0.5))
    [run] = find_runs(tmp_path / "run")
    levels = [one["level"] for one in run_contents(run)["findings"]]
    assert levels == ["alarm", "note"]
