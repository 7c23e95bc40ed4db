"""samples.jsonl: which rollouts are kept, and what a line says."""

from __future__ import annotations

import json

import attrs
import torch

from hybridflow.core.running.samples import write_rollouts
from hybridflow.core.values.batch import Batch


def kept(run) -> list[dict]:
    path = run.job.folder / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def with_samples(run, samples: int):
    run.job = attrs.evolve(run.job, run=attrs.evolve(run.job.run, samples=samples))
    return run


def rollouts(run, prompts: int = 3) -> Batch:
    """Two responses each, with their scores."""
    batch = run.ctx.actor.generate(run.ctx.prompts(prompts).repeat(2))
    batch = batch.join(run.ctx.reward.score(batch))
    run.ctx.finish()
    return batch


def test_the_first_rollout_of_each_of_the_first_groups_is_kept(run_of, tiny):
    run = with_samples(run_of(), 2)
    run.step = 7
    batch = rollouts(run)
    run.session.runtime.traffic.take()
    write_rollouts(run)

    tokenizer = tiny.session.prepared.tokenizer
    expected = []
    for row in (0, 2):
        response = list(batch["response_ids"])[row]
        meta = batch["meta"].values[row]
        expected.append(
            {
                "step": 7,
                "data": "train",
                "prompt": f"<bos>{meta['prompt']}",
                "response": tokenizer.decode(response.numpy(), skip_special=False),
                "answer": meta["answer"],
                "score": float(torch.as_tensor(batch["scores"].values)[row]),
                "finish_reason": batch["finish_reason"].values[row],
                "outcome": batch["outcome"].values[row],
            }
        )
    assert kept(run) == expected
    assert sum(run.session.runtime.traffic.take().values()) == 0.0


def test_a_step_is_sampled_once_and_more_than_its_groups_are_all_of_them(run_of):
    run = with_samples(run_of(), 9)
    rollouts(run)
    write_rollouts(run)
    assert len(kept(run)) == 3
    write_rollouts(run)
    assert len(kept(run)) == 3


def test_none_are_kept_where_none_are_asked_for_or_nothing_is_scored(run_of):
    run = with_samples(run_of(), 0)
    rollouts(run)
    write_rollouts(run)
    run = with_samples(run, 1)
    run.ctx.actor.generate(run.ctx.prompts(1))
    run.ctx.finish()
    write_rollouts(run)
    assert kept(run) == []


def test_rows_that_are_no_rollouts_of_drawn_prompts_are_not_kept(run_of):
    run = with_samples(run_of(), 1)
    batch = run.ctx.actor.generate(run.ctx.prompts(1))
    own = batch.select([name for name in batch.names if name != "group"])
    run.ctx.reward.score(own)
    assert "reward/equal_groups" not in run.ctx.finish().values()
    write_rollouts(run)
    assert kept(run) == []
