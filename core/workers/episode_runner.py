"""Plays the episodes of a batch: turns of the model by the engine, answers by the environments.

    rounds   a turn of each running episode in one call of the engine, then all answers at once, ...
    free     each episode's next turn begins when its own answer is there

In rounds the batches that the engine computes, and so all bits, do not depend on how long the
environments take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch.distributed as dist

from hybridflow.core.contracts.rollout import Request, RolloutEngine
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import EnvironmentFailure
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.environment_calls import EnvironmentCalls
from hybridflow.core.workers.episodes import Episode, Episodes, episode_batch

log = logging.getLogger(__name__)
DRAIN_S = 5.0
"""Seconds for which environments that still answer are waited for when episodes fail."""
Said = dict[int, dict[str, Any]]
"""Row -> what its environment said (Episode.said)."""


def run_episodes(
    engine: RolloutEngine,
    requests: Sequence[Request],
    metas: Sequence[Mapping[str, Any]],
    spec: Episodes,
    context: RankContext,
) -> Batch:
    """Run an episode for each request; return the columns of `generate`, and further ones.

    Per token `turn` (-1 where the environment wrote), per row `episode_return`, and as lists
    `turn_rewards` and `turn_states` (the state in which each turn was taken). The environments
    run on the first rank of a replica, and the other ranks get their answers. Raises
    EnvironmentFailure.
    """
    # Generation ends at the environment's stops too.
    stops = spec.stop_ids()
    episodes = []
    for request, meta in zip(requests, metas, strict=True):
        stop_token_ids = (*request.sampling.stop_token_ids, *stops)
        sampling = attrs.evolve(request.sampling, stop_token_ids=stop_token_ids)
        episodes.append(Episode(spec, attrs.evolve(request, sampling=sampling), meta, stops))

    # Only free episodes have requests for an engine that works on others.
    section = spec.section
    nudge = engine.nudge if section.free else None
    calls = EnvironmentCalls(section.at_once, section.timeout_s, nudge)
    runner = EpisodeRunner(engine, episodes, calls, context)
    try:
        if section.free:
            runner.free()
        else:
            runner.rounds()
    finally:
        # An environment is not closed while it answers, unless that takes too long.
        calls.drain(DRAIN_S)
        for episode in episodes:
            episode.close()
        if calls.abandoned:
            log.warning(
                "%d answers of environment %r still run after their time; their threads are left",
                calls.abandoned,
                section.name,
            )
        calls.close()
    return episode_batch(episodes)


class EpisodeRunner:
    """The episodes of a batch on one rank. All ranks of a replica make the same calls."""

    def __init__(
        self,
        engine: RolloutEngine,
        episodes: Sequence[Episode],
        calls: EnvironmentCalls,
        context: RankContext,
    ):
        """calls: of the environments, made by the first rank of the replica."""
        self.engine = engine
        self.episodes = episodes
        self.calls = calls
        self.group = context.group("generation.replica")
        self.first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        self.leads = self.group is None or dist.get_rank() == self.first

    def rounds(self) -> None:
        """Play all episodes in step: a turn of each one that runs, then its answer."""
        self._answer({row: episode.begin for row, episode in enumerate(self.episodes)})
        while running := [row for row, one in enumerate(self.episodes) if one.reason is None]:
            requests = [self.episodes[row].next_request() for row in running]
            asked = {}
            for row, done in zip(running, self.engine.generate(requests), strict=True):
                turn = self.episodes[row].made(done)
                if turn is not None:
                    asked[row] = partial(self.episodes[row].answer, turn)
            self._answer(asked)

    def _answer(self, asked: Mapping[int, Callable[[], Any]]) -> None:
        """Ask the environments of these rows, all at the same time, and take their answers."""
        if self.leads:
            for row, call in asked.items():
                self.calls.submit(row, call)
        said: Said = {}
        while len(said) < len(asked):
            said |= self._arrived(wait=True)
        # In the rows' order, so that of several failures the same one is raised.
        for row in asked:
            self.episodes[row].take(said[row])

    def free(self) -> None:
        """Play each episode by itself, whatever the others wait for."""
        asked: set[int] = set()
        generating: set[int] = set()
        for row, episode in enumerate(self.episodes):
            self._ask(row, episode.begin)
            asked.add(row)

        try:
            while asked or generating:
                for row, said in self._arrived(wait=not generating).items():
                    asked.discard(row)
                    self.episodes[row].take(said)
                    if self.episodes[row].reason is None:
                        self.engine.add(self.episodes[row].next_request())
                        generating.add(row)

                # An engine that has nothing to do would be asked again and again.
                for done in self.engine.step() if generating else ():
                    generating.discard(done.id)
                    turn = self.episodes[done.id].made(done)
                    if turn is not None:
                        self._ask(done.id, partial(self.episodes[done.id].answer, turn))
                        asked.add(done.id)
        finally:
            if generating:
                self.engine.disown()

    def _ask(self, row: int, call: Callable[[], Any]) -> None:
        if self.leads:
            self.calls.submit(row, call)

    def _arrived(self, wait: bool) -> Said:
        """Return what environments have said since the last time, equal on every rank.

        With `wait` at least one. What the first rank raises becomes an EnvironmentFailure on every
        rank, so that none waits for ever.
        """
        if self.group is None:
            return self._received(wait)

        message: list[Any] = [None]
        if self.leads:
            try:
                message = [(True, self._received(wait))]
            except Exception as error:
                message = [(False, f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(message, src=self.first, group=self.group)

        succeeded, result = message[0]
        if not succeeded:
            raise EnvironmentFailure(result)
        return result

    def _received(self, wait: bool) -> Said:
        answers = self.calls.take(wait)
        return {row: self.episodes[row].said(answer) for row, answer in answers}
