"""The smallest real run: from an instance or a table, over the kit's own settings."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.sft import SFT, SFTConfig
from hybridflow.core.contracts.role import Role
from hybridflow.kit.testing import sample
from hybridflow.kit.testing.runs import (
    MODEL,
    TABLES,
    TinyRun,
    algorithm_table,
    even_tokens,
    tiny_job,
)


class Counts(SFT):
    """With a role that is not trained, and its steps as its state."""

    steps = 0

    def roles(self):
        return (*super().roles(), Role("ref"))

    def step(self, ctx):
        super().step(ctx)
        self.steps += 1
        ctx.counters["drawn"] = self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.fixture
def counts():
    return Counts(SFTConfig(batch_size=4))


def test_an_instance_becomes_its_path_and_the_settings_that_it_changes():
    table = algorithm_table(Counts(SFTConfig(batch_size=3)))
    assert table == {"name": f"{__name__}:Counts", "batch_size": 3}
    assert algorithm_table(Counts(SFTConfig())) == {"name": f"{__name__}:Counts"}


def test_a_class_inside_a_function_cannot_be_named():
    class Local(SFT):
        pass

    with pytest.raises(ValueError, match="define Local at the top level of a module"):
        algorithm_table(Local(SFTConfig()))


def test_tables_lie_over_the_kits_and_leave_them_as_they_were():
    actor = {"micro_batch_tokens": 64, "optimizer": {"lr": 0.5}}
    job = tiny_job({"algorithm": {"name": "sft"}, "actor": actor, "data": {"limit": 12}})
    spec = job.models["actor"].spec
    assert (spec.micro_batch_tokens, spec.optimizer.lr) == (64, 0.5)
    assert spec.model.hf_config == MODEL
    assert job.data.limit == 12 and job.data.source == "arithmetic"
    assert TABLES["actor"]["micro_batch_tokens"] == 256 and TABLES["data"]["limit"] == 256


def test_the_trained_role_moves_by_its_learning_rate_and_the_other_does_not(counts):
    with TinyRun(counts, {"actor": {"optimizer": {"lr": 1e-2}}}) as run:
        assert run.algorithm is not counts
        before = {role: run.weights(role) for role in ("actor", "ref")}
        sums = run.checksums()
        metrics = run.step()
        after = {role: run.weights(role) for role in ("actor", "ref")}
        assert (run.ctx.step, run.algorithm.steps, counts.steps) == (1, 1, 0)
        assert run.worker("actor").backend.version == 1
        moves = [(after["actor"][n] - p).abs().max() for n, p in before["actor"].items()]
        assert float(max(moves)) == pytest.approx(1e-2, rel=0.01), "AdamW's first step is lr"
        assert all(torch.equal(after["ref"][n], p) for n, p in before["ref"].items())
        found = run.checksums()
    assert found["ref"] == sums["ref"] and found["actor"] != sums["actor"]
    assert any(name.startswith("actor/") for name in metrics)


def test_a_saved_run_goes_on_where_it_was(counts, tmp_path):
    with TinyRun(counts) as run:
        run.step()
        run.save(tmp_path)
        saved = run.checksums()
        expected = run.step()
    with TinyRun(counts) as run:
        assert run.checksums()["actor"] != saved["actor"]
        run.load(tmp_path)
        assert run.checksums() == saved
        assert (run.ctx.step, run.algorithm.steps) == (1, 1)
        assert run.ctx.counters["drawn"] == 1
        assert run.step()["actor/loss"] == expected["actor/loss"]


@pytest.mark.parametrize(("text", "share"), [("", 0.0), ("1235", 0.25), ("0246", 1.0)])
def test_even_tokens_is_the_share_of_even_ids(text, share):
    assert even_tokens(sample(text)) == share
