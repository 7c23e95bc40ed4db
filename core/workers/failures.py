"""The rule for a reward that fails: retries, a time limit, and a substitute score.

Every failure is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardFailureRule, RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.core.processes.page import doing
from hybridflow.core.workers.scoring import checked, failure, gathered, score_samples

log = logging.getLogger(__name__)


def score_by_rule(
    reward: Reward,
    samples: Sequence[RewardSample],
    name: str,
    rule: RewardFailureRule,
    per_token: bool = False,
) -> tuple[Any, np.ndarray]:
    """Return (the rewards, which samples failed: bool [n]).

    The rewards are float32 [n], or with `per_token` a list of float32 [T_i]; one that failed has
    the rule's score, or NaN where the rule leaves the row out. Otherwise it raises RewardError,
    which names reward and row. A class that scores batches gets the batch first; if that fails, its
    samples one by one.
    """
    function = reward.function if isinstance(reward, FunctionReward) else None
    waits = inspect.iscoroutinefunction(function)
    none = np.zeros(len(samples), bool)

    # Without a coroutine and a time limit one plain call may do.
    if not waits and rule.timeout_s is None:
        if rule.retries == 0 and rule.ends_run:
            return score_samples(reward, samples, name, per_token), none
        if function is None:
            try:
                return score_samples(reward, samples, name, per_token), none
            except RewardError as error:
                log.warning("%s; its rows are scored one by one", error)

    # Sample by sample, with retries and the rule's score.
    call: Callable[[RewardSample], Any] = function or (lambda sample: reward([sample])[0])
    return _Scoring(call, waits, name, rule, per_token).run(samples)


@attrs.define
class _Scoring:
    """One call of a reward on some samples."""

    call: Callable[[RewardSample], Any]
    waits: bool
    """Whether `call` is a coroutine function."""
    name: str
    rule: RewardFailureRule
    per_token: bool
    failed: set[int] = attrs.field(factory=set)
    """The rows of the samples whose tries have all failed."""

    def run(self, samples: Sequence[RewardSample]) -> tuple[Any, np.ndarray]:
        values = self._values(samples)
        failed = np.array([row in self.failed for row in range(len(samples))], bool)
        return gathered(values, self.per_token), failed

    def _values(self, samples: Sequence[RewardSample]) -> list[Any]:
        # In the caller's own thread, as some code only works in the main thread.
        if not self.waits and self.rule.timeout_s is None:
            return [self._score(row, sample) for row, sample in enumerate(samples)]

        # In a thread with an event loop: the caller may be in a loop already (a notebook).
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(asyncio.run(self._score_all(samples)))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        scores: list[Any] = outcome[0]
        return scores

    def _score(self, row: int, sample: RewardSample) -> Any:
        for left in reversed(range(self.rule.retries + 1)):
            try:
                outcome = self._called(row, sample)
            except Exception as raised:
                outcome = self._raised(raised, row, sample)
            value = self._judged(outcome, row, sample, left)
            if not isinstance(value, RewardError):
                return value
            error = value
        return self._by_rule(error, row, sample)

    async def _score_all(self, samples: Sequence[RewardSample]) -> list[Any]:
        free = asyncio.Semaphore(self.rule.at_once)  # limits the calls under way

        async def score(row: int, sample: RewardSample) -> Any:
            async with free:
                for left in reversed(range(self.rule.retries + 1)):
                    value = self._judged(await self._outcome(row, sample), row, sample, left)
                    if not isinstance(value, RewardError):
                        return value
                    error = value
                return self._by_rule(error, row, sample)

        scores = (score(row, sample) for row, sample in enumerate(samples))
        return list(await asyncio.gather(*scores))

    async def _outcome(self, row: int, sample: RewardSample) -> Any:
        """Return the reward's result, or a RewardError if it raised or took too long."""

        # A plain function runs in a thread, so that the loop can abandon it.
        async def work() -> Any:
            try:
                if not self.waits:
                    return await _in_thread(lambda: self._called(row, sample))
                with doing(self._what(row), self._limit_s):
                    return await self.call(sample)
            except Exception as error:  # its own TimeoutError is not ours
                return self._raised(error, row, sample)

        # `work` returns errors as values, so a TimeoutError here is the time limit's.
        try:
            return await asyncio.wait_for(work(), self.rule.timeout_s)
        except TimeoutError:
            problem = f"took longer than timeout_s = {self.rule.timeout_s:g} s"
            return failure(problem, self.name, row, sample)

    def _called(self, row: int, sample: RewardSample) -> Any:
        with doing(self._what(row), self._limit_s):
            return self.call(sample)

    def _what(self, row: int) -> str:
        return f"reward {self.name!r}, row {row}"

    @property
    def _limit_s(self) -> float:
        return math.inf if self.rule.timeout_s is None else self.rule.timeout_s

    def _raised(self, error: Exception, row: int, sample: RewardSample) -> RewardError:
        problem = f"raised {type(error).__name__}: {error}"
        return failure(problem, self.name, row, sample)

    def _judged(self, outcome: Any, row: int, sample: RewardSample, left: int) -> Any:
        """Return the reward's checked number or numbers, or a RewardError.

        left: the number of further tries.
        """
        if not isinstance(outcome, RewardError):
            try:
                return checked(outcome, self.name, row, sample, self.per_token)
            except RewardError as wrong:
                outcome = wrong

        if left:
            log.warning("%s; it is tried again (%d left)", outcome, left)
        return outcome

    def _by_rule(self, error: RewardError, row: int, sample: RewardSample) -> Any:
        """Return the rule's score, NaN where the row is left out. Raises `error` without one."""
        if self.rule.ends_run:
            raise error
        self.failed.add(row)
        score = self.rule.score
        if score is None:
            log.warning("%s; the row is left out (on_failure.mask)", error)
            score = math.nan
        else:
            log.warning("%s; it gets %g by rule (on_failure.score)", error, score)
        return at_last_token(score, sample) if self.per_token else np.float32(score)


def at_last_token(score: float, sample: RewardSample) -> np.ndarray:
    """Return float32 [T]: the score at the last token of the model, if any, and 0 elsewhere."""
    tokens = np.zeros(len(sample.response_ids), np.float32)
    written = np.arange(len(tokens)) if sample.written is None else np.flatnonzero(sample.written)
    tokens[written[-1:]] = score
    return tokens


def _in_thread(call: Callable[[], Any]) -> asyncio.Future:
    """Return a future of the call's result.

    After the deadline the thread is abandoned, since Python cannot end it.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    # Runs in the loop, which may have cancelled the future meanwhile.
    def finish(set_: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_(value)

    def work() -> None:
        set_ = future.set_result
        try:
            result = call()
        except BaseException as error:
            result = error
            set_ = future.set_exception

        try:
            loop.call_soon_threadsafe(finish, set_, result)
        except RuntimeError:  # the loop has ended without this result
            return

    threading.Thread(target=work, daemon=True).start()
    return future
