"""A run that is over: two steps and their checkpoints, validations, and the exported model."""

from __future__ import annotations

import pytest

from hybridflow.kit.testing.runs import TABLES
from hybridflow.settle.config.load import expand, merge
from hybridflow.settle.launch import run

OWN = {
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "group_size": 4},
    "run": {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 2},
    "validation": {
        "every": 2,
        "data": {"options": {"split": "held-out"}, "limit": 20},
        "batch_rows": 8,
    },
    "reward": {"function": "exact_match"},
}
REWARD = {"function": "hybridflow.kit.testing.runs:even_tokens"}
"""A reward that responses of random weights differ in."""


def train(folder, name="sums", **tables):
    """Run the tiny config with these tables over it; return the run's folder."""
    base = merge(merge(TABLES, OWN), expand(tables))
    base["run"] |= {"folder": str(folder), "name": name}
    run(base)
    return folder / name


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """The folder of the run."""
    return train(tmp_path_factory.mktemp("runs"), reward=REWARD)


@pytest.fixture(scope="session")
def adapted(tmp_path_factory):
    """The folder of a run that trained adapters."""
    lora = {"name": "fsdp", "lora": {"rank": 2}}
    return train(tmp_path_factory.mktemp("runs"), "adapted", actor={"backend": lora}, reward=REWARD)
