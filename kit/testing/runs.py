"""The smallest real run of an algorithm: two-layer models, two-digit sums, everything in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.config.load import expand
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.job.job import Job
from hybridflow.core.job.resolve import resolve_jobs
from hybridflow.core.job.schema import SHORTHAND
from hybridflow.core.job.stages import overlay
from hybridflow.core.running.session import Session, prepare
from hybridflow.core.workers.model_worker import ModelWorker

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
TABLES: dict[str, Any] = {
    "run": {"device": "cpu", "trackers": [], "steps": 1},
    "runtime": "inline",
    "tokenizer": {"characters": "0123456789+="},
    "data": {
        "source": "arithmetic",
        "bos": True,
        "answer": "{answer}",
        "response": "{answer}",
        "max_prompt_tokens": 8,
        "limit": 256,
    },
    "sampling": {"max_tokens": 4},
    "reward": {"function": "hybridflow.kit.testing.runs:even_tokens"},
    "actor": {"model": {"config": MODEL}, "optimizer": {"lr": 1e-3}, "micro_batch_tokens": 256},
}
"""What `TinyRun` starts from; roles that are not named here are as the actor."""


def even_tokens(sample: RewardSample) -> float:
    """A reward with variance from the first sample on: the share of tokens with an even id."""
    ids = sample.response_ids
    return float((ids % 2 == 0).mean()) if len(ids) else 0.0


def algorithm_table(algorithm: Algorithm) -> dict[str, Any]:
    """[algorithm] for an instance: its class by path, and the settings that are not the defaults."""
    cls = type(algorithm)
    if "<locals>" in cls.__qualname__:
        raise ValueError(
            f"define {cls.__name__} at the top level of a module, so that a run can name it"
        )
    settings = attrs.asdict(algorithm.config, filter=lambda field, value: value != field.default)
    return {"name": f"{cls.__module__}:{cls.__qualname__}", **settings}


def tiny_job(tables: Mapping[str, Any]) -> Job:
    """The smallest job, with other tables over TABLES."""
    [job] = resolve_jobs(overlay(TABLES, expand(tables, SHORTHAND)), "conformance", SHORTHAND)
    return job


class TinyRun:
    """Steps of an algorithm, real from data to optimizer, without a run's folder. A context manager.

    `algorithm`: an instance, or an [algorithm] table; `tables`: other tables, over TABLES.
    """

    def __init__(
        self, algorithm: Algorithm | Mapping[str, Any], tables: Mapping[str, Any] | None = None
    ):
        table = algorithm_table(algorithm) if isinstance(algorithm, Algorithm) else dict(algorithm)
        self.job = tiny_job({"algorithm": table, **(tables or {})})
        self.algorithm = type(self.job.algorithm)(self.job.algorithm.config)
        self.session = Session(self.job, prepare(self.job))

    def __enter__(self) -> TinyRun:
        self.session.__enter__()
        self.ctx = self.session.context()
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    def step(self) -> dict[str, float]:
        """One step; its metrics."""
        self.ctx.step += 1
        self.algorithm.step(self.ctx)
        return self.ctx.finish().values()

    def worker(self, role: str) -> ModelWorker:
        """The worker of a role, which lives in this process."""
        placed = self.job.models[role]
        process: Any = self.session.pools[placed.pool].processes[0]
        return process.host.workers[role]

    def weights(self, role: str) -> dict[str, torch.Tensor]:
        """A copy of a role's weights by canonical name."""
        return {name: p.detach().clone() for name, p in self.worker(role).backend.full_parameters()}

    def checksums(self) -> dict[str, str]:
        """A digest of the weights of each model."""
        return {
            name: self.session.groups[name][1].checksum().result()[0] for name in self.job.models
        }

    def save(self, folder: Path) -> None:
        """As a checkpoint of the controller does."""
        self.session.save(folder)
        state = {
            "step": self.ctx.step,
            "algorithm": self.algorithm.state_dict(),
            "counters": self.ctx.counters,
            "data": self.session.tasks.state().result(),
        }
        (folder / "state.json").write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        self.session.load(folder)
        self.session.tasks.set_state(state["data"]).result()
        self.algorithm.load_state_dict(state["algorithm"])
        self.ctx.counters, self.ctx.step = state["counters"], state["step"]
