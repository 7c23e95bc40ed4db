"""An engine in a pool of its own: its weights come as messages, and it generates with the last ones."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.episodes import echoing
from helpers.sources import char
from helpers.syncs import chosen, sync

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import ModelRole
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.checksums import compare, sums_sent
from hybridflow.core.rollouts.pool_side import PoolSide
from hybridflow.core.rollouts.weight_sync import node_name
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.core.workers.rollout_worker import RolloutWorker
from hybridflow.kit.testing import one_rank, reference

ROWS = Batch(
    {"prompt_ids": tokens([[5, 4], [1]]), "sample_id": torch.tensor([0, 1]), "meta": [{}, {}]}
)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


def role() -> ModelRole:
    return ModelRole(
        reference().spec, "fsdp", FSDPConfig(), 64, None, "transformers",
        TransformersEngineConfig(), **sync("shared_memory", bucket_mb=0.05),
    )  # fmt: skip


def built(context, driver=None) -> RolloutWorker:
    worker = RolloutWorker(context, role(), driver)
    worker.build()
    return worker


def trained() -> WeightLayout:
    """All weights on rank 0."""
    params = {
        name: Param(tuple(tensor.shape), tensor.dtype)
        for name, tensor in reference().parameters.items()
    }
    return WeightLayout(
        params, {0: {name: (Box.full(param.shape),) for name, param in params.items()}}
    )


def shards() -> ShardReader:
    return ShardReader(
        (name, Box.full(tensor.shape), tensor) for name, tensor in reference().parameters.items()
    )


def send(worker: RolloutWorker, version: int) -> PoolSide:
    """The weights of `reference`, from an actor in another pool; its side."""
    source, target = trained(), worker.weight_layout().renumbered(lambda rank: rank + 1)
    nodes, plan = [node_name()] * 2, plan_reshard(source, target, 50_000)
    actor = PoolSide(plan, 0, worker.context.device, nodes, None, chosen("shared_memory"))
    rounds, transport = worker.connect(source, target, 1, nodes)
    assert (rounds > 1, transport) == (True, "SharedMemory")
    worker.begin_update(version)
    moved = 0
    for at in range(rounds):
        tickets = {
            (0, receiver): ticket for receiver, ticket in actor.post(at, shards().read).items()
        }
        moved += worker.fetch(at, tickets)
    assert moved == source.nbytes(0)
    actor.mailbox.forget()
    return actor


def test_it_generates_with_the_weights_that_were_sent(context):
    worker = built(context)
    with pytest.raises(HybridFlowError, match="has no weights yet"):
        worker.generate(ROWS, GREEDY, 0)
    send(worker, 3)
    with pytest.raises(HybridFlowError, match="was begun and not ended"):
        worker.generate(ROWS, GREEDY, 0)
    worker.end_update()
    made = worker.generate(ROWS, GREEDY, 0)
    for prompt, response in zip(([5, 4], [1]), made["response_ids"], strict=True):
        assert response.tolist() == reference().greedy(np.array(prompt), 6)
    assert made["weight_version"].values.tolist() == [3] * 12
    short = ROWS.with_columns(max_tokens=torch.tensor([2, 1]))
    assert worker.generate(short, GREEDY, 0)["response_ids"].lengths.tolist() == [2, 1]


def test_its_sums_are_those_of_what_was_sent(context):
    worker = built(context)
    actor = send(worker, 0)
    worker.expect(None)
    sent = sums_sent(actor.plan, 0, shards())
    assert compare(0, [(sent, {}), ({}, worker.proof())]) == {}
    worker.engine.view(NORM, Box.full((32,))).zero_()
    assert list(compare(0, [(sent, {}), ({}, worker.proof())])) == [NORM]


def test_it_runs_episodes_with_the_environment_that_it_was_given(context):
    worker = built(context, echoing(char()))
    send(worker, 1)
    worker.end_update()
    talkative = attrs.evolve(GREEDY, temperature=1.0, max_tokens=12, logit_bias={14: 3.0})
    made = worker.episodes(ROWS, talkative, 0)
    assert (made["turn"].values == -1).any()
    assert torch.equal(made["loss_mask"].values == 0, made["turn"].values == -1)
    with pytest.raises(AssertionError, match="no environment"):
        built(context).episodes(ROWS, talkative, 0)


def test_engines_of_one_rank_hold_everything_on_every_rank(context):
    train = ParallelLayout(dp=3)
    three = attrs.evolve(context, layout=train, generation=generation_layout(train), groups={})
    layout = built(three).weight_layout()
    assert layout.ranks == [0, 1, 2]
    assert {layout.nbytes(rank) for rank in range(3)} == {trained().nbytes(0)}
