"""The worker of a rollout engine in a pool of its own: it generates, and takes the actor's weights by tickets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext, register
from hybridflow.core.job.job import ModelRole
from hybridflow.core.plugins import registry
from hybridflow.core.rollouts.checksums import sums_held
from hybridflow.core.rollouts.weight_sync import on_every_rank
from hybridflow.core.serving.build import build_engine, start_engine
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.weights import WeightLayout
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.generation import (
    EPISODE_COLUMNS,
    GENERATED,
    generate_episodes,
    generate_rows,
)
from hybridflow.core.workers.pool_member import PoolMember


class RolloutWorker(PoolMember):
    """Called by core.rollouts.separate.SeparateRollout."""

    def __init__(self, context: RankContext, role: ModelRole, driver: Episodes | None = None):
        """`driver`: what answers its turns, where there is an environment."""
        super().__init__(context)
        self.role, self.driver = role, driver
        assert role.engine is not None
        self._sends = registry().engine_capabilities(role.engine).extras
        self.engine = build_engine(role.engine, role.model, role.engine_config, context, role.logs)

    def close(self) -> None:
        self.engine.close()

    @register(Protocol.ONE_TO_ALL)
    def build(self) -> None:
        start_engine(self.engine)

    @register(Protocol.RANK_ZERO)
    def weight_layout(self) -> WeightLayout:
        return on_every_rank(self.engine.layout(), self.context)

    @register(Protocol.ONE_TO_ALL)
    def begin_update(self, version: int) -> None:
        self.engine.begin_update(version)

    @register(Protocol.ONE_TO_ALL)
    def fetch(self, at: int, tickets: Mapping[tuple[int, int], Any]) -> int:
        return self.side.fetch(at, tickets, self.engine.receive)

    @register(Protocol.ONE_TO_ALL)
    def sums_held(self) -> dict:
        return sums_held(self.side.plan, self.side.rank, self.engine)

    @register(Protocol.ONE_TO_ALL)
    def end_update(self) -> None:
        self.engine.end_update()

    @register(Protocol.MICRO_DP, reads=("prompt_ids", "sample_id", "meta"), writes=EPISODE_COLUMNS)
    def episodes(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        """`generate` in turns with the environment's answers between them."""
        assert self.driver is not None, "this role has no environment"
        return generate_episodes(
            self.engine, batch, sampling, seed, max_tokens, self.driver, self.context, self._sends
        )

    @register(Protocol.MICRO_DP, reads=("prompt_ids", "sample_id"), writes=GENERATED)
    def generate(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        """Responses for the rows' prompts, with the weights of the last sync."""
        return generate_rows(self.engine, batch, sampling, seed, max_tokens, self._sends)
