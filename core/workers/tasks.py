"""The worker for everything that is not a model: drawing data, numerical work on whole batches, reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.contracts.worker import RankContext, Worker, register
from hybridflow.core.data.examples import Example, ExampleSet
from hybridflow.core.data.sampler import Sampler
from hybridflow.core.job.schema import RewardPart
from hybridflow.core.plugins.resolve import load_source, reward_from
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.failures import at_last_token, score_by_rule


class TaskWorker(Worker):
    """Lives on rank 0 of a pool. Holds the data sets, so prompts reach the models without passing the controller."""

    def __init__(self, context: RankContext, sets: dict[str, DataConfig], tokenizer: Tokenizer):
        super().__init__(context)
        self.sets = {
            name: ExampleSet(load_source(config), config, tokenizer)
            for name, config in sets.items()
        }
        self.samplers = {n: Sampler(len(self.sets[n]), c.seed, c.shuffle) for n, c in sets.items()}

    @register(Protocol.RANK_ZERO, same_rows=False)
    def draw(self, name: str, count: int) -> Batch:
        """The next `count` rows of a data set."""
        sampler = self.samplers[name]
        first = sampler.epoch * sampler.n_rows + sampler.position
        rows = sampler.take(count)
        return self._batch(name, rows, np.arange(first, first + count))

    @register(Protocol.RANK_ZERO, same_rows=False)
    def rows(self, name: str, start: int, stop: int) -> Batch:
        """Rows by position, whatever the sampler's state (validation)."""
        return self._batch(name, np.arange(start, stop), np.arange(start, stop))

    def _batch(self, name: str, rows: np.ndarray, numbers: np.ndarray) -> Batch:
        """`numbers`: the group of each row; a row drawn twice is two groups."""
        examples = [self.sets[name][int(i)] for i in rows]
        if self.sets[name].config.rejected is not None:
            return _pairs(examples, numbers)
        columns: dict[str, Any] = {
            "prompt_ids": tokens([e.prompt_ids for e in examples], torch.int64),
            "group": torch.from_numpy(numbers.astype(np.int64)),
            "meta": [e.meta for e in examples],
        }
        if examples and all(e.response_ids is not None for e in examples):
            columns |= _responses([e.response_ids for e in examples])
        return Batch(columns)

    @register(Protocol.RANK_ZERO)
    def size(self, name: str) -> int:
        return len(self.sets[name])

    @register(Protocol.RANK_ZERO)
    def state(self) -> dict[str, Any]:
        return {name: sampler.state_dict() for name, sampler in self.samplers.items()}

    @register(Protocol.RANK_ZERO)
    def set_state(self, state: dict[str, Any]) -> None:
        for name, sampler in self.samplers.items():
            if name in state:
                sampler.load_state_dict(state[name])

    @register(
        Protocol.RANK_ZERO,
        reads=lambda batch, function: list(inspect.signature(function).parameters),
    )
    def compute(self, batch: Batch, function: Callable[..., Any]) -> Batch:
        """Call `function` with the columns that its parameters name (see core.context.StepContext.compute)."""
        return run_on_columns(batch, function)


def _responses(responses: Sequence[Any]) -> dict[str, Column]:
    """response_ids, and a loss_mask of ones."""
    ids = tokens(responses, torch.int64)
    return {
        "response_ids": ids,
        "loss_mask": Column(torch.ones(len(ids.values), dtype=torch.uint8), ids.lengths),
    }


def _pairs(examples: Sequence[Example], numbers: np.ndarray) -> Batch:
    """Two rows of each example: its response, then the rejected one."""
    twice = torch.from_numpy(np.repeat(numbers, 2).astype(np.int64))
    columns: dict[str, Any] = {
        "prompt_ids": tokens([e.prompt_ids for e in examples for _ in range(2)], torch.int64),
        "group": twice,
        "pair": twice,
        "preferred": torch.arange(2 * len(examples), dtype=torch.uint8) % 2 == 0,
        "meta": [e.meta for e in examples for _ in range(2)],
    }
    if examples and all(e.unsafe for e in examples):
        columns["unsafe"] = torch.tensor(
            [unsafe for e in examples for unsafe in e.unsafe], dtype=torch.uint8
        )
    return Batch(
        columns | _responses([ids for e in examples for ids in (e.response_ids, e.rejected_ids)])
    )


