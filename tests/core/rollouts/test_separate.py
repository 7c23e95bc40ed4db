"""Weights between an actor's pool and engines in a pool of their own, and what happens when they do not arrive whole."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.syncs import sync
from helpers.tiny_roles import ENGINE, NextToken, role

from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import HybridFlowError, MismatchError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.rollouts.pool_side import PoolSide
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.core.workers.rollout_worker import RolloutWorker

ROLE = role(lr=5e-2)
WITH_ENGINE = role(lr=5e-2, **ENGINE)
PROMPTS = Batch({"prompt_ids": tokens([[1, 2], [3], [4, 5, 6]]), "sample_id": torch.arange(3)})
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
EXAMPLES = Batch({
    "prompt_ids": tokens([[1, 2], [3]]), "response_ids": tokens([[7, 8, 9], [10]]),
    "loss_mask": tokens([[1, 1, 1], [1]], torch.uint8),
})  # fmt: skip


@pytest.fixture
def apart():
    """A function (sync config) -> the rollout, on the inline runtime in small buckets; shared with the twin below."""
    torch.set_num_threads(1)
    runtime = InlineRuntime()
    runtime.start()

    def make(**settings):
        config = sync(bucket_mb=0.01, **settings)
        trained, served = (attrs.evolve(each, **config) for each in (ROLE, WITH_ENGINE))
        actor = WorkerGroup(
            ModelWorker, Pool.launch(ResourcePool("main"), runtime), trained, name="actor"
        )
        engines = WorkerGroup(
            RolloutWorker, Pool.launch(ResourcePool("engines"), runtime), served, name="engines",
            generation=generation_layout(ParallelLayout()),
        )  # fmt: skip
        for group in (actor, engines):
            group.build().result()
        rollout = SeparateRollout(actor, engines, config["sync"])
        rollout.connect()
        assert rollout._rounds > 2
        return rollout

    yield make
    runtime.shutdown()


@pytest.fixture(scope="module")
def expected():
    """What an engine on the actor's own rank says: before an update, and after it."""
    runtime = InlineRuntime()
    runtime.start()
    pool = Pool.launch(ResourcePool("main"), runtime)
    actor = WorkerGroup(
        ModelWorker, pool, WITH_ENGINE, generation=generation_layout(ParallelLayout())
    )
    actor.build().result()
    said = []
    for _ in range(2):
        said.append(responses(actor.generate(PROMPTS, GREEDY, 0)))
        actor.update([(EXAMPLES, NextToken())]).result()
    runtime.shutdown()
    assert said[0] != said[1]
    return said


def responses(batch) -> list[list[int]]:
    return [list(map(int, row)) for row in batch["response_ids"]]


@pytest.mark.parametrize("transport", ["auto", "store", "shared_memory", "disk"])
def test_engines_apart_say_what_the_actors_own_would(apart, expected, transport, tmp_path):
    rollout = apart(transport=transport, verify=True, folder=str(tmp_path))
    assert responses(rollout.generate(PROMPTS, GREEDY, 0)) == expected[0]
    rollout.actor.update([(EXAMPLES, NextToken())]).result()
    made = rollout.generate(PROMPTS, GREEDY, 0)
    assert responses(made) == expected[1]
    assert set(made["weight_version"].values.tolist()) == {1}
    assert not list(tmp_path.iterdir())


def test_weights_move_only_when_there_are_newer_ones(apart, monkeypatch):
    rollout, moved = apart(), []
    post = PoolSide.post
    monkeypatch.setattr(
        PoolSide, "post", lambda self, at, read: moved.append(at) or post(self, at, read)
    )
    for _ in range(2):
        rollout.sync().result()
    assert moved == list(range(rollout._rounds))
    rollout.actor.update([(EXAMPLES, NextToken())]).result()
    rollout.sync().result()
    assert len(moved) == 2 * rollout._rounds


def test_loaded_weights_of_as_many_steps_move_too(apart, monkeypatch):
    rollout, moved = apart(), []
    begin = rollout.begin
    monkeypatch.setattr(rollout, "begin", lambda version: moved.append(version) or begin(version))
    for _ in range(2):
        rollout.sync()
    rollout.forget()
    rollout.sync()
    assert moved == [0, 0]


def test_what_engines_apart_said_is_asked_before_an_update(apart):
    rollout = apart()
    strict = attrs.evolve(ROLE, mismatch_stop=1e-3, **sync(bucket_mb=0.01))
    rollout.actor = WorkerGroup(ModelWorker, rollout.actor.pool, strict, name="actor")
    rollout.actor.build().result()
    rollout.connect()
    made = PROMPTS.join(rollout.generate(PROMPTS, SamplingParams(max_tokens=8), 0))
    for column, by in (("rollout_logprobs", 2e-3), ("weight_version", -1)):
        values = attrs.evolve(made[column], values=made[column].values + by)
        with pytest.raises(MismatchError, match="no weights have changed"):
            rollout.actor.update([(made.with_columns(**{column: values}), NextToken())]).result()
    rollout.actor.update([(made, NextToken())]).result()


@pytest.mark.parametrize("side, method", [("sender", "post"), ("receiver", "fetch")])
def test_a_transfer_that_fails_half_way_leaves_engines_that_refuse_and_the_next_one_mends_them(
    apart, expected, monkeypatch, side, method, tmp_path
):
    rollout = apart(transport="disk", folder=str(tmp_path))
    rollout.generate(PROMPTS, GREEDY, 0)
    rollout.actor.update([(EXAMPLES, NextToken())]).result()
    whole = getattr(PoolSide, method)

    def breaks(self, at, *rest):
        if at == 1:
            raise OSError(28, "No space left on device")
        return whole(self, at, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(PoolSide, method, breaks)
        with pytest.raises(HybridFlowError, match="No space left") as said:
            rollout.generate(PROMPTS, GREEDY, 0)
        assert said.value.role == ("actor" if side == "sender" else "engines")
        with pytest.raises(HybridFlowError, match="was begun and not ended"):
            rollout.engines.generate(PROMPTS, GREEDY, 0)["response_ids"]
    assert responses(rollout.generate(PROMPTS, GREEDY, 0)) == expected[1]
    assert not list(tmp_path.iterdir())  # the messages of the failed transfer are gone too


def test_a_wrong_element_is_named_by_verify_and_the_next_transfer_mends_it(
    apart, expected, monkeypatch
):
    rollout = apart(verify=True)
    fetch = PoolSide.fetch

    def flips(self, at, tickets, write):
        def wrong(name, box, values):
            if "down_proj" in name:
                values = values.clone()
                values[0, 0] += 1
            write(name, box, values)

        return fetch(self, at, tickets, wrong)

    with monkeypatch.context() as patch:
        patch.setattr(PoolSide, "fetch", flips)
        with pytest.raises(HybridFlowError, match=r"1 parameters .*layers\.0\.mlp\.down_proj"):
            rollout.sync()
    assert responses(rollout.generate(PROMPTS, GREEDY, 0)) == expected[0]
