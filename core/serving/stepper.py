"""Requests one by one, for any engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine


class Stepper:
    """`add` and `step` for any engine.

    A continuous engine has these methods itself. Any other works batch by batch: what is added
    meanwhile waits for the next batch.
    """

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self._waiting: list[Request] = []
        self._stream: Iterator[Completion] = iter(())
        self._open: set[int] = set()
        self._done: list[Completion] = []
        engine.disown()

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not been answered."""
        if self.engine.continuous:
            return self.engine.busy
        return bool(self._waiting or self._open or self._done)

    def add(self, request: Request) -> None:
        """Admit a request, now or with the next batch. Raises HybridFlowError without weights."""
        if self.engine.continuous:
            self.engine.add(request)
        else:
            self.engine.check_ready()
            self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Let the engine work for a while; return the completions that have ended."""
        if self.engine.continuous:
            return self.engine.step()

        # Requests that were aborted before they ran.
        aborted = self._done
        self._done = []
        if aborted:
            return aborted

        # The next batch starts when all of the last one have ended.
        if not self._open and self._waiting:
            batch = self._waiting
            self._waiting = []
            self._open = {request.id for request in batch}
            self._stream = self.engine.submit(batch)
        if (completion := next(self._stream, None)) is None:
            return []
        self._open.discard(completion.id)
        return [completion]

    def abort(self, ids: Iterable[int] | None = None) -> None:
        """End requests early, all of them without ids; `step` gives their completions."""
        if self.engine.continuous:
            self.engine.abort(ids)
            return

        # Requests that wait end here, those that run in the engine.
        waiting = self._waiting
        aborted = {request.id for request in waiting} | self._open if ids is None else set(ids)
        self._done += [
            Completion(request.id, *request.prefix(), "abort")
            for request in waiting
            if request.id in aborted
        ]
        self._waiting = [request for request in waiting if request.id not in aborted]
        if running := aborted & self._open:
            self.engine.abort(running)
