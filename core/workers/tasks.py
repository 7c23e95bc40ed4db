"""The workers for everything that is not a model.

DataWorker draws data and keeps responses that have left their engine, TaskWorker does numerical
work on whole batches, RewardWorker calls reward functions.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.contracts.worker import RankContext, Worker, register
from hybridflow.core.data.examples import Example, ExampleSet
from hybridflow.core.data.sampler import Sampler
from hybridflow.core.errors import DataError, HybridFlowError, RewardError
from hybridflow.core.job.sections import RewardPart
from hybridflow.core.plugins.resolve import load_source, reward_from
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import COMPLETE, FAILED_REWARD, failed, failed_rows
from hybridflow.core.workers.batch_files import read_batch, write_batch
from hybridflow.core.workers.failures import at_last_token, score_by_rule
from hybridflow.core.workers.generation import COLLECTED, samples_of
from hybridflow.core.workers.landed import Landed

DRAWN = "drawn_prompt_ids"
"""The prompts that were drawn, beside those of environments that have their own."""


def drawn(prompts: Batch) -> Batch:
    """Return the rows' prompts alone, as the column DRAWN."""
    return prompts.select(["prompt_ids"]).rename(prompt_ids=DRAWN)


class DataWorker(Worker):
    """The worker on rank 0 of a pool that holds the data sets.

    So prompts reach the models without passing through the controller.
    """

    def __init__(self, context: RankContext, sets: dict[str, DataConfig], tokenizer: Tokenizer):
        """Load the data sets, by name, and put a sampler on each."""
        super().__init__(context)
        self.tokenizer = tokenizer
        self.sets = {
            name: ExampleSet(load_source(config), config, tokenizer)
            for name, config in sets.items()
        }
        self.samplers = {
            name: Sampler(len(self.sets[name]), config.seed or 0, config.shuffle)
            for name, config in sets.items()
        }
        self.landed: defaultdict[str, Landed] = defaultdict(Landed)
        """Role -> its responses that are complete before their step's turn."""

    @register(Protocol.RANK_ZERO, same_rows=False, early=True)
    def draw(self, name: str, count: int) -> Batch:
        """Return the next `count` rows of a data set."""
        # Numbers go on over epochs, so that groups of different epochs differ.
        sampler = self.samplers[name]
        first = sampler.epoch * sampler.n_rows + sampler.position
        rows = sampler.take(count)
        return self._batch(name, rows, np.arange(first, first + count))

    @register(Protocol.RANK_ZERO, same_rows=False)
    def rows(self, name: str, start: int, stop: int) -> Batch:
        """Return the rows by position, for any state of the sampler (validation)."""
        return self._batch(name, np.arange(start, stop), np.arange(start, stop))

    def _batch(self, name: str, rows: np.ndarray, numbers: np.ndarray) -> Batch:
        """Return the columns of these rows.

        numbers: the `group` of each row; a row that is drawn twice is two groups.
        """
        return example_batch([self.sets[name][int(row)] for row in rows], numbers)

    @register(Protocol.RANK_ZERO, same_rows=False, early=True)
    def encode(self, texts: list[str | list[Mapping[str, Any]]]) -> Batch:
        """Return prompts of texts and chats, made as those of the training data."""
        examples = [self.sets["train"].prompt(text) for text in texts]
        return example_batch(examples, -1 - np.arange(len(examples)))

    @register(Protocol.RANK_ZERO, reads=lambda batch, column: [column], early=True)
    def decode(self, batch: Batch, column: str) -> list[str]:
        """Return the texts of a column of tokens."""
        return [self.tokenizer.decode(ids.numpy()) for ids in batch[column]]

    @register(Protocol.RANK_ZERO)
    def size(self, name: str) -> int:
        """Return the number of examples of a data set."""
        return len(self.sets[name])

    @register(Protocol.RANK_ZERO)
    def state(self) -> dict[str, Any]:
        """Return the state of each sampler, by the data set's name, for a checkpoint."""
        return {name: sampler.state_dict() for name, sampler in self.samplers.items()}

    @register(Protocol.RANK_ZERO)
    def set_state(self, state: dict[str, Any]) -> None:
        """Set the samplers to `state`. Raises DataError when a sampler's settings differ."""
        for name, sampler in self.samplers.items():
            if name in state:
                sampler.load_state_dict(state[name])

    @register(Protocol.RANK_ZERO)
    def keep(self, batch: Batch, file: str) -> str:
        """Write a batch into a file; return its SHA-256."""
        return write_batch(Path(file), batch)

    @register(Protocol.RANK_ZERO, same_rows=False)
    def kept(self, file: str, digest: str) -> Batch:
        """Return the batch that `keep` wrote. Raises DamagedError if the file is another."""
        return read_batch(Path(file), digest)

    # Responses of engines that never stop (landed.py)
    @register(Protocol.RANK_ZERO)
    def land(self, role: str, rows: Batch) -> list[int]:
        """Take a role's responses that are complete; return the numbers of their samples."""
        return self.landed[role].land(rows)

    @register(Protocol.RANK_ZERO, reads=("sample_id",), writes=COLLECTED, late=True)
    def collect(self, batch: Batch, role: str, step: int) -> Batch:
        """Return the landed responses to these rows; step: the one that trains on them."""
        return self.landed[role].collect(samples_of(batch), step)

    @register(Protocol.RANK_ZERO)
    def publish(self, role: str, versions: Mapping[int, int]) -> None:
        """Note step -> the version of a role's weights after it; these steps have ended."""
        self.landed[role].publish(versions)

    @register(Protocol.RANK_ZERO)
    def keep_opened(self, role: str, rows: list[Batch], file: str) -> str:
        """Write a role's open rows, as engines have them, and those landed; return the SHA-256."""
        landed = self.landed[role].rows()
        return write_batch(Path(file), Batch.concat([*rows, landed]))

    @register(Protocol.RANK_ZERO)
    def journal(self, batch: Batch, file: str) -> tuple[str, str]:
        """Write what was generated into a file; return the SHA-256 of it, and of DRAWN."""
        columns = {name: batch[name] for name in batch.names if name != DRAWN}
        return write_batch(Path(file), Batch(columns, batch.metrics)), _sum(batch[DRAWN])

    @register(Protocol.RANK_ZERO, reads=("prompt_ids",))
    def replay(self, batch: Batch, file: str, rows_sum: str, prompts_sum: str) -> Batch:
        """Return what `journal` wrote, for the same prompts.

        Raises DamagedError for a file that is not as it was, HybridFlowError for other prompts.
        """
        if _sum(batch["prompt_ids"]) != prompts_sum:
            raise HybridFlowError(
                f"the prompts are not those that the responses in {file} are of: the data, the "
                "tokenizer or the settings by which prompts are drawn (run.seed, data.seed, sizes "
                "of the algorithm) differ from those of the run that is replayed (run.replay)"
            )
        return read_batch(Path(file), rows_sum)

    @register(Protocol.RANK_ZERO)
    def matched(self, prompts: Batch, kept: Batch) -> Batch:
        """Return what was generated before a checkpoint for these prompts.

        Raises HybridFlowError where it was generated for others.
        """
        now, then = prompts["prompt_ids"], kept[DRAWN]
        same = now.rows == then.rows and all(map(torch.equal, now, then))
        if not same:
            raise HybridFlowError(
                "the prompts of the first step are not those that the checkpoint's responses are "
                "of: the data, or the settings by which prompts are drawn, have changed since; go "
                "on with the former ones, or with run.max_staleness = 0, which generates anew"
            )
        columns = {name: kept[name] for name in kept.names if name != DRAWN}
        return Batch(columns, kept.metrics)


