"""Reward "math": whether a solution's final answer equals the expected one, as mathematics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from hybridflow.backends.rewards.verifier import Verifier
from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import ConfigError, RewardError

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
"""A decimal number, with or without commas between thousands."""
_BOXED_NUMBER = re.compile(r"\\boxed\s*\{([^{}]*)\}")
r"""The content of a \boxed{...} without inner braces."""


class MathReward(Reward):
    """The reward is 1.0 where the final answers agree, else 0.0.

    The final answer of a response is what follows its last "####" (GSM8K), else its \\boxed{...},
    else the last expression that math-verify finds. meta["answer"] may be an answer ("18", "1,234",
    "\\frac{1}{2}") or a whole solution that ends with "#### 18".

    Numbers are compared here, and anything else by math-verify in a process of its own: evaluating
    an answer like 9^{9^{9^9}} never ends. After `timeout_s` such an answer counts as wrong, and the
    process is replaced.
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
        # Pickling copies only the settings, not the verifier's process.
        return MathReward, (self.timeout_s,)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score(sample.answer, sample.response) for sample in samples]

    def answer(self, sample: RewardSample) -> str | None:
        """Return the final answer of a response; None if it marks none and is not a number itself.

        Equal numbers give equal texts; other answers are compared as texts.
        """
        text = _last_boxed(sample.response)
        if text is None and number(sample.response) is not None:
            text = sample.response
        if "####" in sample.response:
            text = _after_hashes(sample.response)
        if text is None or not text.strip():
            return None
        value = number(text)
        return text.strip() if value is None else format(value.normalize(), "f")

    def _score(self, answer: str, response: str) -> float:
        """Compare the final answers; raises RewardError where the expected one is empty."""
        gold = _after_hashes(answer)
        final = _after_hashes(response)
        if not gold.strip():
            raise RewardError(
                'meta["answer"] is empty; set data.answer to a field with the expected answer'
            )

        # Numbers: equal ones are right, and different integers are wrong. Others may still agree in
        # math-verify, which rounds.
        boxed = _BOXED_NUMBER.findall(final)
        expected_number = number(gold)
        final_number = number(boxed[-1] if boxed else final)
        if expected_number is not None and final_number is not None:
            if expected_number == final_number:
                return 1.0
            if expected_number == int(expected_number) and final_number == int(final_number):
                return 0.0

        return float(self._verifier.equal(gold, final, self.timeout_s))


def _after_hashes(text: str) -> str:
    """Return the first line with text after the last "####", or the whole text without one."""
    _, separator, tail = text.rpartition("####")
    if not separator:
        return text
    return (tail.strip().splitlines() or [""])[0]


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, which may have braces inside; None without."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return None


def number(text: str) -> Decimal | None:
    """Return the value of a text that is just a number, else None.

    It may have a sign, commas between thousands, dollar signs and a final full stop.
    """
    plain = (
        text.strip()
        .removesuffix(".")
        .replace("\\$", "")
        .replace("$", "")
        .replace("\\!", "")  # LaTeX's negative space, as in 1,\!234
        .strip()
    )
    return Decimal(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else None
