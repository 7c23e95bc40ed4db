"""The outcomes of rows, by name."""

from __future__ import annotations

import pytest

from hybridflow.core.values import outcomes

EVERY = {
    "complete": (False, "stop"),
    "truncated_tokens": (False, "length"),
    "truncated_turns": (False, "length"),
    "truncated_time": (False, "length"),
    "aborted": (False, "abort"),
    "failed_tool": (True, "abort"),
    "failed_environment": (True, "abort"),
    "failed_reward": (True, "abort"),
}


def test_each_outcome_is_a_failure_or_not_and_has_a_reason():
    named = {
        value for name, value in vars(outcomes).items() if name.isupper() and isinstance(value, str)
    }
    assert named == set(EVERY)
    for outcome, (failed, reason) in EVERY.items():
        assert (outcomes.failed(outcome), outcomes.finish_reason(outcome)) == (failed, reason)
    assert outcomes.failed_rows(list(EVERY)).tolist() == [False] * 5 + [True] * 3
    assert outcomes.failed_rows([]).shape == (0,)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("stop", "complete"),
        ("length", "truncated_tokens"),
        ("abort", "aborted"),
        ("error", "aborted"),
    ],
)
def test_what_an_engine_says_is_an_outcome(reason, outcome):
    assert outcomes.finished(reason) == outcome