class TaskWorker(Worker):
    """The worker on rank 0 of a pool that does numerical work on whole batches."""

    @register(
        Protocol.RANK_ZERO,
        reads=lambda batch, function: list(inspect.signature(function).parameters),
    )
    def compute(self, batch: Batch, function: Callable[..., Any]) -> Batch:
        """Call `function` with the columns that its parameters name (StepContext.compute)."""
        return run_on_columns(batch, function)


def _sum(column: Column) -> str:
    """Return the SHA-256 of a column of tokens."""
    assert column.lengths is not None
    found = hashlib.sha256(column.lengths.astype(np.int64).tobytes())
    found.update(torch.as_tensor(column.values).to(torch.int64).numpy().tobytes())
    return found.hexdigest()


def example_batch(examples: Sequence[Example], numbers: np.ndarray) -> Batch:
    """Return the columns of examples; `numbers`: the `group` of each."""
    if examples and examples[0].rejected_ids is not None:
        return _pairs(examples, numbers)

    columns: dict[str, Any] = {
        "prompt_ids": tokens([example.prompt_ids for example in examples], torch.int64),
        "group": torch.from_numpy(numbers.astype(np.int64)),
        "meta": [example.meta for example in examples],
    }
    # Data with responses (supervised fine-tuning) has them in every example.
    responses = [example.response_ids for example in examples]
    if examples and all(response is not None for response in responses):
        columns |= _responses(responses)
    return Batch(columns)


