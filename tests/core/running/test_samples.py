"""Which rows of a step are recorded, and what is kept of them."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch
from helpers.models import hugging_face_model

from hybridflow.core.running.samples import RowRecorder
from hybridflow.core.values.batch import Batch


def recorder_of(run, groups: int) -> RowRecorder:
    run.recorder = run.ctx.recorder = RowRecorder(run.session, run.ctx, groups)
    return run.recorder


def rollouts(run, prompts: int = 3) -> Batch:
    """Two responses each, with their scores."""
    batch = run.ctx.actor.generate(run.ctx.prompts(prompts).repeat(2))
    return batch.join(run.ctx.reward.score(batch))


def trained(run, batch: Batch, epochs: int = 1) -> list[dict]:
    """Train on the batch in mini-batches of three rows; return what was recorded."""
    loss = run.job.algorithm.losses()["actor"]
    advantages = torch.arange(batch.rows, dtype=torch.float32)
    lengths = batch["response_ids"].lengths
    batch = batch.with_columns(
        advantages=attrs.evolve(
            batch["loss_mask"],
            values=torch.repeat_interleave(advantages, torch.from_numpy(lengths)),
        )
    ).join(run.ctx.actor.logprobs(batch))
    for mini in run.ctx.minibatches(batch, 3, epochs):
        run.ctx.actor.update((mini, loss))
    recorded = run.ctx.finish().recorded
    run.session.runtime.traffic.take()
    rows = run.recorder.take(7, recorded)
    assert sum(run.session.runtime.traffic.take().values()) == 0.0
    return rows


def test_all_rows_of_the_first_groups_are_recorded_once_with_all_that_is_known(run_of, tiny):
    run = run_of()
    recorder_of(run, 2)
    batch = rollouts(run)
    model = hugging_face_model(tiny)
    rows = trained(run, batch, epochs=2)

    # The groups of the first mini-batch, whose order is drawn; both rows of each.
    groups = np.asarray(batch["group"].values)
    assert len(rows) == 4 and [row["step"] for row in rows] == [7] * 4
    chosen = [int(np.flatnonzero(groups == row["group"])[0]) for row in rows[::2]]
    expected = [number for first in chosen for number in (first, first + 1)]
    assert chosen[0] < chosen[1]

    tokenizer = tiny.session.prepared.tokenizer
    texts = {"finish_reason", "outcome"}
    for row, at in zip(rows, expected, strict=True):
        prompt, response = (list(batch[name])[at] for name in ("prompt_ids", "response_ids"))
        assert row["data"] == "train" and row["response"] == tokenizer.decode(response.numpy())
        shown = [tokenizer.decode([token], skip_special=False) for token in response.tolist()]
        assert row["response_tokens"] == shown and row["prompt_tokens"][0] == "<bos>"
        for name in ("prompt_ids", "response_ids", "rollout_logprobs", "loss_mask"):
            assert row[name].tolist() == list(batch[name])[at].tolist(), name
        assert row["advantages"].tolist() == [float(at)] * len(response)
        assert row["scores"] == float(batch["scores"].values[at])
        assert {name: row[name] for name in texts} == {
            name: batch[name].values[at] for name in texts
        }
        assert json.loads(row["meta"]) == batch["meta"].values[at]

        # The trainer's logprobs, before the step's updates, by Hugging Face's model.
        ids = torch.cat([prompt, response]).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, response.long()[:, None])[:, 0]
        assert row["old_logprobs"] == pytest.approx(logprobs.numpy(), abs=1e-5)
        assert row["logprobs"].shape == row["old_logprobs"].shape


def test_the_logprobs_of_the_loss_are_those_of_the_rows(run_of):
    # One update: the loss's own forward pass has the weights that generated.
    run = run_of()
    recorder_of(run, 9)
    batch = rollouts(run)
    loss = run.job.algorithm.losses()["actor"]
    run.ctx.actor.update((batch.with_columns(advantages=batch["loss_mask"]), loss))
    rows = run.recorder.take(1, run.ctx.finish().recorded)
    assert len(rows) == 6 and [row["sample_id"] for row in rows] == sorted(
        row["sample_id"] for row in rows
    )
    for row in rows:
        assert row["logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
    assert run.recorder.take(2, {}) == []


def test_rows_that_were_only_scored_are_recorded_where_there_is_no_update(run_of):
    run = run_of()
    recorder_of(run, 1)
    batch = rollouts(run)
    run.ctx.finish()
    rows = run.recorder.take(1, {})
    assert [row["sample_id"] for row in rows] == batch["sample_id"].values[:2].tolist()
    assert [row["scores"] for row in rows] == batch["scores"].values[:2].tolist()
    assert run.recorder.take(1, {}) == []


def test_none_are_kept_where_none_are_asked_for_or_what_is_aside(run_of):
    run = run_of()
    recorder_of(run, 0)
    assert trained(run, rollouts(run)) == []
    recorder_of(run, 1)
    with run.ctx.aside():
        rollouts(run)
    run.ctx.actor.generate(run.ctx.prompts(1))
    run.ctx.finish()
    assert run.recorder.take(1, {}) == []


def test_rows_that_are_of_no_group_are_not_recorded(run_of):
    run = run_of()
    recorder_of(run, 1)
    batch = run.ctx.actor.generate(run.ctx.prompts(3).repeat(2))
    own = batch.select([name for name in batch.names if name != "group"])
    assert trained(run, own.join(run.ctx.reward.score(own))) == []
