"""Evaluations: the run's own figures, the same file after a kill, and figures by hand."""

from __future__ import annotations

import json
import os
import shutil

import attrs
import pytest

from hybridflow.core.errors import ConfigError
from hybridflow.inference.evaluation import Evaluation, Measure, evaluate
from hybridflow.inference.job import inference_tables, resolve, with_overrides
from hybridflow.inference.models import find_model
from hybridflow.inference.records import Record


def evaluation(run, out, samples=0, overrides=(), step=None) -> Evaluation:
    found = find_model(str(run), step=step)
    tables = inference_tables(found, out, scored=True)
    job = resolve(with_overrides(tables, overrides, found))
    return Evaluation(found.label, job, {"held-out": job.validation_data}, samples)


def quiet(text: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("step", [2, 4])
def test_it_equals_the_run_s_own_validation(sums, tmp_path, step):
    records = evaluate(evaluation(sums, tmp_path / "out", step=step), Measure(), quiet)["held-out"]
    done = json.loads((sums / "done.json").read_text())
    mean = sum(record.score for record in records) / len(records)
    assert len(records) == 20
    assert mean == pytest.approx(done["validations"][str(step)]["validation/score"], abs=1e-9)


def test_ended_anywhere_it_goes_on_to_the_same_file(sums, tmp_path):
    whole = evaluation(sums, tmp_path / "whole", samples=2)
    evaluate(whole, Measure(), quiet)
    expected = whole.records("held-out").read_bytes()
    assert len(expected.splitlines()) == 20 * 3

    for cut in (0, len(expected) // 3, len(expected) * 9 // 10):
        part = evaluation(sums, tmp_path / f"cut-{cut}", samples=2)
        said: list[str] = []
        evaluate(part, Measure(), quiet)
        part.records("held-out").write_bytes(expected[:cut])
        evaluate(part, Measure(), said.append)
        assert part.records("held-out").read_bytes() == expected
        assert any(text.endswith("of 20 rows are there") for text in said) == (cut > 0)


def test_what_is_complete_starts_nothing(sums, tmp_path):
    evaluate(evaluation(sums, tmp_path / "out"), Measure(), quiet)
    said: list[str] = []
    evaluate(evaluation(sums, tmp_path / "out"), Measure(), said.append)
    assert said == ["held-out: 20 of 20 rows are there"]


def test_other_settings_need_another_folder(sums, tmp_path):
    evaluate(evaluation(sums, tmp_path / "out"), Measure(), quiet)
    other = evaluation(sums, tmp_path / "out", overrides=["sampling.max_tokens=2"])
    with pytest.raises(ConfigError, match=r"an evaluation of other settings; .*\(--out\)"):
        evaluate(other, Measure(), quiet)
    records = evaluate(other, Measure(), quiet, overwrite=True)["held-out"]
    assert max(len(record.response_ids) for record in records) <= 2


def test_weights_that_were_written_anew_are_another_model(sums, tmp_path):
    run = shutil.copytree(sums, tmp_path / "sums")
    evaluate(evaluation(run, tmp_path / "out"), Measure(), quiet)
    evaluate(evaluation(run, tmp_path / "out"), Measure(), quiet)
    os.utime(run / "export/actor/model.safetensors", (1, 1))
    with pytest.raises(ConfigError, match="an evaluation of other weights"):
        evaluate(evaluation(run, tmp_path / "out"), Measure(), quiet)


def test_a_majority_needs_a_reward_that_says_what_an_answer_is(sums, tmp_path):
    with pytest.raises(ConfigError, match=r"--majority: reward .*even_tokens' does not say"):
        evaluate(evaluation(sums, tmp_path / "out", samples=2), Measure(majority=True), quiet)
    exact = evaluation(sums, tmp_path / "out", 2, ["reward.function=exact_match"])
    records = evaluate(exact, Measure(majority=True), quiet)["held-out"]
    assert all(record.answer == record.response.strip() for record in records)


RECORD = Record(0, None, "", "", [], 0.0, "stop", None, {})


def test_figures_by_hand():
    # Two rows: greedy right and wrong; of four samples three right, then one.
    records = []
    answers = [("7", "7", "8", "7"), ("5", "6", "6", "4")]
    scores = [(1.0, 1.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0)]
    for row in (0, 1):
        records.append(attrs.evolve(RECORD, row=row, score=1.0 - row))
        for sample in range(4):
            one = attrs.evolve(
                RECORD,
                row=row,
                sample=sample,
                score=scores[row][sample],
                answer=answers[row][sample],
            )
            records.append(one)
    values = Measure(pass_at=(1, 2, 4), majority=True).values(records, 4)
    assert values == {
        "greedy": [1.0, 0.0],
        "mean": [0.75, 0.25],
        "pass@1": [0.75, 0.25],
        "pass@2": [1.0, pytest.approx(0.5)],  # 1 - C(1, 2) / C(4, 2); 1 - 3 / 6
        "pass@4": [1.0, 1.0],
        "maj@4": [1.0, 0.0],
    }
    figures = Measure().figures(values)
    assert (figures["mean"].mean, figures["mean"].low, figures["mean"].high) == (0.5, 0.25, 0.75)


def test_differences_of_two_models_by_hand():
    mine, other = {"greedy": [1.0, 1.0, 0.0]}, {"greedy": [0.0, 1.0, 0.0]}
    result = Measure().differences(mine, other)["greedy"]
    assert (result.mean, result.low, result.high) == (pytest.approx(1 / 3), 0.0, 1.0)
