"""The rule for what has failed."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.contracts.reward import RewardFailureRule


@pytest.mark.parametrize("setting", [{"retries": -1}, {"max_failed": 1.5}, {"max_failed": -0.1}])
def test_wrong_settings_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        FailureRule(**setting)


def test_a_row_is_left_out_or_scored_not_both():
    with pytest.raises(ValueError, match="contradicts mask = true"):
        RewardFailureRule(mask=True, score=0.0)
    rules = [RewardFailureRule(), RewardFailureRule(mask=True), RewardFailureRule(score=0.0)]
    assert [rule.ends_run for rule in rules] == [True, False, False]
