"""The workers of pools between which weights travel."""

from __future__ import annotations

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.job.job import SyncSpec
from hybridflow.core.rollouts.pool_side import PoolSide
from hybridflow.core.rollouts.weight_sync import node_name
from hybridflow.core.values.weights import WeightLayout


class PoolMember(Worker):
    """A worker whose group sends weights to another pool, or takes them from one."""

    side: PoolSide
    """After `connect`."""

    @register(Protocol.ONE_TO_ALL)
    def node(self) -> str:
        return node_name()

    @register(Protocol.ONE_TO_ALL)
    def connect(
        self,
        source: WeightLayout,
        target: WeightLayout,
        first: int,
        nodes: list[str],
        spec: SyncSpec,
    ) -> tuple[int, str]:
        """`first`: the plan's number of this group's rank 0. Gives the number of rounds, and the transport."""
        c = self.context
        self.side = PoolSide(source, target, first + c.rank, c.device, nodes, c.store, spec)
        return len(self.side.exchange.rounds), type(self.side.mailbox).__name__

    @register(Protocol.ONE_TO_ALL)
    def forget_messages(self) -> None:
        self.side.mailbox.forget()