def run_on_columns(batch: Batch, function: Callable[..., Any]) -> Batch:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty or p.name in batch]
    columns = {name: batch[name] for name in names}
    ragged = [c.lengths for c in columns.values() if c.lengths is not None]
    out = function(**{name: _full(name, column) for name, column in columns.items()})
    if not isinstance(out, dict):
        raise TypeError(
            f"{function.__name__} must return a dict of columns and metrics, got {type(out).__name__}"
        )
    made: dict[str, Any] = {}
    metrics: dict[str, tuple[float, float]] = {}
    for name, value in out.items():
        if isinstance(value, (int, float)) or (
            isinstance(value, torch.Tensor) and value.dim() == 0
        ):
            metrics[name] = (float(value), 1.0)
        elif isinstance(value, torch.Tensor) and value.dim() >= 2 and ragged:
            made[name] = Column.from_padded(value, ragged[0])
        else:
            made[name] = value
    return Batch(made, Metrics(metrics))


def _full(name: str, column: Column) -> Any:
    if column.kind == "object":
        return column.values
    tensor = column.padded() if column.kind == "token" else torch.as_tensor(column.values)
    return tensor.float() if tensor.is_floating_point() or name == "loss_mask" else tensor


class RewardWorker(Worker):
    """Reward functions, on the rows of each dp rank."""

    def __init__(self, context: RankContext, parts: Sequence[RewardPart], tokenizer: Tokenizer):
        super().__init__(context)
        self.parts, self.tokenizer = parts, tokenizer
        self.rewards = [reward_from(p.function, p.options) for p in parts]

    @register(
        Protocol.THREE_D,
        reads=(
            "prompt_ids",
            "response_ids",
            "meta",
            "finish_reason",
            "episode_return",
            "loss_mask",
        ),
    )
    def score(self, batch: Batch, column: str) -> Batch:
        """`column` [rows] float32: the weighted sum; with several parts also rewards/<name>. Where a part is per token also
        token_`column` [rows, T]: each token's, with what counts for a whole response at its last. Raises RewardError."""
        samples = self._samples(batch)
        total = np.zeros(len(samples), dtype=np.float32)
        each = [np.zeros(len(sample.response_ids), np.float32) for sample in samples]
        columns: dict[str, Any] = {}
        means: dict[str, tuple[float, float]] = {}
        for part, reward in zip(self.parts, self.rewards, strict=True):
            values, failed = score_by_rule(
                reward, samples, part.name, part.on_failure, part.per_token
            )
            for tokens_, sample, value in zip(each, samples, values, strict=True):
                tokens_ += np.float32(part.weight) * (
                    value if part.per_token else at_last_token(value, sample)
                )
            if part.per_token:
                values = np.array([value.sum() for value in values], np.float32)
            if part.on_failure.score is not None:
                means[f"{part.name}_failed"] = (float(failed), float(len(samples)))
            total += np.float32(part.weight) * values
            if len(self.parts) > 1:
                columns[f"rewards/{part.name}"] = torch.from_numpy(values)
        if any(part.per_token for part in self.parts):
            columns[f"token_{column}"] = tokens(each, torch.float32)
        return Batch(
            {column: torch.from_numpy(total), **columns},
            Metrics({column: (float(total.sum()), len(total)), **means}),
        )

    def _samples(self, batch: Batch) -> list[RewardSample]:
        if batch.rows == 0:
            return []
        reasons = (
            batch["finish_reason"].values if "finish_reason" in batch else ["stop"] * batch.rows
        )
        returns: Sequence[float | None] = [None] * batch.rows
        if "episode_return" in batch:
            returns = torch.as_tensor(batch["episode_return"].values).tolist()
        written: Sequence[np.ndarray | None] = [None] * batch.rows
        if "loss_mask" in batch:
            written = [mask.numpy() > 0 for mask in batch["loss_mask"]]
        return [
            RewardSample(
                prompt=self.tokenizer.decode(prompt.numpy()),
                response=self.tokenizer.decode(response.numpy()),
                response_ids=response.numpy(),
                meta=meta,
                finish_reason=reason,
                episode_return=returned,
                written=mask,
            )
            for prompt, response, meta, reason, returned, mask in zip(
                batch["prompt_ids"],
                batch["response_ids"],
                batch["meta"].values,
                reasons,
                returns,
                written,
                strict=True,
            )
        ]
