"""Reward "math": the final answer of a solution equals the expected one, as mathematics (math-verify)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from hybridflow.backends.rewards.verifier import Verifier
from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import ConfigError, RewardError

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_BOXED_NUMBER = re.compile(r"\\boxed\s*\{([^{}]*)\}")


class MathReward(Reward):
    """1.0 where the final answers agree, else 0.0.

    The final answer of a response is what follows its last "####" (GSM8K), else its \\boxed{...}, else the last
    expression that math-verify finds. meta["answer"] may be an answer ("18", "1,234", "\\frac{1}{2}") or a whole
    solution that ends with "#### 18". Numbers are compared here; anything else by math-verify in a process of its own,
    because an answer like 9^{9^{9^9}} never ends: after `timeout_s` it counts as wrong and the process is replaced.
    """

    def __init__(self, timeout_s: float = 5.0):
        """`timeout_s`: seconds for one comparison, more than 0."""
        if not timeout_s > 0:
            raise ConfigError(
                f'timeout_s of reward "math" must be more than 0 seconds; got {timeout_s!r}'
            )
        self.timeout_s = timeout_s
        self._verifier = Verifier()

    def __reduce__(self):
        return MathReward, (self.timeout_s,)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score(sample.answer, sample.response) for sample in samples]

    def _score(self, answer: str, response: str) -> float:
        gold, final = _after_hashes(answer), _after_hashes(response)
        if not gold.strip():
            raise RewardError(
                'meta["answer"] is empty; set data.answer to a field with the expected answer'
            )
        boxed = _BOXED_NUMBER.findall(final)
        expected, got = number(gold), number(boxed[-1] if boxed else final)
        if expected is not None and got is not None:
            if expected == got:
                return 1.0
            if expected == int(expected) and got == int(got):
                return 0.0
        return float(self._verifier.equal(gold, final, self.timeout_s))


def _after_hashes(text: str) -> str:
    """The line after the last "####", or the whole text."""
    _, found, tail = text.rpartition("####")
    return (tail.strip().splitlines() or [""])[0] if found else text


def number(text: str) -> Decimal | None:
    """The value of a text that is nothing but a number: signs, thousands' commas and dollars allowed."""
    plain = (
        text.strip()
        .removesuffix(".")
        .replace("\\$", "")
        .replace("$", "")
        .replace("\\!", "")
        .strip()
    )
    return Decimal(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else None
