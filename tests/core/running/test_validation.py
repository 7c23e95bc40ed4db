"""Validation: greedy responses scored, losses on given ones, and no trace in training."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch
from helpers.jobs import HELD_OUT, Kept, reporter
from helpers.models import hugging_face_model

from hybridflow.core.running.validation import validate, validate_if_due
from hybridflow.kit.testing.runs import TinyRun


def greedy(model: torch.nn.Module, prompt: torch.Tensor, eos: int) -> np.ndarray:
    ends = {"max_new_tokens": 4, "eos_token_id": eos, "pad_token_id": 0}
    out = model.generate(prompt[None].long(), do_sample=False, **ends)
    return out[0, len(prompt) :].numpy()


def test_the_score_is_the_mean_over_the_greedy_responses(run_of, tiny):
    run, kept = run_of(), Kept()
    report, out = reporter(run, tiny)
    report.observers = [kept]
    run.step = 4
    run.ctx.counters["samples"] = 17
    found = validate(run, report)

    tokenizer, model = tiny.session.prepared.tokenizer, hugging_face_model(tiny)
    rows = run.session.rows("validation", 0, 6)
    responses = [greedy(model, prompt, tokenizer.eos_id) for prompt in rows["prompt_ids"]]
    scores = [float((response % 2 == 0).mean()) for response in responses]  # even_tokens
    assert found["validation/score"] == pytest.approx(np.mean(scores))
    lengths = [len(response) for response in responses]
    assert found["validation/response_length"] == pytest.approx(np.mean(lengths))
    assert run.validations == {4: found} and "step 4: validation: " in out.getvalue()
    assert run.ctx.counters["samples"] == 17 and run.ctx.finish().values() == {}

    samples = kept.samples_of[4]
    assert [sample["step"] for sample in samples] == [4, 4, 4]  # validation.samples
    for at, sample in enumerate(samples):
        meta = rows["meta"].values[at]
        assert sample["prompt"] == meta["prompt"] and json.loads(sample["meta"]) == meta
        assert sample["response"] == tokenizer.decode(responses[at])
        assert sample["data"] == "validation"
        assert sample["scores"] == pytest.approx(scores[at])
        ended = responses[at][-1] == tokenizer.eos_id
        assert sample["finish_reason"] == ("stop" if ended else "length")


def test_the_size_of_the_calls_changes_nothing(run_of, tiny):
    found, kept = [], Kept()
    for rows, samples in ((1, 3), (4, 0), (100, 0)):
        run = run_of(batch_rows=rows, samples=samples)
        report, _ = reporter(run, tiny)
        report.observers = [kept]
        values = validate(run, report)
        found.append({name: value for name, value in values.items() if "seconds" not in name})
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])
    assert [len(rows) for rows in kept.samples_of.values()] == [3]  # of three calls, and no others


@pytest.mark.parametrize(
    ("section", "steps"),
    [
        ({"every": 2}, [2, 4, 5]),
        ({"every": 2, "at_start": True}, [0, 2, 4, 5]),
        ({"every": 0}, [5]),
        ({"every": 5}, [5]),
    ],
    ids=str,
)
def test_it_comes_when_it_is_due_and_at_the_end_once_a_step(run_of, tiny, section, steps):
    run = run_of(generate=False, **section)
    report, out = reporter(run, tiny, steps=5)
    for run.step in range(6):
        validate_if_due(run, report)
        validate_if_due(run, report)
    validate_if_due(run, report, ended=True)
    assert list(run.validations) == steps
    assert out.getvalue().count("validation:") == len(steps)


def test_without_its_table_there_is_none(run_of, tiny):
    run = run_of()
    run.job = attrs.evolve(run.job, validation=None)
    validate_if_due(run, reporter(run, tiny)[0], ended=True)
    assert run.validations == {}


@pytest.fixture(scope="module")
def tuned():
    tables = {"validation": {**HELD_OUT, "generate": False}}
    with TinyRun({"name": "sft", "batch_size": 4}, tables) as run:
        yield run


def test_a_loss_is_that_of_the_set_s_responses(run_of, tuned):
    run = run_of(tuned)
    found = validate(run, reporter(run, tuned)[0])
    model, total, count = hugging_face_model(tuned), 0.0, 0
    rows = run.session.rows("validation", 0, 6)
    for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True):
        ids = torch.cat([prompt, response]).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, response.long(), reduction="sum"))
        count += len(response)
    assert found["validation/nll"] == pytest.approx(total / count, rel=1e-5)
    assert "validation/score" not in found


@pytest.fixture(scope="module")
def preferring():
    tables = {"validation": {**HELD_OUT, "generate": False}, "data": {"rejected": "{a:02d}"}}
    with TinyRun({"name": "dpo", "pairs_per_step": 2}, tables) as run:
        yield run


def test_a_loss_that_reads_a_reference_gets_what_the_reference_says(run_of, preferring):
    """Policy and reference are the same: -log sigmoid(0), and neither of a pair is preferred."""
    run = run_of(preferring)
    found = validate(run, reporter(run, preferring)[0])
    assert found["validation/dpo_loss"] == pytest.approx(np.log(2))
    assert found["validation/accuracy"] == 0.5
    assert found["validation/margin"] == pytest.approx(0.0, abs=1e-6)
