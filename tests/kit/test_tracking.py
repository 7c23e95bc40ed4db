"""What trackers of services tell of a run, and how they find it again."""

from __future__ import annotations

import pytest
from helpers.recorded import made_run, row_of

from hybridflow.kit.tracking import (
    ServiceConfig,
    is_due,
    plain_json,
    remember_id,
    remembered_id,
    run_facts,
    sample_table,
)


def test_a_run_is_told_by_its_place_its_settings_and_its_last_start(tmp_path):
    settings = {
        "run.folder": str(tmp_path / "runs"),
        "reward.options": {"api_key": "hunter2", "url": "x"},
        "judge.token": "hunter2",
        "sampling.max_tokens": 8,
    }
    folder = made_run(tmp_path / "runs/sums/grpo", settings, metrics=[], rows=[], spans=[])
    facts = run_facts(folder, ServiceConfig())
    assert facts.name == "sums/grpo" and facts.origin["host"] == {"name": "box"}
    assert facts.config["sampling.max_tokens"] == 8
    assert "hunter2" not in repr(facts.config)
    assert facts.config["reward.options"] == {"api_key": "***", "url": "x"}
    assert run_facts(folder, ServiceConfig(run_name="mine")).name == "mine"

    # A run of elsewhere, and one whose run.json cannot be read
    other = made_run(tmp_path / "else", {"run.folder": "/nowhere"}, metrics=[], rows=[], spans=[])
    assert run_facts(other, ServiceConfig()).name == "else"
    (other / "run.json").write_text("{")
    assert run_facts(other, ServiceConfig()).config == {}


def test_a_run_that_goes_on_has_its_id_and_one_that_begins_a_new_one(tmp_path):
    first, again = remembered_id(tmp_path, "wandb", 0)
    assert not again and remembered_id(tmp_path, "wandb", 5) == (first, True)
    assert remembered_id(tmp_path, "mlflow", 5)[1] is False  # it was not told of this run before
    remember_id(tmp_path, "mlflow", "theirs")
    assert remembered_id(tmp_path, "mlflow", 5) == ("theirs", True)
    assert remembered_id(tmp_path, "wandb", 5) == (first, True)
    second, again = remembered_id(tmp_path, "wandb", 0)
    assert not again and second != first
    (tmp_path / "trackers.json").write_text("{")
    assert remembered_id(tmp_path, "wandb", 5)[1] is False


@pytest.mark.parametrize(
    "every, step, data, due",
    [
        (10, 1, "train", True),
        (10, 9, "train", False),
        (10, 20, "train", True),
        (10, 7, "validation", True),
        (0, 20, "validation", False),
    ],
)
def test_tables_are_of_some_steps_and_of_every_validation(every, step, data, due):
    assert is_due(every, step, [row_of(step, 0, data=data)]) is due
    assert not is_due(every, step, [])


def test_a_table_has_texts_and_numbers_of_rows_and_no_tokens():
    rows = [row_of(2, 0), row_of(2, 1, exact=0.5)]
    titles, cells = sample_table(rows)
    assert titles == [
        *("step", "data", "group", "prompt", "response", "scores", "outcome", "exact"),
    ]
    assert cells[0] == [2, "train", 200, "p4", rows[0]["response"], 0.0, "complete", None]
    assert cells[1][-1] == 0.5


def test_settings_become_text():
    assert (plain_json("a"), plain_json([1, "b"]), plain_json(None)) == ("a", '[1, "b"]', "null")
