"""TinyRun: the smallest real run of an algorithm, with everything in this process.

Models have two layers, prompts are two-digit sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.job.job import Job
from hybridflow.core.running.checkpoint import checkpoints_of
from hybridflow.core.running.pages import Page, Pages
from hybridflow.core.running.run import Run
from hybridflow.core.running.session import Session, prepare
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.core.workers.tasks import RewardWorker
from hybridflow.settle.config.load import expand
from hybridflow.settle.resolve import resolve_jobs
from hybridflow.settle.stages import overlay

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
"""The config of every model: two layers, a vocabulary of 16 tokens."""
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
"""The config that `TinyRun` starts from; roles that are not named here are as the actor."""


def even_tokens(sample: RewardSample) -> float:
    """Return the share of response tokens with an even id; 0 without tokens.

    Such a reward has variance from the first sample on.
    """
    ids = sample.response_ids
    return float((ids % 2 == 0).mean()) if len(ids) else 0.0


def algorithm_table(algorithm: Algorithm) -> dict[str, Any]:
    """Return the [algorithm] table of an instance.

    It has the class by its path, and the settings that are not the defaults. Raises ValueError for
    a class inside a function, which cannot be named by a path.
    """
    cls = type(algorithm)
    if "<locals>" in cls.__qualname__:
        raise ValueError(
            f"define {cls.__name__} at the top level of a module, so that a run can name it"
        )

    settings = attrs.asdict(algorithm.config, filter=lambda field, value: value != field.default)
    return {"name": f"{cls.__module__}:{cls.__qualname__}", **settings}


def tiny_job(tables: Mapping[str, Any]) -> Job:
    """Return the smallest job, with these tables laid over TABLES. Raises ConfigError."""
    # Shorthand is written out before tables are laid over each other.
    merged = overlay(TABLES, expand(tables))
    [job] = resolve_jobs(merged, "conformance")
    return job


class TinyRun:
    """Takes steps of an algorithm, real from data to optimizer, without a run's folder.

    It is a context manager. `algorithm` is an instance, or an [algorithm] table; `tables` are other
    tables, which are laid over TABLES.
    """

    def __init__(
        self, algorithm: Algorithm | Mapping[str, Any], tables: Mapping[str, Any] | None = None
    ):
        table = algorithm_table(algorithm) if isinstance(algorithm, Algorithm) else dict(algorithm)

        # The run has an instance of its own: the author's is left as it is.
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
        """Take one step and return its metrics."""
        # As the controller's loop does, without its checkpoints and trackers.
        self.ctx.step += 1
        self.algorithm.step(self.ctx)
        return self.ctx.finish().values()

    def steps(
        self, count: int, at_end: Callable[[], object] = lambda: None
    ) -> list[dict[str, float]]:
        """Take steps as the controller does, ahead with run.max_staleness; return their metrics.

        at_end: called as each of them has ended.
        """
        steps = self.ctx.step + count
        job = attrs.evolve(self.job, run=attrs.evolve(self.job.run, steps=steps))
        run = Run(job, self.session, self.ctx, checkpoints_of(job), step=self.ctx.step)
        metrics = []

        def end(page: Page) -> bool:
            metrics.append(pages.finish(page).values())
            run.step = self.ctx.step = page.step
            pages.publish()
            at_end()
            return run.step < steps

        pages = Pages(run, self.algorithm, end)
        pages.publish()
        pages.all()
        return metrics

    def worker(self, role: str) -> ModelWorker:
        """Return the worker of a role, which lives in this process."""
        # Under the inline runtime a process is an object that has the worker.
        placed = self.job.models[role]
        process: Any = self.session.pools[placed.pool].processes[0]
        return process.host.workers[role]

    def scorer(self, role: str) -> RewardWorker:
        """Return the worker of a role that scores by functions, which lives in this process."""
        process: Any = self.session.groups[role][1].pool.processes[0]
        return process.host.workers[role]

    def weights(self, role: str) -> dict[str, torch.Tensor]:
        """Return a copy of a role's weights by canonical name."""
        parameters = self.worker(role).backend.full_parameters()
        return {name: values.detach().clone() for name, values in parameters}

    def checksums(self) -> dict[str, str]:
        """Return model -> a digest of its weights."""
        digests = {}
        for name in self.job.models:
            _, group = self.session.groups[name]
            digests[name] = group.checksum().result()[0]
        return digests

    def save(self, folder: Path) -> None:
        """Write the run's state into a folder, as a checkpoint of the controller does."""
        # The models and pools write files of their own.
        self.session.save(folder)
        self.session.saved(wait=True)()
        state = {
            "step": self.ctx.step,
            "algorithm": self.algorithm.state_dict(),
            "counters": self.ctx.counters,
            "data": self.session.data.state().result(),
        }
        (folder / "state.json").write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Go on from a folder that `save` wrote."""
        state = json.loads((folder / "state.json").read_text())

        # The models and pools, then the data source, the algorithm and the context.
        self.session.load(folder)
        self.session.data.set_state(state["data"]).result()
        self.algorithm.load_state_dict(state["algorithm"])
        self.ctx.counters = state["counters"]
        self.ctx.step = state["step"]
