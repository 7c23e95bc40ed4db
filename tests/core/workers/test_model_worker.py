"""The worker behind every model role, on the inline runtime with the FSDP backend and the embedded engine."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.syncs import sync
from helpers.tiny_roles import ENGINE, MODEL, NextToken, role
from safetensors.torch import load_file

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import WorkerError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.model_worker import Built, ModelWorker
from hybridflow.kit.testing import TinyRun, runs as tiny_runs

ROLE = role(lr=1e-2)
WITH_ENGINE = role(lr=1e-2, **ENGINE)


class Weighted(Loss):
    reads, unit = ("advantages",), "group"

    def __call__(self, batch, outputs):
        return Term("pg", -outputs["logprobs"] * batch["advantages"])


@pytest.fixture(scope="module")
def pool():
    torch.set_num_threads(1)
    runtime = InlineRuntime()
    runtime.start()
    yield Pool.launch(ResourcePool("main"), runtime)
    runtime.shutdown()


def make_group(pool, role=ROLE, name="actor"):
    generation = generation_layout(ParallelLayout()) if role.engine else None
    group = WorkerGroup(ModelWorker, pool, role, name=name, generation=generation)
    group.build().result()
    return group


def make_batch(rows=6, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, rows)
    return Batch(
        {
            "prompt_ids": tokens([rng.integers(0, 19, rng.integers(1, 4)) for _ in lengths]),
            "response_ids": tokens([rng.integers(0, 19, n) for n in lengths]),
            "loss_mask": tokens([np.ones(n) for n in lengths], torch.uint8),
            "advantages": tokens([rng.standard_normal(n) for n in lengths], torch.float32),
            "group": torch.arange(rows) // 2,
            "sample_id": torch.arange(rows),
            "unknown": ["travels"] * rows,
        }
    )


def test_updates_lower_the_loss_and_count_as_versions(pool):
    group, batch = make_group(pool), make_batch()
    before = group.loss((batch, NextToken())).result()
    found = [group.update([(batch, NextToken())]).result() for _ in range(5)]
    assert found[0]["loss"] == pytest.approx(before["loss"])
    assert [m["nll"] for m in found] == sorted((m["nll"] for m in found), reverse=True)
    names = {"loss", "nll", "grad_norm", "lr", "update_seconds", "update_peak_gb"}
    assert {*names, "optimizer_steps"} == set(found[0].values())
    assert [m["optimizer_steps"] for m in found] == [1, 2, 3, 4, 5]
    assert group.loss((batch, NextToken())).result()["loss"] < found[-1]["loss"]


def test_building_tells_the_parameters(pool):
    group = WorkerGroup(ModelWorker, pool, ROLE, name="actor")
    model = 19 * 16 + 16 * (16 + 8 + 8) + 16 + 8 + 8 + 16 * 16 + 3 * 16 * 24 + 3 * 16
    assert group.build().result() == [Built(model)]


def test_columns_come_back_under_the_names_that_were_asked_for(pool):
    group, batch = make_group(pool), make_batch()
    made = group.logprobs(batch, {"logprobs": "old_logprobs", "entropy": "entropy"}, 2)
    made["old_logprobs"]  # the names are promised; a result with others would raise
    assert set(made.names) == {"old_logprobs", "entropy", "topk_ids", "topk_logprobs"}
    assert np.array_equal(made["old_logprobs"].lengths, batch["response_ids"].lengths)
    assert made["topk_ids"].values.shape == (len(batch["response_ids"].values), 2)
    assert set(batch.join(made).names) > {"unknown", "old_logprobs"}


def test_rows_that_branch_get_a_value_per_token_where_it_stands(pool):
    branches = [[], [[2, 0]], [[1, -2]], [], [], []]
    responses = [[5], [6, 7, 8, 9], [3, 4, 5], [1, 2], [7], [2]]
    mask = [[1] * len(row) for row in responses]
    batch = make_batch()
    batch = batch.with_columns(
        response_ids=tokens(responses), loss_mask=tokens(mask, torch.uint8), branches=branches
    )
    # The sequences, written out: the second row's other one, and the conversation within the third.
    prompts = [row.tolist() for row in batch["prompt_ids"]]
    plain = batch.take(np.array([0, 1, 1, 2, 2, 3])).with_columns(
        branches=[[]] * 6,
        prompt_ids=tokens([prompts[0], prompts[1], prompts[1], prompts[2], [4], prompts[3]]),
        response_ids=tokens([[5], [6, 7], [6, 8, 9], [3], [5], [1, 2]]),
        loss_mask=tokens([[1], [1, 1], [1, 1, 1], [1], [1], [1, 1]], torch.uint8),
    )
    group = make_group(pool)
    columns = {"logprobs": "logprobs", "entropy": "entropy"}
    found, expected = group.logprobs(batch, columns, 2), group.logprobs(plain, columns, 2)
    for name in ("logprobs", "entropy", "topk_logprobs"):
        values = [row.tolist() for row in expected[name]]
        zero = torch.zeros_like(expected[name].values[:1]).tolist()
        rows = [values[0], values[1] + values[2][1:], values[3] + zero + values[4], values[5]]
        for row, of_row in zip(found[name], rows, strict=False):
            torch.testing.assert_close(row, torch.tensor(of_row), atol=1e-5, rtol=0)


def test_a_batch_of_no_rows_gives_empty_columns_of_the_right_kind(pool):
    group, none = make_group(pool), make_batch().take(slice(0, 0))
    made = group.logprobs(none, {"logprobs": "logprobs"}, 2)
    assert made["logprobs"].values.shape == (0,)
    assert made["topk_ids"].values.shape == (0, 2)
    assert made["topk_ids"].values.dtype == torch.int64
    assert group.update([(none, NextToken())]).result()["grad_norm"] == 0.0


def test_values_and_scores_are_columns_per_token_and_per_row(pool):
    for kind in ("value", "score"):
        group = make_group(
            pool, attrs.evolve(ROLE, model=ModelSpec(MODEL, None, 0, kind), optimizer=None), kind
        )
        batch = make_batch()
        made = group.values(batch, "v")["v"] if kind == "value" else group.score(batch, "s")["s"]
        assert made.kind == ("token" if kind == "value" else "row")
        assert made.rows == batch.rows
        with pytest.raises(WorkerError, match=f"a {kind} model has no output 'logprobs'"):
            group.logprobs(batch, {"logprobs": "x"}).rows and group.logprobs(
                batch, {"logprobs": "x"}
            )["x"]


def test_two_pairs_report_the_sum_of_their_losses(pool):
    group, batch = make_group(pool), make_batch()
    alone = [group.loss((batch, loss)).result()["loss"] for loss in (NextToken(), Weighted())]
    both = group.update([(batch, NextToken()), (batch, Weighted())]).result()
    assert both["loss"] == pytest.approx(sum(alone))
    assert both["nll"] == pytest.approx(alone[0])


def test_the_engine_is_synced_when_the_weights_are_newer_and_agrees_with_the_trainer(pool):
    group, batch = make_group(pool, WITH_ENGINE), make_batch()
    sampling = SamplingParams(max_tokens=6)
    asked = batch.select(["prompt_ids", "sample_id"])
    for version in (0, 2, 4):
        made = asked.join(group.generate(asked, sampling, 7))
        assert set(made["weight_version"].values.tolist()) == {version}
        metrics = group.update([(made, NextToken())]).result()
        assert metrics["mismatch_mean"] < 1e-5
        assert metrics["mismatch_kl"] < 1e-9
        assert metrics["mismatch_max_ratio"] == pytest.approx(1.0, abs=1e-4)
        later = group.update(
            [(made, NextToken())]
        ).result()  # tokens of an older version are not compared
        assert "mismatch_mean" not in later.values()
        assert "mismatch_max_ratio" not in later.values()
    assert group.sync().result()[0] > 0.0
    assert group.sync().result()[0] == 0.0


def test_what_is_sampled_depends_on_seed_and_sample_alone(pool):
    group, batch = make_group(pool, WITH_ENGINE), make_batch(8)
    sampling = SamplingParams(max_tokens=5)
    whole = list(group.generate(batch, sampling, 3)["response_ids"])
    parts = [
        group.generate(batch.take(rows), sampling, 3)["response_ids"]
        for rows in (slice(5, 8), slice(0, 5))
    ]
    again = [*parts[1], *parts[0]]
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    other = list(group.generate(batch, sampling, 4)["response_ids"])
    assert any(not torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    short = batch.with_columns(max_tokens=torch.tensor([1, 2] * batch.rows)[: batch.rows])
    limited = group.generate(short, sampling, 3)["response_ids"].lengths
    assert (limited <= np.array([1, 2] * 4)).all()


def test_a_checkpoint_brings_back_weights_and_what_follows(pool, tmp_path):
    group, batch = make_group(pool), make_batch()
    group.update([(batch, NextToken())]).result()
    group.save(str(tmp_path / "c")).result()
    saved = group.checksum().result()
    group.update([(batch, NextToken())]).result()
    ended = group.checksum().result()
    assert ended != saved
    assert group.saved(wait=True).result() == [True]
    group.load(str(tmp_path / "c")).result()
    assert group.checksum().result() == saved
    group.update([(batch, NextToken())]).result()
    assert group.checksum().result() == ended


def test_an_engine_gets_loaded_weights_of_as_many_steps_too(pool, tmp_path):
    one, other = (make_group(pool, WITH_ENGINE, name) for name in ("one", "other"))
    batch, sampling = make_batch(), SamplingParams(max_tokens=6)
    said = []
    for group, loss in ((one, NextToken()), (other, Weighted())):
        group.update([(batch, loss)]).result()
        said.append(group.generate(batch, sampling, 7)["rollout_logprobs"].values.tolist())
    assert said[0] != said[1]
    one.save(str(tmp_path / "c")).result()
    assert one.saved(wait=True).result() == [True]
    other.load(str(tmp_path / "c")).result()
    assert other.generate(batch, sampling, 7)["rollout_logprobs"].values.tolist() == said[0]


@pytest.mark.parametrize("changes", [{}, {"offload": True}, {"keep_engine": False}], ids=str)
def test_training_and_rollout_share_what_they_can_and_say_the_same_as_if_they_did_not(
    pool, changes
):
    batch, said, shared = make_batch(), [], []
    for alias in (True, False):
        group = make_group(
            pool, attrs.evolve(WITH_ENGINE, **sync(alias=alias, verify=True), **changes)
        )
        for seed in range(3):
            made = group.generate(batch, SamplingParams(max_tokens=4), seed)
            said.append(
                (made["response_ids"].values.tolist(), made["rollout_logprobs"].values.tolist())
            )
            metrics = group.update([(batch, NextToken())]).result()
        shared.append(made.metrics["sync_aliased_mb"])
        assert made.metrics["sync_peak_gb"] > 0 and metrics["update_peak_gb"] > 0
        said.append((group.checksum().result(), metrics["grad_norm"]))
    assert said[:4] == said[4:]
    own = (
        [] if changes else [(19 * 16 + 3 * 16) * 4 / 1e6]
    )  # embeddings and norms; matrices are transposed on a CPU
    assert shared == [pytest.approx(own[0] if own else 0.0), 0.0]


def test_failures_carry_role_phase_and_rank(pool, tmp_path):
    group, batch = make_group(pool, name="critic"), make_batch()
    advantages = attrs.evolve(
        batch["advantages"], values=torch.full_like(batch["advantages"].values, torch.inf)
    )
    before = group.checksum().result()
    with pytest.raises(WorkerError, match="'critic' after 0 steps") as error:
        group.update([(batch.with_columns(advantages=advantages), Weighted())]).result()
    assert (error.value.role, error.value.phase, error.value.rank) == ("critic", "update", 0)
    assert group.checksum().result() == before
    with pytest.raises(WorkerError, match="of role 'critic' cannot be read"):
        group.load(str(tmp_path / "missing")).result()


def test_an_offloaded_role_works_as_a_resident_one(pool):
    batch = make_batch()
    found = []
    for offload in (False, True):
        group = make_group(pool, attrs.evolve(WITH_ENGINE, offload=offload))
        metrics = group.update([(batch, NextToken())]).result()
        assert 0.01 < metrics["update_peak_gb"] < 100
        made = group.generate(batch, SamplingParams(max_tokens=4), 1)["response_ids"]
        found.append((group.checksum().result(), made.values.tolist()))
    assert found[0] == found[1]


@pytest.fixture
def told(monkeypatch):
    """What moves, as roles and engines do it: a CPU moves nothing by itself."""
    said = []

    def note(cls, name, spell):
        plain = getattr(cls, name)

        def noted(self, *args, **options):
            said.append(f"{self.context.role} {name} {spell(*args, **options)}".strip())
            return plain(self, *args, **options)

        monkeypatch.setattr(cls, name, noted)

    for name in ("offload", "onload"):
        note(FSDPBackend, name, lambda parts=("weights", "optimizer"): " ".join(parts))
    note(TransformersEngine, "wake", lambda cache=True: "with caches" if cache else "weights alone")
    note(TransformersEngine, "sleep", lambda: "")
    note(TransformersEngine, "begin_update", lambda version: "")
    return said


def test_roles_that_move_do_so_once_per_phase_and_caches_come_last(pool, told):
    actor = make_group(pool, attrs.evolve(WITH_ENGINE, offload=True, keep_engine=False))
    ref = make_group(pool, attrs.evolve(ROLE, optimizer=None, offload=True), name="ref")
    batch = make_batch()
    told.clear()
    actor.generate(batch, SamplingParams(max_tokens=2), 1)
    for group in (ref, actor):
        group.logprobs(batch, {"logprobs": "x"})
    for _ in range(3):
        actor.update([(batch, NextToken())]).result()
    told.append("second step")
    made = actor.generate(batch, SamplingParams(max_tokens=2), 1)
    assert len(made["response_ids"]) == 6
    assert told == [
        "actor onload weights", "actor wake weights alone", "actor begin_update",
        "actor offload weights", "actor wake with caches", "actor sleep",
        "ref onload weights", "ref offload weights",
        "actor onload weights", "actor onload optimizer",
        "second step",
        "actor offload optimizer", "actor wake weights alone", "actor begin_update",
        "actor offload weights", "actor wake with caches", "actor sleep",
    ]  # fmt: skip


def test_weights_are_exported_in_the_dtype_that_is_asked_for(pool, tmp_path):
    group = make_group(pool)
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        group.export(str(tmp_path / dtype), dtype).result()
        tensors = load_file(tmp_path / dtype / "model.safetensors")
        assert {values.dtype for values in tensors.values()} == {expected}


def test_a_reward_that_is_a_model_reports_its_mean():
    tables = {"reward": {"model": {"config": tiny_runs.MODEL}}, "data": {"limit": 0}}
    with TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=4)), tables) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(4))
        scores = torch.as_tensor(run.ctx.reward.score(batch)["scores"].values)
        assert len(set(scores.tolist())) > 1
        assert run.ctx.finish()["reward/scores"] == pytest.approx(scores.double().mean().item())
