"""Too many failed rows end a run; which rule is meant is said."""

from __future__ import annotations

import pytest

from hybridflow.core.errors import EnvironmentFailure, RewardError
from hybridflow.core.running.failures import check_failed
from hybridflow.core.values.metrics import Metrics
from hybridflow.kit.testing.runs import tiny_job

MASK = {"mask": True, "max_failed": 0.25}
EVEN = "hybridflow.kit.testing.runs:even_tokens"


def episodes(rule: dict):
    environment = {"name": "helpers.episodes:Echo", "on_failure": rule}
    return tiny_job({"algorithm": "grpo", "environment": environment})


def test_the_failures_of_episodes_count_together():
    metrics = Metrics.of(**{"actor/failed_tool": 0.2, "actor/failed_environment": 0.1})
    said = r"step 7: 30% .*failed_tool 0\.2, actor/failed_environment 0\.1.*environment\.on_failure\.max_failed = 0\.25"
    with pytest.raises(EnvironmentFailure, match=said):
        check_failed(episodes(MASK), 7, metrics)
    check_failed(episodes({**MASK, "max_failed": 0.4}), 7, metrics)
    check_failed(episodes({}), 7, metrics)  # there the first failure has ended it
    check_failed(episodes(MASK), 7, Metrics())


def test_each_part_of_a_reward_has_its_limit():
    parts = [
        {"name": "one", "function": EVEN, "on_failure": MASK},
        {"name": "two", "function": EVEN, "on_failure": {"score": 0.0}},
    ]
    job = tiny_job({"algorithm": "grpo", "reward": {"function": None, "parts": parts}})
    check_failed(job, 1, Metrics.of(**{"reward/one_failed": 0.2, "reward/two_failed": 0.9}))
    with pytest.raises(RewardError, match=r"max_failed of reward's part 'one' = 0\.25"):
        check_failed(job, 1, Metrics.of(**{"reward/one_failed": 0.3}))
