"""Probe rows: what engines say with the weights that they got, as the trainer scores it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridflow.core.errors import MismatchError
from hybridflow.core.running.checkpoint import checkpoints_of
from hybridflow.core.running.probes import Probes
from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column
from hybridflow.kit.testing.runs import TinyRun

APART = {
    "run": {"max_staleness": 1},
    "pools": {"main": [1], "engines": [1]},
    "actor": {"generation": {"pool": "engines"}},
}
ALGORITHM = {"name": "grpo", "prompts_per_step": 4, "group_size": 2, "correction": "truncate"}


def probed(made: TinyRun):
    """(probes, the actor's engines, which have its weights)."""
    run = Run(made.job, made.session, made.ctx, checkpoints_of(made.job))
    rollout = made.session.rollouts["actor"]
    rollout.sync()
    return Probes(run), rollout


def off_by(monkeypatch, made: TinyRun, by: list[float]) -> list[Batch]:
    """Let the trainer's logprobs be off the engines' by `by`, again and again; what it is given."""
    given = []

    def logprobs(batch, columns):
        given.append(batch)
        engines = batch["rollout_logprobs"]
        values = torch.as_tensor(engines.values)
        differing = torch.tensor(by, dtype=torch.float64).repeat(len(values) // len(by))
        return Batch({"logprobs": Column(values + differing, engines.lengths)})

    monkeypatch.setattr(made.session.groups["actor"][1], "logprobs", logprobs, raising=False)
    return given


def test_a_probe_has_64_tokens_of_the_present_weights_and_other_ones_after_each_step(monkeypatch):
    with TinyRun(ALGORITHM, APART) as made:
        probes, rollout = probed(made)
        before = made.session.data.state().result()
        given = off_by(monkeypatch, made, [0.0])
        for probes.run.step in (0, 1):
            probes.compare("actor", rollout)
        assert made.session.data.state().result() == before
    first, second = (batch["response_ids"] for batch in given)
    # sampling.max_tokens is 4
    assert first.lengths.tolist() == second.lengths.tolist() == [4] * 16
    assert not torch.equal(first.values, second.values)


def test_figures_are_those_of_updates(monkeypatch):
    """By hand: of four tokens d is 1e-4, -2e-4, 0 and 0."""
    with TinyRun(ALGORITHM, APART) as made:
        probes, rollout = probed(made)
        off_by(monkeypatch, made, [1e-4, -2e-4, 0.0, 0.0])
        found = probes.compare("actor", rollout)
    assert found["actor/mismatch_mean"] == pytest.approx(3e-4 / 4, rel=1e-3)
    k3 = (math.exp(1e-4) - 1 - 1e-4) + (math.exp(-2e-4) - 1 + 2e-4)
    assert found["actor/mismatch_kl"] == pytest.approx(k3 / 4, rel=1e-2)
    assert found.maxima["actor/mismatch_max_ratio"] == pytest.approx(math.exp(2e-4), rel=1e-6)


@pytest.mark.parametrize("by", [0.002, math.nan])
def test_above_the_limit_the_run_ends(monkeypatch, by):
    with TinyRun(ALGORITHM, APART) as made:
        probes, rollout = probed(made)
        off_by(monkeypatch, made, [by])
        with pytest.raises(MismatchError, match=r"run\.mismatch_stop = 0\.001") as raised:
            probes.compare("actor", rollout)
    assert (raised.value.role, raised.value.phase) == ("actor", "probe")


def test_few_rows_are_used_again_and_without_a_limit_nothing_is_asked(monkeypatch):
    with TinyRun(ALGORITHM, {**APART, "data": {"limit": 5}}) as made:
        probes, rollout = probed(made)
        given = off_by(monkeypatch, made, [0.0])
        probes.compare("actor", rollout)
        prompts = [row.tolist() for row in given[0]["prompt_ids"]]
        assert prompts[:5] == prompts[5:10] and len(prompts) == 16
        assert np.unique(given[0]["sample_id"].values).tolist() == list(range(16))
    unlimited = {**APART, "run": {"max_staleness": 1, "mismatch_stop": math.inf}}
    with TinyRun(ALGORITHM, unlimited) as made:
        probes, rollout = probed(made)
        given = off_by(monkeypatch, made, [0.0])
        assert not probes.compare("actor", rollout).values() and given == []
