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


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`folder(name, kind)`: the Hugging Face folder of a tiny model with weights that make mistakes visible."""
    from fsdp_reference import write_model

    root, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str, kind: str = "policy") -> str:
        if (name, kind) not in made:
            made[name, kind] = write_model(root / f"{name}-{kind}", name, kind)
        return made[name, kind]

    return get
