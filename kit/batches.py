"""A base for rollout engines that run one batch of requests after the other.

add -> waiting -> submit, once the batch before has ended -> completions -> step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine


class BatchEngine(RolloutEngine):
    """A base for engines that take whole batches: implement `submit`.

    Requests that are added while a batch runs wait for the next one.
    """

    _waiting: list[Request]
    """Requests of the next batch."""
    _open: set[int]
    """Ids of the batch that runs."""
    _done: list[Completion]
    """Completions of requests that were aborted before they ran."""
    _stream: Iterator[Completion]
    """The completions of the batch that runs."""

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.disown()

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not been answered."""
        return bool(self._waiting or self._open or self._done)

    def add(self, request: Request) -> None:
        """Admit a request with the next batch. Raises HybridFlowError without weights."""
        self.check_ready()
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Return the next completion; a new batch begins when all of the last one have ended."""
        # Requests that were aborted before they ran.
        if aborted := self._done:
            self._done = []
            return aborted

        if not self._open and self._waiting:
            batch = self._waiting
            self._waiting = []
            self._open = {request.id for request in batch}
            self._stream = self.submit(batch)
        if (completion := next(self._stream, None)) is None:
            return []
        self._open.discard(completion.id)
        return [completion]

    def abort(self, ids: Iterable[int] | None = None) -> None:
        """End requests early, all of them without ids; `step` gives their completions."""
        waiting = self._waiting
        aborted = {request.id for request in waiting} | self._open if ids is None else set(ids)
        self._done += [
            Completion(request.id, *request.prefix(), "abort")
            for request in waiting
            if request.id in aborted
        ]
        self._waiting = [request for request in waiting if request.id not in aborted]
        if running := aborted & self._open:
            self.abort_batch(running)

    def abort_batch(self, ids: Iterable[int]) -> None:
        """End requests of the batch that runs; its stream yields them with finish_reason "abort".

        By default they run to their end.
        """

    def disown(self) -> None:
        """Give up all requests."""
        self._waiting = []
        self._open = set()
        self._done = []
        self._stream = iter(())
