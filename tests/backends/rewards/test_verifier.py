"""math-verify in its own process: what it answers, and that it can always be ended."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("math_verify")

from hybridflow.backends.rewards.verifier import Verifier
from hybridflow.core.errors import RewardError

LONG_S = 60.0
"""The machine may be busy."""
NEVER_ENDS = "\\boxed{9^{9^{9^9}}}"


def test_answers_are_compared_as_mathematics_and_a_process_that_is_gone_is_replaced():
    verifier = Verifier()
    assert verifier.equal("x+1", "\\boxed{1+x}", LONG_S) is True
    assert verifier.equal("x+1", "\\boxed{x+2}", LONG_S) is False
    assert verifier.equal("$\\frac{1}{2}$", "It is $0.5$.", LONG_S) is True
    with pytest.raises(RewardError, match=r"answer '\$\$' is nothing that math-verify can read"):
        verifier.equal("$$", "\\boxed{1}", LONG_S)
    verifier._process.kill()
    assert verifier.equal("x+1", "\\boxed{1+x}", LONG_S) is False  # that one is lost
    assert verifier.equal("x+1", "\\boxed{1+x}", LONG_S) is True
    assert verifier.timeouts == 0


def test_a_comparison_that_takes_too_long_is_ended_with_its_process():
    verifier = Verifier()
    assert verifier.equal("x", "\\boxed{x}", LONG_S) is True
    process = verifier._process
    started = time.monotonic()
    assert verifier.equal("5", NEVER_ENDS, 0.5) is False
    assert time.monotonic() - started < 10
    assert verifier.timeouts == 1
    assert process.poll() is not None
