"""The worker of a rollout engine in a pool of its own.

It generates, and fetches the actor's weights by tickets (core/rollouts/separate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext, register
from hybridflow.core.job.job import ModelRole
from hybridflow.core.plugins import registry
from hybridflow.core.rollouts.build import build_engine, start_engine
from hybridflow.core.rollouts.checksums import wanted
from hybridflow.core.rollouts.weight_sync import on_every_rank
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import WeightLayout
from hybridflow.core.workers.carried import BUSY
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.generation import (
    EPISODE_COLUMNS,
    EPISODE_READS,
    GENERATE_READS,
    GENERATED,
    generate_episodes,
    generate_rows,
    rows_of,
)
from hybridflow.core.workers.opens_rows import OpensRows


class RolloutWorker(OpensRows):
    """One rank of a rollout pool; core.rollouts.separate.SeparateRollout calls it."""

    def __init__(self, context: RankContext, role: ModelRole, driver: Episodes | None = None):
        """Make the engine, which `build` starts.

        driver: the environment and its tokenizer; None without an environment.
        """
        super().__init__(context)
        self.role = role
        self.driver = driver
        assert role.engine is not None
        self.sends = registry().engine_capabilities(role.engine).extras
        self.engine = build_engine(role.engine, role.model, role.engine_config, context, role.logs)

    def close(self) -> None:
        """Close the engine, with its processes, files and memory."""
        self.engine.close()

    @register(Protocol.ONE_TO_ALL)
    def build(self) -> None:
        """Start the engine; it has no weights yet."""
        start_engine(self.engine)

    # --- weights ---

    @register(Protocol.ONE_TO_ALL)
    def weight_layout(self) -> WeightLayout:
        """Return which boxes the engine holds of each parameter, by the rank in its group."""
        return on_every_rank(self.engine.layout(), self.context)

    @register(Protocol.ONE_TO_ALL)
    def begin_update(self, version: int) -> None:
        """Begin the engine's update to the weights of `version`; open rows wait for its end."""
        self._stop()
        self.engine.begin_update(version)

    @register(Protocol.ONE_TO_ALL)
    def expect(self, part: int | None) -> None:
        """Tell the engine which part of its weights the next proof is about; None: all."""
        self.engine.expect(wanted(self.side.plan, self.side.rank, part))

    @register(Protocol.ONE_TO_ALL)
    def fetch(self, at: int, tickets: Mapping[tuple[int, int], Any]) -> int:
        """Fetch this rank's messages of round `at`; return their bytes.

        tickets: (sender, receiver) -> ticket, of all ranks.
        """
        return self.side.fetch(at, tickets, self.engine.receive)

    @register(Protocol.ONE_TO_ALL)
    def proof(self) -> dict:
        """Return the engine's proof, by its rank in the plan (core/rollouts/checksums.py)."""
        return {self.side.rank: self.engine.proof()}

    @register(Protocol.ONE_TO_ALL)
    def end_update(self) -> None:
        """End the engine's update; it generates with the new weights."""
        self.engine.end_update()

    # --- generation ---

    @register(Protocol.MICRO_DP, reads=EPISODE_READS, writes=EPISODE_COLUMNS)
    def episodes(self, batch: Batch, sampling: SamplingParams, seed: int) -> Batch:
        """Generate responses in turns, with the environment's answers between them."""
        assert self.driver is not None, "this role has no environment"
        made = generate_episodes(
            self.engine, batch, sampling, seed, self.driver, self.context, self.sends
        )
        return _with_versions(made) if self.role.ahead else made

    @register(Protocol.MICRO_DP, reads=GENERATE_READS, writes=GENERATED)
    def generate(self, batch: Batch, sampling: SamplingParams, seed: int) -> Batch:
        """Generate responses to the rows' prompts, with the weights of the last sync."""
        beside = self.carried if self.role.keeps_cache else None
        made = generate_rows(self.engine, batch, sampling, seed, self.sends, beside)
        return _with_versions(made) if self.role.ahead else made

    # Of responses that newer weights go on with (carried.py)
    @register(Protocol.ONE_TO_ALL, same_rows=False)
    def advance(self, most: int) -> Batch:
        """Let the engine work on the open rows, at most so many times; return those complete.

        The metric BUSY says whether some are under way after that.
        """
        busy = self.carried.advance(self.engine, most)
        finished = self.carried.finished()
        rows = rows_of(finished) if finished else Batch()
        return Batch({name: rows[name] for name in rows}, Metrics(maxima={BUSY: float(busy)}))

    @register(Protocol.ONE_TO_ALL)
    def stop(self) -> dict[str, float]:
        """Have open rows wait for the next `advance`; return the engine's figures up to now."""
        self._stop()
        return self.engine.figures()

    def _stop(self) -> None:
        """End the rows under way where they are, unless they keep their keys and values."""
        if not self.role.keeps_cache:
            self.carried.stop(self.engine)

    @register(Protocol.MICRO_DP, same_rows=False)
    def unfinished(self) -> Batch:
        """Return what there is of the open rows, for a checkpoint; they end where they are."""
        self.carried.stop(self.engine)
        return super().unfinished()


def _with_versions(generated: Batch) -> Batch:
    """Add weight_version to the metrics, mean and largest: what the controller expects is one."""
    # -1 is the environment's.
    versions = torch.as_tensor(generated["weight_version"].values)
    made = versions[versions >= 0].double()
    metrics = generated.metrics
    metrics.means["weight_version"] = (float(made.sum()), float(len(made)))
    if len(made):
        metrics.maxima["weight_version_max"] = float(made.max())
    return generated
