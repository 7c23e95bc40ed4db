"""The base of workers whose engines generate rows of several steps at once (carried.py)."""

from __future__ import annotations

from collections.abc import Collection

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext, register
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.carried import Carried
from hybridflow.core.workers.generation import (
    GENERATE_READS,
    opened_of,
    opened_requests,
    rows_of,
)
from hybridflow.core.workers.pool_member import PoolMember


class OpensRows(PoolMember):
    """A worker with an engine, whose responses may outlive a generation phase."""

    sends: Collection[str]
    """Further columns that the engine declares, which are sent with its requests."""

    def __init__(self, context: RankContext):
        super().__init__(context)
        self.carried = Carried()

    @register(Protocol.MICRO_DP, reads=GENERATE_READS, early=True)
    def open(self, batch: Batch, sampling: SamplingParams, seed: int) -> None:
        """Take prompts whose responses are generated beside others, until they are complete."""
        self.carried.open(opened_requests(batch, sampling, seed, self.sends))

    @register(Protocol.MICRO_DP, same_rows=False)
    def unfinished(self) -> Batch:
        """Return what there is of the open rows, for a checkpoint."""
        return rows_of(self.carried.unfinished())

    @register(Protocol.ONE_TO_ALL)
    def carry_on(self, rows: Batch) -> None:
        """Take what a checkpoint has of rows that will be opened again."""
        self.carried.load(opened_of(rows))
