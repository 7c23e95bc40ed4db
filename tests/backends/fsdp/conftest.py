"""Processes that stay for the whole test session and run functions as the ranks of a group."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import the helpers by these names


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """One rank is the test's own process: its group must not meet the tests of others."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
