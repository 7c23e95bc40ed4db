"""Engines that take requests while others run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine, check_requests
from hybridflow.core.errors import HybridFlowError


class ContinuousEngine(RolloutEngine):
    """Give `enter`, `advance` and `leave`; this class has the rest: checks, prefixes, streams, and aborts."""

    continuous = True
    inflight: bool = False
    """Whether weights may be updated while sequences run: their later tokens carry the new version."""
    max_positions: int | None
    """Tokens of a prompt with its response; set by `start`."""
    vocab: int
    """Token ids are below it; set by `start`."""

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.running: dict[int, Request] = {}
        """Requests that have entered and are not answered, by id."""
        self.asleep = False
        self._done: list[Completion] = []
        self._stream_number = 0
        self._free = True
        """Whether a sleep or an update need not mind the stream: it was not begun, was closed, or failed."""

    @abstractmethod
    def enter(self, request: Request) -> None:
        """Take a request that was checked and lacks tokens. It is in `running` already."""

    @abstractmethod
    def advance(self) -> Iterable[Completion]:
        """Work on the running requests for a while; what has ended. Called only while requests run."""

    @abstractmethod
    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """End these running requests early: their completions ("abort"), or () where `advance` will give them."""

    def add(self, request: Request) -> None:
        """Raises HybridFlowError for a request that cannot be served, or when the engine sleeps or lacks weights."""
        if self.asleep:
            raise HybridFlowError("the rollout engine sleeps; wake it before generating")
        self.check_ready()
        check_requests([request], self.max_positions, self.vocab)
        if request.id in self.running and not self._free:
            raise HybridFlowError(f"request {request.id}: a request with this id is running")
        if self._free:
            self._end_old_stream()
        self._free = False
        self._take(request)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do that somebody waits for."""
        return bool(self._done or (self.running and not self._free))

    def disown(self) -> None:
        """Nobody waits for what runs any more: it ends before the next request enters."""
        self._done.clear()
        self._free = True

    def step(self) -> list[Completion]:
        """What has ended since the last call; works on the running requests for a while."""
        done, self._done = self._done, []
        if done or not self.running:
            return done
        self.check_ready()
        return self._ended(self.advance())

    def submit(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """A new `submit` ends an earlier one that was not read to its end."""
        if self.asleep:
            raise HybridFlowError("the rollout engine sleeps; wake it before generating")
        self.check_ready()
        requests = list(requests)
        check_requests(requests, self.max_positions, self.vocab)
        self._end_old_stream()
        for request in requests:
            self._take(request)
        return self._stream(self._stream_number, len(requests))

    def _take(self, request: Request) -> None:
        if reason := request.ended_before():
            self._done.append(Completion(request.id, *request.prefix(), reason))
        else:
            self.running[request.id] = request
            self.enter(request)

    def _end_old_stream(self) -> None:
        self._stream_number += 1
        self.abort()
        while self.running:
            self._ended(self.advance())
        self._done.clear()
        self._free = True

    def _stream(self, number: int, left: int) -> Iterator[Completion]:
        self._check_current(number)
        self._free = False
        try:
            while left:
                self._check_current(number)
                done = self.step()
                left -= len(done)
                yield from done
        finally:
            if number == self._stream_number:
                self._free = True

    def _check_current(self, number: int) -> None:
        if number != self._stream_number:
            raise HybridFlowError(
                "this stream of completions was ended by a later submit or by sleep"
            )

    def abort(self, ids: Iterable[int] | None = None) -> None:
        """What they have so far comes out of `step`, or of their stream, with finish_reason "abort"."""
        wanted = list(self.running) if ids is None else [i for i in ids if i in self.running]
        if wanted:
            self._done += self._ended(self.leave(wanted))

    def _ended(self, completions: Iterable[Completion]) -> list[Completion]:
        return [c for c in completions if self.running.pop(c.id, None) is not None]

    def completion(
        self, request: Request, ids: Sequence[int], logprobs: Sequence[float], reason: str,
        versions: np.ndarray | None = None,
    ) -> Completion:  # fmt: skip
        """`ids`, `logprobs`: of the tokens behind the request's prefix; `versions`: theirs, by default this engine's."""
        assert self.version is not None
        before, values, stamps = request.prefix()
        if versions is None:
            versions = np.full(len(ids), self.version, np.int64)
        return Completion(
            request.id,
            np.concatenate([before, np.asarray(ids, np.int64)]),
            np.concatenate([values, np.asarray(logprobs, np.float32)]),
            np.concatenate([stamps, np.asarray(versions, np.int64)]),
            reason,
        )

    def begin_update(self, version: int) -> None:
        if self.asleep:
            raise HybridFlowError("the rollout engine sleeps; wake it before a weight update")
        if self._free and not self.inflight:
            self._end_old_stream()
        if self.running and not self.inflight:
            raise HybridFlowError(
                "a weight update while sequences run; read their stream to its end, or abort them"
            )
        super().begin_update(version)

    def check_idle(self) -> None:
        """Raise when sequences run that somebody waits for; end those that nobody reads."""
        if self.running and not self._free:
            raise HybridFlowError(
                "the rollout engine cannot sleep while sequences run; abort them and read their stream to its end"
            )
        self._end_old_stream()
