"""An engine's rows: what it was given, what of it is still awaited, and given back."""

from __future__ import annotations

import numpy as np
import torch

from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.rollouts.replica import Given, Replica
from hybridflow.core.values.batch import Batch


class Engine(Worker):
    def __init__(self, context):
        super().__init__(context)
        self.opened = []

    @register(Protocol.MICRO_DP)
    def open(self, batch: Batch, sampling: SamplingParams, seed: int) -> None:
        self.opened += [(sample, seed) for sample in batch["sample_id"].values.tolist()]

    @register(Protocol.ONE_TO_ALL)
    def seen(self) -> list:
        return self.opened


def given(*samples: int) -> Given:
    return Given(
        Batch({"sample_id": torch.tensor(samples)}), np.array(samples), SamplingParams(), 7
    )


def test_rows_are_opened_on_its_ranks_kept_while_awaited_and_taken_back():
    runtime = InlineRuntime(None)
    group = WorkerGroup(Engine, Pool.launch(ResourcePool("engines", (2,)), runtime))
    replica = Replica(group, [1])
    replica.give(given(1, 2, 3))
    replica.give(given(4, 5))
    for opened in replica.unread:
        opened.result()
    assert group.seen().result() == [[], [(sample, 7) for sample in (1, 2, 3, 4, 5)]]

    # Rows 4 and 5 have landed, and of the others row 2.
    replica.keep({1, 3})
    assert [one.samples.tolist() for one in replica.given] == [[1, 2, 3]]
    [left] = replica.take_back({1, 3, 9})
    assert left.samples.tolist() == [1, 3] == left.rows["sample_id"].values.tolist()
    assert replica.given == [] and left.seed == 7

    # What is lost is given rows for later.
    replica.alive = False
    replica.give(left)
    assert [one.samples.tolist() for one in replica.given] == [[1, 3]]
    assert len(group.seen().result()[1]) == 5
    runtime.shutdown()