def _responses(responses: Sequence[Any]) -> dict[str, Column]:
    """Return the columns response_ids, and loss_mask with ones."""
    ids = tokens(responses, torch.int64)
    ones = torch.ones(len(ids.values), dtype=torch.uint8)
    return {"response_ids": ids, "loss_mask": Column(ones, ids.lengths)}


def _pairs(examples: Sequence[Example], numbers: np.ndarray) -> Batch:
    """Return two rows for each example: its response, then the rejected one."""
    doubled = list(chain.from_iterable((example, example) for example in examples))
    responses = chain.from_iterable(
        (example.response_ids, example.rejected_ids) for example in examples
    )
    twice = torch.from_numpy(np.repeat(numbers, 2).astype(np.int64))
    columns: dict[str, Any] = {
        "prompt_ids": tokens([example.prompt_ids for example in doubled], torch.int64),
        "group": twice,
        "pair": twice,
        "preferred": torch.arange(2 * len(examples), dtype=torch.uint8) % 2 == 0,
        "meta": [example.meta for example in doubled],
    }

    # The flags are used only if every example has them.
    if examples and all(example.unsafe for example in examples):
        unsafe = list(chain.from_iterable(example.unsafe for example in examples))
        columns["unsafe"] = torch.tensor(unsafe, dtype=torch.uint8)
    return Batch(columns | _responses(list(responses)))


def run_on_columns(batch: Batch, function: Callable[..., Any]) -> Batch:
    """Call `function` with the columns that its parameters name; return its results as a batch.

    Token columns come padded, [rows, longest]. Of the returned dict, numbers become metrics,
    tensors [rows, T, ...] token columns with the lengths of the first token column of this T, and
    all else columns. Raises TypeError when the function returns no dict, and HybridFlowError where
    no token column has T tokens in its longest row.
    """
    # A parameter with a default is left to it where the batch has no such column.
    parameters = inspect.signature(function).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty or parameter.name in batch
    ]
    for name in names:
        if name not in batch:
            raise HybridFlowError(
                f"{_name_of(function)}: the batch has no column {name!r}; its parameters name "
                "columns of the batch, or have a default"
            )
    columns = {name: batch[name] for name in names}
    outputs = function(**{name: _full(name, column) for name, column in columns.items()})
    if not isinstance(outputs, dict):
        raise TypeError(
            f"{_name_of(function)} must return a dict of columns and metrics, "
            f"got {type(outputs).__name__}"
        )

    # Padded outputs are cut by the lengths of the token column that is as long.
    ragged = [column.lengths for column in columns.values() if column.lengths is not None]
    new_columns: dict[str, Any] = {}
    metrics: dict[str, tuple[float, float]] = {}
    for name, value in outputs.items():
        is_tensor = isinstance(value, torch.Tensor)
        if isinstance(value, (int, float)) or (is_tensor and value.dim() == 0):
            metrics[name] = (float(value), 1.0)
        elif is_tensor and value.dim() >= 2 and ragged:
            new_columns[name] = Column.from_padded(value, _lengths(function, name, value, ragged))
        else:
            new_columns[name] = value
    return Batch(new_columns, Metrics(metrics))


