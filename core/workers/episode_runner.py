"""Plays the episodes of a batch: turns of the model by the engine, answers by the environments.

    rounds   a turn of each running episode in one call of the engine, then all answers at once, ...
    free     each episode's next turn begins when its own answer is there

In rounds the batches that the engine computes, and so all bits, do not depend on how long the
environments take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch.distributed as dist

from hybridflow.core.contracts.rollout import Request, RolloutEngine, check_completion
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import EnvironmentFailure
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.environment_calls import EnvironmentCalls
from hybridflow.core.workers.episodes import Attempt, Episode, Episodes, episode_batch

log = logging.getLogger(__name__)
DRAIN_S = 5.0
"""Seconds for which environments that still answer are waited for when the run ends."""
CLOSE_S = 10.0
"""Seconds that an environment may take to close."""
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
    `turn_rewards`, `turn_states` (the state in which each turn was taken) and `branches`
    (core/values/branches.py); and `prompt_ids`, which an environment may have replaced
    (Environment.own_prompt). The environments
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

    name = f"environment {section.name!r}"
    calls = EnvironmentCalls(section.at_once, section.timeout_s, nudge, name)
    closings = EnvironmentCalls(section.at_once, CLOSE_S)
    runner = EpisodeRunner(engine, episodes, calls, closings, context)
    try:
        if section.free:
            runner.free()
        else:
            runner.rounds()
    finally:
        # An environment is not closed while it answers, unless that takes too long.
        calls.drain(DRAIN_S)
        runner.close()
        if left := calls.abandoned + closings.abandoned:
            log.warning(
                "%d calls of environment %r still run after their time; their threads are left",
                left,
                section.name,
            )
        calls.close()
        closings.close()
    batch = episode_batch(episodes)
    batch.metrics.maxima["abandoned_threads"] = float(calls.abandoned + closings.abandoned)
    batch.metrics.means["environment_wait_seconds"] = (runner.waited, 1.0)
    return batch


class EpisodeRunner:
    """The episodes of a batch on one rank. All ranks of a replica make the same calls."""

    def __init__(
        self,
        engine: RolloutEngine,
        episodes: Sequence[Episode],
        calls: EnvironmentCalls,
        closings: EnvironmentCalls,
        context: RankContext,
    ):
        """calls: of environments, made by the first rank of the replica; closings: of `close`."""
        self.engine = engine
        self.episodes = episodes
        self.calls = calls
        self.closings = closings
        self.closed = 0
        """Number of environments that were told to close."""
        self.waited = 0.0
        """Seconds in which there was nothing to do but to wait for environments."""
        self.context = context
        self.group = context.group("generation.replica")
        self.first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        self.leads = self.group is None or dist.get_rank() == self.first

    def rounds(self) -> None:
        """Play all episodes in step: a turn of each one that runs, then its answer."""
        self._answers(range(len(self.episodes)))
        while running := [row for row, one in enumerate(self.episodes) if one.outcome is None]:
            requests = [self.episodes[row].next_request() for row in running]
            asked = []
            for row, done in zip(running, self.engine.generate(requests), strict=True):
                if self.episodes[row].made(done):
                    asked.append(row)
                else:
                    self._end(row)
            self._answers(asked)

    def _answers(self, rows: Iterable[int]) -> None:
        """Ask the environments of these rows, all at the same time, and take their answers."""
        asked = list(rows)
        while asked:
            for row in asked:
                self._ask(row)
            said: Said = {}
            while len(said) < len(asked):
                said |= self._arrived(wait=True)
            # In the rows' order, so that of several failures the same one is raised. An episode
            # that begins again catches up with the others' round.
            asked = [row for row in asked if self._take(row, said[row])]

    def free(self) -> None:
        """Play each episode by itself, whatever the others wait for."""
        for row in range(len(self.episodes)):
            self._ask(row)
        asked = set(range(len(self.episodes)))
        generating: dict[int, Request] = {}

        try:
            while asked or generating:
                for row, said in self._arrived(wait=not generating).items():
                    if self._take(row, said):
                        self._ask(row)
                        continue
                    asked.discard(row)
                    if self.episodes[row].outcome is None:
                        request = self.episodes[row].next_request()
                        self.engine.add(request)
                        generating[row] = request

                # An engine that has nothing to do would be asked again and again.
                for done in self.engine.step() if generating else ():
                    check_completion(generating.pop(done.id, None), done)
                    if self.episodes[done.id].made(done):
                        self._ask(done.id)
                        asked.add(done.id)
                    else:
                        self._end(done.id)
        finally:
            if generating:
                self.engine.disown()

    def close(self) -> None:
        """Close all environments, and wait for that; what they raise is logged."""
        for row in range(len(self.episodes)):
            self._end(row)
        while self.closings.busy:
            self._closed(wait=True)

    def _ask(self, row: int) -> None:
        """Ask the environment of a row for its next answer, on the first rank."""
        if self.leads:
            episode = self.episodes[row]
            self.calls.submit(row, episode.next_call(), episode.deadline)

    def _take(self, row: int, said: Mapping[str, Any]) -> bool:
        """Take an answer; return whether the episode begins again and has to be asked."""
        episode = self.episodes[row]
        attempt = episode.attempt
        episode.take(said)
        again = episode.attempt is not attempt
        if again or episode.outcome is not None:
            self._close(attempt)
        return again

    def _end(self, row: int) -> None:
        self._close(self.episodes[row].attempt)

    def _close(self, attempt: Attempt) -> None:
        """Tell the environment of an attempt to close, beside all other work."""
        if (close := attempt.retire()) is not None:
            self.closings.submit(self.closed, close)
            self.closed += 1
        self._closed(wait=False)

    def _closed(self, wait: bool) -> None:
        name = self.episodes[0].spec.section.name
        for _, answer in self.closings.take(wait):
            if answer.late:
                log.error("environment %r could not be closed in %g s", name, CLOSE_S)
            elif answer.error is not None:
                log.error("environment %r could not be closed", name, exc_info=answer.error)

    def _arrived(self, wait: bool) -> Said:
        """Return what environments have said since the last time, equal on every rank.

        With `wait` at least one. What the first rank raises becomes an EnvironmentFailure on every
        rank, so that none waits for ever.
        """
        if not wait:
            return self._agreed(wait)
        began = time.perf_counter()
        with self.context.part("environments"):
            said = self._agreed(wait)
        self.waited += time.perf_counter() - began
        return said

    def _agreed(self, wait: bool) -> Said:
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
