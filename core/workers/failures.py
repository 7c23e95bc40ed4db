"""What happens to a reward that fails: tried again, given up after a while, scored by rule; never 0 without a word."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.reward import FailureRule, FunctionReward, Reward, RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.core.workers.scoring import checked, failure, gathered, score_samples

log = logging.getLogger(__name__)


def score_by_rule(
    reward: Reward,
    samples: Sequence[RewardSample],
    name: str,
    rule: FailureRule,
    per_token: bool = False,
) -> tuple[Any, int]:
    """(float32 [n], or with `per_token` a list of float32 [T_i]; how many were scored by rule).

    Raises RewardError that names reward and row.

    A class that scores batches gets the batch first; if that fails its samples one by one.
    """
    function = reward.function if isinstance(reward, FunctionReward) else None
    waits = inspect.iscoroutinefunction(function)
    if not waits and rule.timeout_s is None:
        if rule.retries == 0 and rule.score is None:
            return score_samples(reward, samples, name, per_token), 0
        if function is None:
            try:
                return score_samples(reward, samples, name, per_token), 0
            except RewardError as error:
                log.warning("%s; its rows are scored one by one", error)
    call: Callable[[RewardSample], Any] = function or (lambda sample: reward([sample])[0])
    scoring = _Scoring(call, waits, name, rule, per_token)
    return scoring.run(samples)


class _Scoring:
    """One call of a reward on some samples."""

    def __init__(
        self,
        call: Callable[[RewardSample], Any],
        waits: bool,
        name: str,
        rule: FailureRule,
        per_token: bool,
    ):
        self.call, self.waits, self.name, self.rule, self.per_token = (
            call,
            waits,
            name,
            rule,
            per_token,
        )
        self.failed = 0

    def run(self, samples: Sequence[RewardSample]) -> tuple[Any, int]:
        if (
            not self.waits and self.rule.timeout_s is None
        ):  # in the caller's own thread, where it may do what it likes
            found = [self._alone(row, sample) for row, sample in enumerate(samples)]
            return gathered(found, self.per_token), self.failed
        ended: list[Any] = []

        def work() -> None:  # a thread: the caller may be in a loop already (a notebook)
            try:
                ended.append(asyncio.run(self._all(samples)))
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return gathered(ended[0], self.per_token), self.failed

    def _alone(self, row: int, sample: RewardSample) -> Any:
        for left in reversed(range(self.rule.retries + 1)):
            try:
                made = self.call(sample)
            except Exception as raised:
                made = _Raised(raised)
            found = self._judged(made, row, sample, left)
            if not isinstance(found, RewardError):
                return found
            error = found
        return self._by_rule(error, sample)

    async def _all(self, samples: Sequence[RewardSample]) -> list[Any]:
        free = asyncio.Semaphore(self.rule.at_once)

        async def one(row: int, sample: RewardSample) -> Any:
            async with free:
                for left in reversed(range(self.rule.retries + 1)):
                    found = self._judged(await self._made(sample), row, sample, left)
                    if not isinstance(found, RewardError):
                        return found
                    error = found
                return self._by_rule(error, sample)

        return list(await asyncio.gather(*(one(row, sample) for row, sample in enumerate(samples))))

    async def _made(self, sample: RewardSample) -> Any:
        """What it returned or raised, or _Late."""

        async def work() -> Any:
            try:
                return await (
                    self.call(sample) if self.waits else _in_thread(lambda: self.call(sample))
                )
            except Exception as error:  # its own TimeoutError is not ours
                return _Raised(error)

        try:
            return await asyncio.wait_for(work(), self.rule.timeout_s)
        except TimeoutError:
            return _Late()

    def _judged(self, made: Any, row: int, sample: RewardSample, left: int) -> Any:
        """Its number or numbers, or a RewardError: what was wrong."""
        if isinstance(made, _Late):
            error = failure(
                f"took longer than timeout_s = {self.rule.timeout_s:g} s", self.name, row, sample
            )
        elif isinstance(made, _Raised):
            error = failure(
                f"raised {type(made.error).__name__}: {made.error}", self.name, row, sample
            )
        else:
            try:
                return checked(made, self.name, row, sample, self.per_token)
            except RewardError as wrong:
                error = wrong
        if left:
            log.warning("%s; it is tried again (%d left)", error, left)
        return error

    def _by_rule(self, error: RewardError, sample: RewardSample) -> Any:
        if self.rule.score is None:
            raise error
        self.failed += 1
        log.warning("%s; it gets %g by rule (on_failure.score)", error, self.rule.score)
        return (
            at_last_token(self.rule.score, sample)
            if self.per_token
            else np.float32(self.rule.score)
        )


def at_last_token(score: float, sample: RewardSample) -> np.ndarray:
    """float32 [T]: 0, and the score at the last token that the model wrote (none: nowhere)."""
    tokens = np.zeros(len(sample.response_ids), np.float32)
    written = np.arange(len(tokens)) if sample.written is None else np.flatnonzero(sample.written)
    tokens[written[-1:]] = score
    return tokens


@attrs.frozen
class _Raised:
    error: Exception


class _Late:
    pass


def _in_thread(call: Callable[[], Any]) -> asyncio.Future:
    """In a thread that nobody waits for once the deadline has passed: Python cannot end it."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(set_: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_(value)

    def work() -> None:
        try:
            result, set_ = call(), done.set_result
        except BaseException as error:
            result, set_ = error, done.set_exception
        try:
            loop.call_soon_threadsafe(tell, set_, result)
        except RuntimeError:  # the loop has ended without it
            return

    threading.Thread(target=work, daemon=True).start()
    return done
