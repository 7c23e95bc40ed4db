"""Reward "code": the share of tests that the response's program passes, run in a sandbox."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.kit.sandbox.process import Limits
from hybridflow.kit.sandbox.programs import run_program
from hybridflow.settle.config.structure import structure

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
"""The content of a block between ``` marks; the last mark may be missing."""


class CodeReward(Reward):
    """The reward is the share of the tests that pass, or whether all of them do.

    The program is the response's last block between ``` marks, or the whole response without one.
    meta["tests"] is a list. A test is either Python text that follows the program (asserts), or
    {"input": ..., "output": ...}: standard input, and the expected standard output. White space
    around the output is ignored.
    """

    def __init__(self, all_or_nothing: bool = False, tests: str = "tests", **limits: Any):
        """Take the settings of the reward.

        `all_or_nothing`: the reward is 1 if all tests pass, else 0. `tests`: name of the data's
        field with the tests. `limits`: fields of Limits (kit/sandbox); raises ConfigError for
        others.
        """
        self.all_or_nothing = all_or_nothing
        self.field = tests
        self.limits = structure(limits, Limits, "options")

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> float:
        """Run all tests of a sample; raises RewardError where there are none."""
        tests = sample.meta.get(self.field)
        if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
            raise RewardError(
                f"the row's field {self.field!r} must be a list of tests, got {tests!r:.80}"
            )

        blocks = BLOCK.findall(sample.response)
        program = blocks[-1] if blocks else sample.response
        passed = sum(self._passes(program, test) for test in tests)
        return float(passed == len(tests)) if self.all_or_nothing else passed / len(tests)

    def _passes(self, program: str, test: Any) -> bool:
        """Run one test; raises RewardError for one of another form."""
        if isinstance(test, str):
            # The mark is written after the test, so a program that exits early does not write it.
            # One that reads its own file can (docs/data-and-rewards.md).
            mark = secrets.token_hex(16)
            outcome = run_program(f"{program}\n\n{test}\nprint('\\n{mark}')\n", None, self.limits)
            return outcome.good and outcome.output.rstrip().endswith(mark)

        if isinstance(test, Mapping) and isinstance(test.get("output"), str):
            outcome = run_program(program, str(test.get("input", "")), self.limits)
            return outcome.good and outcome.output.strip() == test["output"].strip()

        raise RewardError(
            f'a test is a text of Python, or {{"input": ..., "output": ...}}; got {test!r:.80}'
        )
