"""What tests of the planner share.

config  the file of a PPO config that plans well.
"""

from __future__ import annotations

import pytest
from helpers.configs import ppo_config


@pytest.fixture
def config(tmp_path):
    return ppo_config(tmp_path)
