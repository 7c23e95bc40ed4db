"""Engines that take requests while others run.

add, submit -> enter -> running -> advance, leave -> completions -> step, the stream
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine, check_requests
from hybridflow.core.errors import HybridFlowError


class ContinuousEngine(RolloutEngine):
    """A base for engines that batch continuously.

    Implement `enter`, `advance` and `leave`. This class has the rest: checks, prefixes of responses
    that are continued, streams, and aborts.
    """

    max_positions: int | None
    """Largest number of tokens of a prompt with its response; set by `start`."""
    vocab: int
    """Size of the vocabulary; set by `start`."""

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.running: dict[int, Request] = {}
        """Requests that have entered and are not answered, by id."""
        self.asleep = False
        self.has_cache = True
        """Whether there is memory for keys and values; `wake` may leave it for later."""
        self._done: list[Completion] = []
        """Completions that `step` has not returned yet."""
        self._stream_number = 0
        """The number of the latest stream; earlier ones have ended."""
        self._free = True
        """Whether nobody reads what runs: its stream was not begun, was closed, or failed."""

    @abstractmethod
    def enter(self, request: Request) -> None:
        """Accept a request that was checked and lacks tokens. It is in `running` already."""

    @abstractmethod
    def advance(self) -> Iterable[Completion]:
        """Work on the running requests for a while; return the completions of those that ended.

        It is called only while requests run.
        """

    @abstractmethod
    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """End these running requests early; return their completions ("abort").

        Return () where `advance` will give them.
        """

    def add(self, request: Request) -> None:
        """Accept a request beside those that run.

        Raises HybridFlowError for a request that cannot be served, and when the engine sleeps or
        has no weights.
        """
        if self.asleep or not self.has_cache:
            raise HybridFlowError("the rollout engine sleeps; wake it before generating")
        self.check_ready()
        check_requests([request], self.max_positions, self.vocab)
        if request.id in self.running and not self._free:
            raise HybridFlowError(f"request {request.id}: a request with this id is running")

        # Nobody will read what still runs, and its completions must not reach this caller.
        if self._free:
            self._end_old_stream()
        self._free = False
        self._take(request)

    @property
    def busy(self) -> bool:
        """Whether `step` has work that somebody waits for."""
        return bool(self._done or (self.running and not self._free))

    def disown(self) -> None:
        """Give up all running requests: they end before the next request enters."""
        self._done.clear()
        self._free = True

    def step(self) -> list[Completion]:
        """Return the completions since the last call; without any, work for a while first."""
        done = self._done
        self._done = []
        if done or not self.running:
            return done

        self.check_ready()
        return self._ended(self.advance())

    def submit(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield completions as they end; an earlier stream that was not read to its end ends."""
        if self.asleep or not self.has_cache:
            raise HybridFlowError("the rollout engine sleeps; wake it before generating")
        self.check_ready()

        # Checks run when submit is called, not when the first completion is asked for.
        requests = list(requests)
        check_requests(requests, self.max_positions, self.vocab)

        # Only now that all requests are known to be good does the stream before them end.
        self._end_old_stream()
        for request in requests:
            self._take(request)
        return self._stream(self._stream_number, len(requests))

    def _take(self, request: Request) -> None:
        """Let a request enter, or answer one at once whose prefix is complete already."""
        # Its prefix may end with a stop token, or fill max_tokens.
        if reason := request.ended_before():
            self._done.append(Completion(request.id, *request.prefix(), reason))
        else:
            self.running[request.id] = request
            self.enter(request)

    def _end_old_stream(self) -> None:
        """Abort what runs, wait for it and drop it. The reader of its stream gets an error."""
        # The number goes first: whoever reads the old stream finds that it has ended.
        self._stream_number += 1
        self.abort()
        while self.running:
            self._ended(self.advance())
        self._done.clear()
        self._free = True

    def _stream(self, number: int, left: int) -> Iterator[Completion]:
        """Yield the completions of `left` requests while this is the latest stream."""
        self._check_current(number)
        self._free = False
        try:
            while left:
                self._check_current(number)
                done = self.step()
                left -= len(done)
                yield from done
        finally:
            # Closed, failed or read to its end: nobody reads what may still run of it.
            if number == self._stream_number:
                self._free = True

    def _check_current(self, number: int) -> None:
        """Raise HybridFlowError when this stream is not the latest one."""
        if number != self._stream_number:
            raise HybridFlowError(
                "this stream of completions was ended by a later submit or by sleep"
            )

    def abort(self, ids: Iterable[int] | None = None) -> None:
        """End running requests early, without `ids` all of them.

        What they have so far comes out of `step`, or of their stream, with finish_reason "abort".
        """
        # Ids that do not run have been answered already, and are no error.
        running = self.running
        aborted = list(running) if ids is None else [number for number in ids if number in running]
        if aborted:
            self._done += self._ended(self.leave(aborted))

    def _ended(self, completions: Iterable[Completion]) -> list[Completion]:
        """Take these requests out of `running`; return those that were still in it."""
        # A request that is not in it has been answered before.
        return [
            completion
            for completion in completions
            if self.running.pop(completion.id, None) is not None
        ]

    def completion(
        self,
        request: Request,
        ids: Sequence[int],
        logprobs: Sequence[float],
        reason: str,
        versions: np.ndarray | None = None,
    ) -> Completion:
        """Return the completion of a request whose new tokens are `ids`, put behind its prefix.

        `logprobs` are those of the new tokens. `versions` are the weights' versions that drew them,
        by default this engine's.
        """
        # The prefix was made earlier, perhaps by other weights: it keeps its own versions.
        assert self.version is not None
        prefix_ids, prefix_logprobs, prefix_versions = request.prefix()
        if versions is None:
            versions = np.full(len(ids), self.version, np.int64)
        return Completion(
            request.id,
            np.concatenate([prefix_ids, np.asarray(ids, np.int64)]),
            np.concatenate([prefix_logprobs, np.asarray(logprobs, np.float32)]),
            np.concatenate([prefix_versions, np.asarray(versions, np.int64)]),
            reason,
        )

    def begin_update(self, version: int) -> None:
        """Begin an update; requests that nobody reads end first.

        Raises HybridFlowError when the engine sleeps, and when others run, unless the engine
        updates in flight.
        """
        if self.asleep:
            raise HybridFlowError("the rollout engine sleeps; wake it before a weight update")

        # What nobody reads may be thrown away; what somebody reads must not change its weights.
        if self._free and not self.inflight:
            self._end_old_stream()
        if self.running and not self.inflight:
            raise HybridFlowError(
                "a weight update while sequences run; read their stream to its end, or abort them"
            )
        super().begin_update(version)

    # --- memory ---

    def sleep(self) -> None:
        """Give up memory; on a GPU that of the weights too, and then `wake` needs an update."""
        self.check_idle()
        if not self.asleep:
            self.release()
            if self.context.device.type != "cpu":
                self.version = None
        self.asleep = True
        self.has_cache = False

    def wake(self, cache: bool = True) -> None:
        """Take memory again: that of the weights, and that of keys and values where `cache`."""
        cache_too = cache and not self.has_cache
        if self.asleep or cache_too:
            self.resume(self.asleep, cache_too)
        self.asleep = False
        self.has_cache = self.has_cache or cache

    def release(self) -> None:
        """Free what the engine can: the weights stay on a CPU, and go on a GPU."""

    def resume(self, weights: bool, cache: bool) -> None:
        """Allocate again what `release` freed: of the weights, of keys and values, or of both."""

    def check_idle(self) -> None:
        """End sequences that nobody reads; raise HybridFlowError for those that somebody does."""
        if self.running and not self._free:
            raise HybridFlowError(
                "the rollout engine cannot sleep while sequences run; abort them and read their "
                "stream to its end"
            )
        self._end_old_stream()
