"""A transfer protocol: row i goes to rank i modulo the ranks, and results come back in the rows' order."""

import numpy as np

from hybridflow.core.contracts.protocol import TransferProtocol
from hybridflow.core.values.batch import Batch


class RoundRobin(TransferProtocol):
    name = "ACME_ROUND_ROBIN"
    splits = True

    def distribute(self, group, value):
        world = group.layout.world
        if not isinstance(value, Batch):
            return [value] * world
        return [value.take(np.arange(rank, value.rows, world)) for rank in range(world)]

    def collect(self, group, results):
        joined = Batch.concat(results)
        world = group.layout.world
        rows = [np.arange(rank, joined.rows, world) for rank in range(world)]
        return joined.take(np.argsort(np.concatenate(rows), kind="stable"))
