"""The base of workers that transfer weights between pools."""

from __future__ import annotations

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.job.job import ModelRole
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.pool_side import PoolSide
from hybridflow.core.rollouts.weight_sync import node_name
from hybridflow.core.values.weights import WeightLayout


class PoolMember(Worker):
    """A worker whose group sends weights to another pool, or receives them from one."""

    role: ModelRole
    side: PoolSide
    """This rank's part of the transfer; `connect` makes it."""

    @register(Protocol.ONE_TO_ALL)
    def node(self) -> str:
        """Return the name of this rank's node: ranks with equal names share a /dev/shm."""
        return node_name()

    @register(Protocol.ONE_TO_ALL)
    def connect(
        self,
        source: WeightLayout,
        target: WeightLayout,
        first: int,
        nodes: list[str],
    ) -> tuple[int, str]:
        """Plan the transfer and connect to the other pool.

        first: the plan's number of this group's rank 0. nodes: of every rank of the plan. Returns
        the number of rounds, and the transport's class name.
        """
        # Every rank makes the same plan from the same layouts.
        context = self.context
        rank = first + context.pool_rank
        plan = plan_reshard(source, target, self.role.sync.bucket_bytes)
        self.side = PoolSide(plan, rank, context.device, nodes, context.store, self.role.transport)
        return len(self.side.exchange.rounds), type(self.side.mailbox).__name__

    @register(Protocol.ONE_TO_ALL)
    def forget_messages(self) -> None:
        """Free the messages that this rank has left for others."""
        self.side.mailbox.forget()
