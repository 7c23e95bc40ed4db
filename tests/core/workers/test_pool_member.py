"""What the workers of two pools have in common: where they are, and their side of the plan."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import CountingStore
from helpers.brute import layout, whole
from helpers.reshard_jobs import storage
from helpers.tiny_roles import sync

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.rollouts.weight_sync import node_name
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box
from hybridflow.core.workers.pool_member import PoolMember

SHAPES = {"a": (64, 8)}
TRAINED = layout(
    SHAPES, {rank: {"a": (Box((32 * rank, 0), (32 * rank + 32, 8)),)} for rank in range(2)}
)
SERVED = layout(SHAPES, {rank: {"a": whole((64, 8))} for rank in (2, 3)})
NODES = ["here"] * 4


def pool(store: CountingStore) -> list[PoolMember]:
    """The workers of two ranks."""
    spread = ParallelLayout(dp=2)
    return [
        PoolMember(RankContext("x", rank, spread, torch.device("cpu"), store=store))
        for rank in range(2)
    ]


def test_all_ranks_of_both_pools_have_the_same_rounds_and_their_own_place_in_the_plan():
    store = CountingStore()
    actor, engines = pool(store), pool(store)
    spec = sync("store", bucket_mb=0.004)
    said = [worker.connect(TRAINED, SERVED, 0, NODES, spec) for worker in actor]
    said += [worker.connect(TRAINED, SERVED, 2, NODES, spec) for worker in engines]
    assert set(said) == {
        (3, "ObjectStore")
    }  # every rank sends or gets 2,048 bytes, of which a round takes 1,000
    assert [worker.side.rank for worker in actor + engines] == [0, 1, 2, 3]


def test_a_member_tells_its_node():
    assert [worker.node() for worker in pool(CountingStore())] == [node_name()] * 2


def test_messages_are_forgotten_when_all_have_fetched_them(tmp_path):
    sender, _ = pool(CountingStore())
    sender.connect(TRAINED, SERVED, 0, NODES, sync("disk", str(tmp_path)))
    sender.side.post(0, ShardReader(storage(TRAINED, 0, True)).read)
    assert len(list(tmp_path.iterdir())) == 1  # both receivers get the same
    sender.forget_messages()
    assert not list(tmp_path.iterdir())


def test_pools_that_nothing_reaches_are_told_why():
    worker, _ = pool(CountingStore())
    with pytest.raises(HybridFlowError, match="shared_memory: the ranks are on 2 nodes"):
        worker.connect(
            TRAINED, SERVED, 0, ["here", "here", "there", "there"], sync("shared_memory")
        )
