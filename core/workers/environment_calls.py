"""Calls of environments: many at once, in threads of their own or an event loop, with a deadline.

    submit -> waiting -> running, at most `at_once` -> take: what it returned, raised, or "too late"

Python cannot end a thread. One whose call takes longer than its deadline is left alone, and what it
returns later is dropped.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import attrs

from hybridflow.core.processes.page import doing

MOST_THREADS = 10_000
"""Of what `async` environments leave to threads (asyncio.to_thread); they begin as needed."""
THREAD = "environment"
"""Name of the threads."""


@attrs.frozen
class Answered:
    """What became of a call: it returned `value`, or raised `error`, or was too late."""

    value: Any = None
    error: BaseException | None = None
    late: bool = False


class EnvironmentCalls:
    """The calls of one batch of episodes. It is used from one thread, and closed."""

    def __init__(
        self,
        at_once: int,
        timeout_s: float | None = None,
        arrived: Callable[[], None] | None = None,
        name: str = "environment",
    ):
        """at_once: limit of the calls that run; timeout_s: of each, None for no limit.

        `arrived` is called, in another thread, when a call has been answered or is too late; `name`
        is what the page of this process calls them.
        """
        self.at_once = at_once
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self.arrived = arrived
        self.name = name
        self._waiting: deque[tuple[int, Callable[[], Any], float]] = deque()
        """Key, call, and when it must have been answered by time.monotonic."""
        self._running: dict[int, tuple[Any, float]] = {}
        """Key -> the thread of the call, or another mark of it, and its deadline by
        time.monotonic."""
        self._answers: SimpleQueue[tuple[int, Any, Answered]] = SimpleQueue()
        self._late: list[threading.Thread] = []
        self._loop = _Loop()

    @property
    def busy(self) -> bool:
        """Whether a call has not been answered."""
        return bool(self._waiting or self._running)

    @property
    def abandoned(self) -> int:
        """The number of threads that still run, and whose answer is no longer waited for."""
        return sum(thread.is_alive() for thread in self._late)

    def submit(self, key: int, call: Callable[[], Any], deadline: float = math.inf) -> None:
        """Make a call as soon as there is room; it may return a coroutine, which is awaited.

        `key` names it until it has been answered. From `deadline` on, by time.monotonic, it is too
        late, also where `timeout_s` would leave it more time.
        """
        self._waiting.append((key, call, deadline))
        self._begin()

    def take(self, wait: bool = False) -> list[tuple[int, Answered]]:
        """Return (key, answer) of the calls answered since the last time, and of those too late.

        With `wait` at least one, where any is under way.
        """
        answers = self._received(0.0) + self._overdue()
        while wait and not answers and self.busy:
            # Until one arrives, or the next deadline passes.
            until = min(deadline for _, deadline in self._running.values())
            left = max(until - time.monotonic(), 0.0)
            with doing(f"{self.name}: answers to {_listed(sorted(self._running))}", left):
                answers = self._received(left) + self._overdue()
        self._begin()
        return answers

    def drain(self, wait_s: float) -> None:
        """Start no further call, and wait for those that run, at most `wait_s` seconds."""
        self._waiting.clear()
        end = time.monotonic() + wait_s
        while self._running and (left := end - time.monotonic()) > 0:
            self._received(left)
            self._overdue()
        self._give_up(list(self._running))

    def close(self) -> None:
        """Forget what has not been answered; threads that still run end by themselves."""
        self._waiting.clear()
        self._running.clear()
        self._loop.stop()

    def _begin(self) -> None:
        """Start calls that wait, while there is room."""
        while self._waiting and len(self._running) < self.at_once:
            key, call, latest = self._waiting.popleft()
            deadline = min(time.monotonic() + self.timeout_s, latest)
            # What is `async` from its beginning needs no thread.
            mark: Any = object()
            alone = not inspect.iscoroutinefunction(call)
            if alone:
                mark = threading.Thread(
                    target=self._work, args=(key, call, deadline), name=THREAD, daemon=True
                )
            self._running[key] = (mark, deadline)
            if alone:
                mark.start()
            else:
                begun = self._loop.begun(call(), deadline - time.monotonic())
                begun.add_done_callback(partial(self._done, key, mark))
            if self.arrived is not None and not math.isinf(deadline):
                self._loop.at(deadline, self._passed, key, mark)

    def _passed(self, key: int, mark: Any) -> None:
        """Tell whoever waits elsewhere that the deadline of a call has passed."""
        if self.arrived is not None and self._running.get(key, (None,))[0] is mark:
            self.arrived()

    def _work(self, key: int, call: Callable[[], Any], deadline: float) -> None:
        """Make a call, in its thread."""
        left = deadline - time.monotonic()
        try:
            with doing(f"{self.name}: episode {key}", left):
                value = call()
                if inspect.isawaitable(value):
                    answer = self._loop.begun(value, deadline - time.monotonic()).result()
                else:
                    answer = Answered(value)
        except BaseException as error:  # a tool that calls sys.exit must not be waited for
            answer = Answered(error=error)
        self._put(key, threading.current_thread(), answer)

    def _done(self, key: int, mark: Any, done: Future[Answered]) -> None:
        """Take the answer of a call that had no thread."""
        try:
            answer = done.result()
        except BaseException as error:
            answer = Answered(error=error)
        self._put(key, mark, answer)

    def _put(self, key: int, mark: Any, answer: Answered) -> None:
        self._answers.put((key, mark, answer))
        if self.arrived is not None:
            self.arrived()

    def _received(self, wait_s: float) -> list[tuple[int, Answered]]:
        """Return the answers that are there; without any, wait up to `wait_s` for the first."""
        answers: list[tuple[int, Answered]] = []
        timeout = None if math.isinf(wait_s) else wait_s
        block = wait_s > 0
        try:
            while True:
                key, mark, answer = self._answers.get(block, timeout)
                block = False
                # One that came after its deadline has been answered for.
                if self._running.get(key, (None,))[0] is mark:
                    del self._running[key]
                    answers.append((key, answer))
        except Empty:
            return answers

    def _overdue(self) -> list[tuple[int, Answered]]:
        """Give up the calls whose deadline has passed."""
        now = time.monotonic()
        late = [key for key, (_, deadline) in self._running.items() if deadline <= now]
        self._give_up(late)
        return [(key, Answered(late=True)) for key in late]

    def _give_up(self, keys: Sequence[int]) -> None:
        marks = [self._running.pop(key)[0] for key in keys]
        self._late += [mark for mark in marks if isinstance(mark, threading.Thread)]


def _listed(keys: Sequence[int]) -> str:
    """Return which episodes these are, in words."""
    first = ", ".join(map(str, keys[:4])) + (", ..." if len(keys) > 4 else "")
    return f"episode {first}" if len(keys) == 1 else f"{len(keys)} episodes ({first})"


class _Loop:
    """An event loop in a thread of its own, which begins with its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    def begun(self, coroutine: Awaitable[Any], timeout_s: float) -> Future[Answered]:
        """Begin a coroutine; after `timeout_s` it is cancelled. The future raises what it raises.

        Raises RuntimeError after `stop`.
        """

        async def bounded() -> Answered:
            limit = asyncio.timeout(None if math.isinf(timeout_s) else timeout_s)
            try:
                async with limit:
                    return Answered(await coroutine)
            except TimeoutError:
                if not limit.expired():  # its own
                    raise
                return Answered(late=True)
            except (SystemExit, KeyboardInterrupt) as error:
                return Answered(error=error)  # which would end the loop, and hang all others

        with self._lock:  # so that nothing comes to a loop that has been stopped
            try:
                loop = self._started()
            except RuntimeError:
                if inspect.iscoroutine(coroutine):
                    coroutine.close()  # Python warns of one that is never awaited
                raise
            return asyncio.run_coroutine_threadsafe(bounded(), loop)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Make a call in the loop's thread as soon as time.monotonic is `when`."""

        def due() -> None:
            # A little later, so that the caller finds the deadline passed.
            loop.call_later(max(when - time.monotonic(), 0.0) + 0.001, call, *args)

        with self._lock:
            loop = self._started()
            loop.call_soon_threadsafe(due)

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the loop; the caller holds the lock. Raises RuntimeError after `stop`."""
        if self._stopped:
            raise RuntimeError("the calls are closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Python's own has a handful: agents that wait in threads for turns of the model, which
            # wait for other agents, would wait for ever.
            self._loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
            threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        return self._loop

    def stop(self) -> None:
        """Cancel what runs, and end the loop's thread, if there is one."""
        with self._lock:
            self._stopped = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, and what is under way then until it has been cancelled."""
    loop.run_forever()
    loop.run_until_complete(_cancelled(asyncio.all_tasks(loop)))
    loop.close()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
