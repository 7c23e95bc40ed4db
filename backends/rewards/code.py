"""Reward "code": the share of tests that the response's program passes, run in a sandbox."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.backends.rewards.sandbox import Limits, run_program
from hybridflow.core.config.structure import structure
from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import RewardError

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


class CodeReward(Reward):
    """Tests are meta["tests"]: texts of Python that follow the program (asserts), or {"input": ..., "output": ...}: what it
    reads and should write, white space at the ends aside. The program is the response's last block in ``` marks, or all of it.
    """

    def __init__(self, all_or_nothing: bool = False, tests: str = "tests", **limits: Any):
        """`all_or_nothing`: 1 for all tests, else 0; `tests`: the field of the data; `limits`: those of sandbox.Limits."""
        self.all_or_nothing, self.field = all_or_nothing, tests
        self.limits = structure(limits, Limits, "options")

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> float:
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
        if isinstance(test, str):
            end = secrets.token_hex(
                16
            )  # an early exit does not write it; who reads its own file can (see the docs)
            done = run_program(f"{program}\n\n{test}\nprint('\\n{end}')\n", None, self.limits)
            return done.good and done.output.rstrip().endswith(end)
        if isinstance(test, Mapping) and isinstance(test.get("output"), str):
            done = run_program(program, str(test.get("input", "")), self.limits)
            return done.good and done.output.strip() == test["output"].strip()
        raise RewardError(
            f'a test is a text of Python, or {{"input": ..., "output": ...}}; got {test!r:.80}'
        )
