"""The reward "code": the share of tests that a response's program passes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.programs import run

from hybridflow.backends.rewards.code import CodeReward
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.plugins.resolve import reward_from


def sample(response: str, tests) -> RewardSample:
    return RewardSample("p", response, np.array([1]), {"tests": tests})


def test_bad_tests_and_options_are_told():
    for tests in (None, [], "assert True", [3], [{"input": "4"}]):
        with pytest.raises(RewardError, match="test"):
            CodeReward()([sample("pass", tests)])
    with pytest.raises(ConfigError, match="secs"):
        CodeReward(secs=3)
    with pytest.raises(ConfigError, match="memory_mb"):
        reward_from("code", {"memory_mb": 1})


def test_the_reward_is_the_share_of_tests_that_pass():
    run("pass")  # skips where no program runs
    double = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1) == 3"]
    assert CodeReward(seconds=3.0)([sample(double, tests)]) == [pytest.approx(2 / 3)]
    assert CodeReward(seconds=3.0, all_or_nothing=True)([sample(double, tests)]) == [0.0]
    assert reward_from("code", {"seconds": 3.0})(
        [sample("print(int(input()) + 1)", [{"input": "4", "output": "5\n"}])]
    ) == [1.0]
    assert CodeReward(seconds=3.0)([sample("no program at all", ["assert True"])]) == [0.0]
    assert CodeReward(seconds=3.0)([sample("import os; os._exit(0)", ["assert False"])]) == [0.0]
    assert CodeReward(seconds=3.0)(
        [sample("print('done'); raise SystemExit", ["assert False"])]
    ) == [0.0]
