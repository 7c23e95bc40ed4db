"""A rollout service: requests come one by one, and answers are futures.

submit, abort, update  ->  queue of jobs  ->  the service's thread  ->  futures
(any thread)                                  jobs, and steps of the engine
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.serving.stepper import Stepper

log = logging.getLogger(__name__)


class RolloutService:
    """Wraps a started engine, of any kind.

    From then on the engine is called through the service alone. Requests are admitted while others
    run where the engine can (`continuous`), else when the ones before have ended. Safe to call from
    several threads. Use it as a context manager: it aborts what runs when it ends.
    """

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self._stepper = Stepper(engine)
        self._futures: dict[int, Future[Completion]] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="rollout-service")
        self._thread.start()

    def __enter__(self) -> RolloutService:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def submit(self, request: Request) -> Future[Completion]:
        """Submit a request, whose id is unique among the running ones; return at once.

        The future raises what the engine raised. An aborted request's completion has finish_reason
        "abort" and the tokens so far. Raises HybridFlowError when the service is closed.
        """
        future: Future[Completion] = Future()

        # The stepper belongs to the service's thread: only jobs may touch it.
        def add() -> None:
            if request.id in self._futures:
                raise HybridFlowError(f"request {request.id}: a request with this id is running")
            self._stepper.add(request)
            self._futures[request.id] = future

        self._do(add, future)
        return future

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Submit requests, and yield their completions in the order in which they finish."""
        ready: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
        futures = [self.submit(request) for request in requests]
        for future in futures:
            future.add_done_callback(ready.put)
        for _ in futures:
            yield ready.get().result()

    def abort(self, ids: Iterable[int] | None = None) -> None:
        """End requests early, all of them without ids; returns at once."""
        wanted = None if ids is None else list(ids)
        self._do(lambda: self._stepper.abort(wanted))

    @contextmanager
    def update(self, version: int) -> Iterator[RolloutEngine]:
        """Yield the engine for a weight update: `with service.update(5) as engine:
        engine.receive(...)`.

        Requests that run are kept where the engine can (`inflight`): it pauses them, and their
        later tokens carry the new version. Elsewhere the update waits until they have ended, and
        new ones wait for the update. An update that raises leaves the engine refusing to generate
        until one succeeds.
        """
        begun: Future[None] = Future()
        over = threading.Event()

        # A job that holds the service's thread for as long as the update takes.
        def hold() -> None:
            while self._stepper.busy and not self.engine.inflight:
                self._step()
            self.engine.begin_update(version)
            begun.set_result(None)
            over.wait()

        self._do(hold, begun)
        # The engine is the caller's until `over` is set; what raises leaves it in the update.
        begun.result()
        try:
            yield self.engine
            self.engine.end_update()
        finally:
            over.set()

    def close(self) -> None:
        """Abort what runs, and stop the thread; the engine stays as it is."""
        if self._closed:
            return
        # In this order: a closed service takes no jobs.
        self.abort()
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _do(self, job: Callable[[], None], future: Future | None = None) -> None:
        """Queue a job for the service's thread; `future` gets what it raises."""
        if self._closed:
            raise HybridFlowError("the rollout service is closed")

        def run() -> None:
            try:
                job()
            except Exception as error:
                if future is None:  # nobody would hear of it: the service's thread reports it
                    raise
                future.set_exception(error)

        self._jobs.put(run)

    def _work(self) -> None:
        """Run the loop of the service's thread, until `close` queues None."""
        while True:
            try:
                # Jobs come before steps; without requests, and inside an update, wait for a job.
                while not self._stepper.busy or not self._jobs.empty() or self.engine.updating:
                    job = self._jobs.get()
                    if job is None:
                        self._drain()
                        return
                    job()
                self._step()
            except Exception as error:
                self._fail(error)

    def _step(self) -> None:
        for completion in self._stepper.step():
            # A request that the service does not know any more failed before.
            if (future := self._futures.pop(completion.id, None)) is not None:
                future.set_result(completion)

    def _drain(self) -> None:
        """Answer the aborted requests, if the engine can."""
        try:
            while self._stepper.busy:
                self._step()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail every request that runs: the engine raised."""
        futures = list(self._futures.values())
        self._futures = {}
        # A new stepper forgets the requests; the engine's own are disowned with it.
        self._stepper = Stepper(self.engine)
        if not futures:
            log.warning("the rollout engine raised while nobody waited for it", exc_info=error)
        for future in futures:
            future.set_exception(error)
