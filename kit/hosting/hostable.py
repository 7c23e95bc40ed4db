"""Engines that may run in a process of their own."""

from __future__ import annotations

from typing import Any

from hybridflow.core.contracts.rollout import Proof, RolloutEngine, Wanted
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.hosting.bucket import BucketReader, Load
from hybridflow.kit.hosting.hosted import HostedEngine


class Hostable(RolloutEngine):
    """A base for an engine whose settings derive from ProcessConfig.

    The engine runs in a process of its own where `own_process` says so.
    """

    @classmethod
    def build(
        cls, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
    ) -> RolloutEngine:
        """Return an engine of this class, or a HostedEngine that runs one elsewhere."""
        if config.own_process:
            return HostedEngine(cls, model, config, context, logs)
        return cls(model, config, context)

    def expect_of(self, place: int, wanted: Wanted) -> None:
        """Note the boxes that the proof of the replica's rank number `place` is about."""
        self.expect(wanted)

    def proof_of(self, place: int) -> Proof:
        """Return the proof of that rank's boxes, which `take` has received.

        An engine that drives several devices replaces both methods.
        """
        return self.proof()

    def take(self, place: int, reader: BucketReader, load: Load) -> bytes | None:
        """Copy weights from the bucket of the replica's rank number `place`.

        Return the handle from `reader.done()`. `receive` gets views of the bucket's memory, and
        must copy them before it returns. An engine that drives several devices replaces this
        method.
        """
        if place:
            raise HybridFlowError(f"{type(self).__name__} drives one device; got weights of two")
        for piece, values in reader.take(load):
            self.receive(piece.name, piece.box, values)
        return reader.done()
