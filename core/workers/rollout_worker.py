"""The worker of a rollout engine in a pool of its own: it generates, and takes the actor's weights by tickets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.core.batch import Batch
from hybridflow.core.protocols import Protocol
from hybridflow.core.resharding.engine import on_every_rank, sums_held
from hybridflow.core.resharding.pools import PoolMember
from hybridflow.core.rollout import SamplingParams
from hybridflow.core.serving.build import build_engine, start_engine
from hybridflow.core.weights import WeightLayout
from hybridflow.core.worker import RankContext, register
from hybridflow.core.workers.model_worker import (
    EPISODE_COLUMNS,
    GENERATED,
    ModelRole,
    generate_episodes,
    generate_rows,
)


class RolloutWorker(PoolMember):
    """Called by core.resharding.pools.SeparateRollout."""

    def __init__(self, context: RankContext, role: ModelRole):
        super().__init__(context)
        self.role = role
        assert role.engine is not None
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
        self, batch: Batch, sampling: SamplingParams, seed: int, max_tokens: Sequence[int] | None = None
    ) -> Batch:
        """`generate` in turns with the environment's answers between them."""
        assert self.role.episodes is not None, "this role has no environment"
        return generate_episodes(self.engine, batch, sampling, seed, max_tokens, self.role.episodes, self.context)

    @register(Protocol.MICRO_DP, reads=("prompt_ids", "sample_id"), writes=GENERATED)
    def generate(
        self, batch: Batch, sampling: SamplingParams, seed: int, max_tokens: Sequence[int] | None = None
    ) -> Batch:
        """Responses for the rows' prompts, with the weights of the last sync."""
        return generate_rows(self.engine, batch, sampling, seed, max_tokens)