def _lengths(
    function: Callable[..., Any], name: str, value: torch.Tensor, ragged: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the lengths of the rows of a padded output, from those of the token columns."""
    shapes = [(len(lengths), int(lengths.max(initial=0))) for lengths in ragged]
    for shape, lengths in zip(shapes, ragged, strict=True):
        if tuple(value.shape[:2]) == shape:
            return lengths
    listed = " or ".join(map(str, dict.fromkeys(shapes)))
    raise HybridFlowError(
        f"{_name_of(function)}: {name} has shape {tuple(value.shape)}, and "
        f"the token columns that it got are [rows, T] = {listed}; return as many rows and tokens"
    )


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function))


def _full(name: str, column: Column) -> Any:
    """Return a column as an argument: objects, or a tensor; floats and masks are float32."""
    if column.kind == "object":
        return column.values
    tensor = column.padded() if column.kind == "token" else torch.as_tensor(column.values)
    return tensor.float() if tensor.is_floating_point() or name == "loss_mask" else tensor


def _answer_ids(meta: Mapping[str, Any], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a row's expected answer; only eos where it cannot be encoded."""
    try:
        ids = tokenizer.encode(str(meta.get("answer") or ""))
    except DataError:
        ids = np.zeros(0, np.int64)
    return np.append(ids, tokenizer.eos_id)


def reward_columns(column: str, parts: Sequence[RewardPart]) -> tuple[str, ...]:
    """Return the columns that RewardWorker.score writes."""
    each = tuple(f"rewards/{part.name}" for part in parts) if len(parts) > 1 else ()
    per_token = (f"token_{column}",) if any(part.per_token for part in parts) else ()
    left_out = ("outcome", "loss_mask") if any(part.on_failure.mask for part in parts) else ()
    return (column, *each, *per_token, *left_out)


def _left_out(batch: Batch, outcomes: Sequence[str], lost: np.ndarray) -> dict[str, Any]:
    """Return the columns outcome and loss_mask, in which the rows of `lost` have failed.

    outcomes: the outcome of each row before its score.
    """
    masks = [torch.ones(len(ids), dtype=torch.uint8) for ids in batch["response_ids"]]
    if "loss_mask" in batch:
        masks = list(batch["loss_mask"])
    zeroed = [mask * 0 if gone else mask for mask, gone in zip(masks, lost, strict=True)]
    now = [
        FAILED_REWARD if gone and not failed(outcome) else outcome
        for outcome, gone in zip(outcomes, lost, strict=True)
    ]
    return {"outcome": now, "loss_mask": tokens(zeroed, torch.uint8)}


class RewardWorker(Worker):
    """Calls reward functions, on the rows of each data parallel rank."""

    def __init__(self, context: RankContext, parts: Sequence[RewardPart], tokenizer: Tokenizer):
        """Make the reward of each part; `tokenizer` gives them prompts and responses as texts."""
        super().__init__(context)
        self.parts = parts
        self.tokenizer = tokenizer
        self.rewards = [reward_from(part.function, part.options) for part in parts]

    @register(
        Protocol.THREE_D,
        reads=(
            "prompt_ids",
            "response_ids",
            "meta",
            "finish_reason",
            "episode_return",
            "loss_mask",
            "outcome",
        ),
    )
    def score(self, batch: Batch, column: str) -> Batch:
        """Return `column`, float32 [rows]: the weighted sum of the parts.

        With several parts the batch also has rewards/<name> of each. If a part is per token it also
        has token_`column`, float32 [T] per row: each token's sum, with the scores of whole
        responses at the last token. Rows that have failed are not scored: they are NaN. Where a
        part leaves rows out, the batch also has `outcome`, and `loss_mask` with zeros for them.
        Raises RewardError.
        """
        samples = self._samples(batch)
        outcomes = (
            list(batch["outcome"].values) if "outcome" in batch else [COMPLETE] * len(samples)
        )
        lost = failed_rows(outcomes)
        alive = np.flatnonzero(~lost)
        scored = [samples[row] for row in alive]

        # Sums over the parts: per row, and per token of each row.
        total = np.zeros(len(samples), dtype=np.float32)
        per_token = [np.zeros(len(sample.response_ids), np.float32) for sample in samples]
        columns: dict[str, Any] = {}
        means: dict[str, tuple[float, float]] = {}
        for part, reward in zip(self.parts, self.rewards, strict=True):
            values, gave_up = score_by_rule(
                reward, scored, part.name, part.on_failure, part.per_token
            )

            # The score of a whole response counts at its last token.
            weight = np.float32(part.weight)
            for row, sample, value in zip(alive, scored, values, strict=True):
                per_token[row] += weight * (
                    value if part.per_token else at_last_token(value, sample)
                )

            # And the reverse: a row's reward is the sum of its tokens'.
            if part.per_token:
                values = np.array([value.sum() for value in values], np.float32)
            if not part.on_failure.ends_run:
                means[f"{part.name}_failed"] = (float(gave_up.sum()), float(len(scored)))
            if part.on_failure.mask:
                lost[alive[gave_up]] = True
            total[alive] += weight * values
            if len(self.parts) > 1:
                each = np.full(len(samples), np.nan, np.float32)
                each[alive] = values
                columns[f"rewards/{part.name}"] = torch.from_numpy(each)
        total[lost] = np.nan

        # Without per-token parts there are only the rows' sums.
        if any(part.per_token for part in self.parts):
            columns[f"token_{column}"] = tokens(per_token, torch.float32)
        if any(part.on_failure.mask for part in self.parts):
            columns |= _left_out(batch, outcomes, lost)
        kept = total[~lost]
        means = {column: (float(kept.sum()), len(kept)), **means}
        metrics = Metrics(means, spreads={column: kept})
        return Batch({column: torch.from_numpy(total), **columns}, metrics)

    @register(Protocol.RANK_ZERO, reads=("prompt_ids", "response_ids", "meta", "episode_return"))
    def try_out(self, batch: Batch, where: str) -> None:
        """Score one row of the data, so that a reward that cannot work ends the run.

        The response is the row's own, else its expected answer; then a wrong one, the prompt, is
        scored too. Raises RewardError.
        """
        if "response_ids" not in batch:
            answers = [_answer_ids(meta, self.tokenizer) for meta in batch["meta"].values]
            batch = batch.join(Batch({"response_ids": tokens(answers, torch.int64)}))
        [right, *_] = self._samples(batch)
        wrong = attrs.evolve(
            right,
            response=right.prompt,
            response_ids=next(iter(batch["prompt_ids"])).numpy(),
            written=None,
        )
        for part, reward in zip(self.parts, self.rewards, strict=True):
            try:
                samples = [right, wrong]
                score_by_rule(reward, samples, part.name, part.on_failure, part.per_token)
            except RewardError as error:
                raise RewardError(
                    f"tried on {where}, before any model is built: {error}"
                ) from error

    def _samples(self, batch: Batch) -> list[RewardSample]:
        """Return the rows as samples for rewards; missing columns get neutral values."""
        if batch.rows == 0:
            return []

        reasons: Any = ["stop"] * batch.rows
        if "finish_reason" in batch:
            reasons = batch["finish_reason"].values
        returns: Any = [None] * batch.rows
        if "episode_return" in batch:
            returns = torch.as_tensor(batch["episode_return"].values).tolist()
        written: Any = [None] * batch.rows
        if "loss_mask" in batch:  # 0 where the environment wrote
            written = [mask.numpy() > 0 for mask in batch["loss_mask"]]

        rows = zip(
            batch["prompt_ids"],
            batch["response_ids"],
            batch["meta"].values,
            reasons,
            returns,
            written,
            strict=True,
        )
        return [
            RewardSample(
                prompt=self.tokenizer.decode(prompt.numpy()),
                response=self.tokenizer.decode(response.numpy()),
                response_ids=response.numpy(),
                meta=meta,
                finish_reason=reason,
                episode_return=episode_return,
                written=mask,
            )
            for prompt, response, meta, reason, episode_return, mask in rows
        ]
