"""A base for rollout engines that accept requests while others run.

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

    Implement `enter`, `advance` and `leave`. This class implements checks, continued prefixes of
    responses, streams and aborts.
    """

    max_positions: int | None
    """Largest number of tokens of a prompt with its response; set by `start`."""
    vocab: int
    """Size of the vocabulary; set by `start`."""

    def __init__(self, model, config, context):
        super().__init__(model, config, context)
        self.running: dict[int, Request] = {}
        """Requests that were passed to `enter` and have no completion yet, by id."""
        self.asleep = False
        self.has_cache = True
        """Whether there is memory for keys and values; `wake` may leave it for later."""
        self._done: list[Completion] = []
        """Completions that `step` has not returned yet."""
        self._stream_number = 0
        """The number of the latest stream; earlier ones have ended."""
        self._free = True
        """Whether running requests have no reader: their stream is not begun, closed, or failed."""

    @abstractmethod
    def enter(self, request: Request) -> None:
        """Begin to generate for a request, which is valid and already in `running`.

        Its prefix, if any, is not yet a complete response.
        """

    @abstractmethod
    def advance(self) -> Iterable[Completion]:
        """Work on the running requests, for one step say; return completions of those that ended.

        It is called only while requests run.
        """

    @abstractmethod
    def leave(self, ids: Sequence[int]) -> Iterable[Completion]:
        """End these running requests early; return their completions, with finish_reason "abort".

        Return () where `advance` will return them instead.
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

        # Requests without a reader may still run; their completions must not reach this caller.
        if self._free:
            self._end_old_stream()
        self._free = False
        self._take(request)

    @property
    def busy(self) -> bool:
        """Whether there are completions to return, or running requests with a reader."""
        return bool(self._done or (self.running and not self._free))

    def disown(self) -> None:
        """Drop all running requests and their completions; they end before the next one enters."""
        self._done.clear()
        self._free = True

    def step(self) -> list[Completion]:
        """Return the completions since the last call; if there are none, call `advance` first."""
        done = self._done
        self._done = []
        if done or not self.running:
            return done

        self.check_ready()
        return self._ended(self.advance())

    def submit(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield completions as they end; an earlier stream that is still open is ended."""
        if self.asleep or not self.has_cache:
            raise HybridFlowError("the rollout engine sleeps; wake it before generating")
        self.check_ready()

        # Checks run when submit is called, not when the first completion is asked for.
        requests = list(requests)
        check_requests(requests, self.max_positions, self.vocab)

        # The earlier stream is ended only when all requests have passed the checks.
        self._end_old_stream()
        for request in requests:
            self._take(request)
        return self._stream(self._stream_number, len(requests))

    def _take(self, request: Request) -> None:
        """Pass a request to `enter`, or complete it at once if its prefix is a whole response."""
        # Its prefix may end with a stop token, or fill max_tokens.
        if reason := request.ended_before():
            self._done.append(Completion(request.id, *request.prefix(), reason))
        else:
            self.running[request.id] = request
            self.enter(request)

    def _end_old_stream(self) -> None:
        """Abort all running requests and drop their completions; their stream raises an error."""
        # The number changes first, so that the old stream knows that it has ended.
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
            # Closed, failed or read to its end: requests that still run have no reader.
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

        `step`, or their stream, gives the tokens made so far, with finish_reason "abort".
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
        """Return the completion of a request: its prefix followed by the new tokens `ids`.

        `logprobs` are those of the new tokens, `versions` the versions of the weights that sampled
        them, by default this engine's.
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
        """Begin an update; running requests without a reader end first.

        Raises HybridFlowError when the engine sleeps, and when other requests run, unless the
        engine updates in flight.
        """
        if self.asleep:
            raise HybridFlowError("the rollout engine sleeps; wake it before a weight update")

        # Requests without a reader may be dropped; the others must not change their weights.
        if self._free and not self.inflight:
            self._end_old_stream()
        if self.running and not self.inflight:
            raise HybridFlowError(
                "a weight update while sequences run; read their stream to its end, or abort them"
            )
        super().begin_update(version)

    # --- memory ---

    def sleep(self) -> None:
        """Free memory; on a GPU that of the weights too, so that `wake` needs an update."""
        self.check_idle()
        if not self.asleep:
            self.release()
            if self.context.device.type != "cpu":
                self.version = None
        self.asleep = True
        self.has_cache = False

    def wake(self, cache: bool = True) -> None:
        """Allocate memory again: for the weights, and with `cache` for keys and values."""
        cache_too = cache and not self.has_cache
        if self.asleep or cache_too:
            self.resume(self.asleep, cache_too)
        self.asleep = False
        self.has_cache = self.has_cache or cache

    def release(self) -> None:
        """Free the engine's memory: on a GPU with the weights, on a CPU without them."""

    def resume(self, weights: bool, cache: bool) -> None:
        """Allocate again the memory that `release` freed: for weights, keys and values, or both."""

    def check_idle(self) -> None:
        """End running requests without a reader; raise HybridFlowError if others run."""
        if self.running and not self._free:
            raise HybridFlowError(
                "the rollout engine cannot sleep while sequences run; abort them and read their "
                "stream to its end"
            )
        self._end_old_stream()
