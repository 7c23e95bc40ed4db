"""Sequences that outlive a generation phase, on one rank.

With run.max_staleness responses of later steps are generated beside those of the present one:

    open      rows of a step whose turn is yet to come
    collect   generate until all rows of one call are complete
    stop      end those under way, which keep what they have made as the prefix of their next
              request: the weights are about to change, or the device is needed

so that nothing waits for the longest responses with an engine that is all but empty. A token has
the version of the weights that made it, and all keys and values of a prefix are computed anew.

Engines that take turns with the training stop after each `collect`. Those in a pool of their own
stop for new weights alone; they `advance` a moment at a time, and what is finished leaves them at
once (landed.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import attrs
import numpy as np

from hybridflow.core.contracts.rollout import (
    Completion,
    Request,
    RolloutEngine,
    check_completion,
)
from hybridflow.core.errors import HybridFlowError

BUSY = "busy"
"""A metric that comes with rows that are complete: 1 where others are under way, else 0."""
ABORTED = "abort"
"""The finish_reason of a response that is not complete."""


class Opened(NamedTuple):
    """What there is of a row that was opened."""

    prompt_ids: np.ndarray
    made: Completion


class Carried:
    """The opened rows of a rank; the other ranks of its replica have the same ones.

    A row's number is that of its sample, by which requests and completions are known here.
    """

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        """The open rows in order; the prefix is what they have made."""
        self._running: set[int] = set()
        """Those that the engine has."""
        self._complete: dict[int, Completion] = {}
        """Of open rows that are complete."""
        self._loaded: dict[int, Opened] = {}
        """What a checkpoint has of rows that are not opened yet."""

    def open(self, requests: Iterable[Request]) -> None:
        """Take rows, which go on from what a checkpoint has of them.

        Raises HybridFlowError where that was made for other prompts.
        """
        for request in requests:
            self._open[request.id] = request
            if (known := self._loaded.pop(request.id, None)) is None:
                continue
            prompt, made = known
            if not np.array_equal(prompt, request.prompt_ids):
                raise HybridFlowError(
                    f"sample {request.id} goes on from a checkpoint, which has begun its response "
                    "to another prompt: the data or the algorithm's settings were changed; go on "
                    "with the former ones, or with run.max_staleness = 0, which generates anew"
                )
            if made.finish_reason == ABORTED:
                self._open[request.id] = _continued(request, made)
            else:
                self._complete[request.id] = made

    def collect(self, engine: RolloutEngine, rows: Sequence[int]) -> list[Completion]:
        """Generate until these rows are complete, and return them, in this order.

        Other open rows are generated beside them, and go on running. Raises HybridFlowError for a
        row that is not open.
        """
        wanted = {row for row in rows if row not in self._complete}
        if unknown := sorted(wanted - self._open.keys()):
            raise HybridFlowError(
                f"samples {', '.join(map(str, unknown[:5]))} are collected and were not opened; "
                "this is an error in hybridflow"
            )
        if wanted:
            with self._served(engine):
                while wanted:
                    wanted.difference_update(self._step(engine, cut=False))
        for row in rows:
            del self._open[row]
        return [self._complete.pop(row) for row in rows]

    def advance(self, engine: RolloutEngine, most: int) -> bool:
        """Let the engine work on the open rows, at most so many times.

        Return whether some are under way after that. All ranks of a replica give the same number.
        Those that are complete wait for `finished`.
        """
        with self._served(engine):
            for _ in range(most):
                if not self._running:
                    break
                self._step(engine, cut=False)
        return bool(self._running)

    def finished(self) -> list[Opened]:
        """Return the rows that are complete, which are open no longer."""
        complete, self._complete = self._complete, {}
        return [Opened(self._open.pop(row).prompt_ids, made) for row, made in complete.items()]

    def stop(self, engine: RolloutEngine) -> None:
        """End the rows under way where they are; they go on when the engine is served again."""
        if not self._running:
            return
        with self._owned(engine):
            engine.abort()
            while self._running:
                self._step(engine, cut=True)

    @contextmanager
    def _served(self, engine: RolloutEngine) -> Iterator[None]:
        """Give the engine every open row that it has not, for the body."""
        with self._owned(engine):
            # Those of older steps enter first, so that none waits behind later work.
            for row, request in self._open.items():
                if row not in self._running and row not in self._complete:
                    engine.add(request)
                    self._running.add(row)
            yield

    @contextmanager
    def _owned(self, engine: RolloutEngine) -> Iterator[None]:
        """Let the engine drop what it runs if the body fails."""
        try:
            yield
        except BaseException:
            self._running.clear()
            engine.disown()
            raise

    def _step(self, engine: RolloutEngine, cut: bool) -> list[int]:
        """Let the engine work; return the rows that have ended.

        cut: they were stopped, so that aborted ones go on later.
        """
        ended = []
        for done in engine.step():
            request = self._open.get(done.id) if done.id in self._running else None
            check_completion(request, done)
            assert request is not None
            self._running.discard(done.id)
            if cut and done.finish_reason == ABORTED:
                self._open[done.id] = _continued(request, done)
            else:
                self._complete[done.id] = done
            ended.append(done.id)
        return ended

    # --- in a checkpoint ---

    def unfinished(self) -> list[Opened]:
        """Return what there is of all open rows, none of which is under way."""
        assert not self._running, "rows are under way"
        return [
            Opened(
                request.prompt_ids,
                self._complete.get(row) or Completion(row, *request.prefix(), ABORTED),
            )
            for row, request in self._open.items()
        ]

    def load(self, rows: Iterable[Opened]) -> None:
        """Take what `unfinished` returned, for rows that will be opened."""
        self._loaded = {row.made.id: row for row in rows}


def _continued(request: Request, made: Completion) -> Request:
    """Return the request that goes on after what was made for it."""
    return attrs.evolve(
        request,
        prefix_ids=made.response_ids,
        prefix_logprobs=made.logprobs,
        prefix_versions=made.weight_version,
    )
