"""Scores a model's responses to held-out rows: greedy ones, and sampled ones where asked.

rows of a data set, in chunks
    |  ctx.actor.generate            greedy once, and `samples` times
    |  ctx.reward.score
    v
records (records.py)  --figures-->  mean reward, pass@k, maj@k, with intervals
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.reward import Reward, RewardFailureRule
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins.resolve import reward_from
from hybridflow.core.running.folder import versions
from hybridflow.core.running.lock import hold
from hybridflow.core.running.session import Prepared, Session, prepare
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.files import MARK
from hybridflow.core.workers.failures import score_by_rule
from hybridflow.inference.records import (
    Record,
    append_records,
    cut_to_chunks,
    of_run,
    read_records,
)
from hybridflow.inference.scores import Figure, difference, figure, majority_score, pass_at_k
from hybridflow.settle.changes import settings

SETTINGS = "evaluation.json"
"""The file in an evaluation's folder that says what is evaluated."""
FIGURES = "figures.json"
"""The file of its figures, written when it is complete."""
FIRST = "validation"
"""The name of the first data set in the job, whose first row the reward is tried on."""
WEIGHTS = (".safetensors",)
"""How the names of files with weights end."""
Say = Callable[[str], None]


@attrs.frozen(eq=False)
class Evaluation:
    """What to evaluate, and where to write it."""

    label: str
    """The model, for people."""
    job: Job
    sets: Mapping[str, DataConfig]
    """The data sets, by their names for people."""
    samples: int = 0
    """Sampled responses of each row, beside the greedy one."""

    @property
    def folder(self) -> Path:
        """The folder of its records."""
        return self.job.folder

    def records(self, name: str) -> Path:
        """Return the file with the records of a data set."""
        return self.folder / f"{name}.jsonl"

    def chunks(self, rows: int) -> list[range]:
        """Return the row numbers of each chunk of a data set with `rows` rows."""
        assert self.job.validation is not None
        size = max(1, self.job.validation.batch_rows // max(1, self.samples))
        return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


@attrs.frozen(eq=False)
class Measure:
    """The figures that are computed from scored responses."""

    pass_at: Sequence[int] = ()
    """Each k of which pass@k is computed."""
    success: float = 1.0
    """The lowest score at which a response counts as right."""
    majority: bool = False
    """Whether the majority's answer is scored too."""

    def values(self, records: Sequence[Record], samples: int) -> dict[str, list[float]]:
        """Return figure -> its value for each row."""
        greedy = {record.row: record.score for record in records if record.sample is None}
        values = {"greedy": [greedy[row] for row in sorted(greedy)]} if greedy else {}
        if all(record.sample is None for record in records):
            return values

        # Sampled responses of each row, in order.
        by_row: dict[int, list[Record]] = {}
        for record in records:
            if record.sample is not None:
                by_row.setdefault(record.row, []).append(record)
        rows = [by_row[row] for row in sorted(by_row)]
        values["mean"] = [float(np.mean([one.score for one in row])) for row in rows]
        if not samples:  # groups of a run's steps, which need not be complete
            return values
        for k in self.pass_at:
            right = [sum(one.score >= self.success for one in row) for row in rows]
            values[f"pass@{k}"] = [pass_at_k(samples, count, k) for count in right]
        if self.majority:
            values[f"maj@{samples}"] = [
                majority_score([one.answer for one in row], [one.score for one in row])
                for row in rows
            ]
        return values

    def figures(self, values: Mapping[str, Sequence[float]]) -> dict[str, Figure]:
        """Return the figures with their intervals."""
        return {name: figure(rows) for name, rows in values.items()}

    def differences(
        self, values: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]
    ) -> dict[str, Figure]:
        """Return each figure less another model's on the same rows, with intervals."""
        return {name: difference(rows, others[name]) for name, rows in values.items()}


def evaluate(
    evaluation: Evaluation, measure: Measure, say: Say, overwrite: bool = False
) -> dict[str, list[Record]]:
    """Generate and score the rows without records on disk; return the records of each data set.

    overwrite: replace an evaluation with other settings. Raises ConfigError where the folder has
    one, and the errors of preparing and running a job.
    """
    job = evaluation.job
    answers = answering(job, measure.majority)
    keys = {f"set-{at}" if at else FIRST: name for at, name in enumerate(evaluation.sets)}
    sets = {key: evaluation.sets[name] for key, name in keys.items()}
    prepared = prepare(job, sets=sets)
    for note in prepared.notes:
        say(f"note: {note}")

    with hold(evaluation.folder):
        _same_settings(evaluation, overwrite)
        left = {}
        for key, name in keys.items():
            chunks = evaluation.chunks(prepared.rows[key])
            lines = [len(rows) * (1 + evaluation.samples) for rows in chunks]
            done = cut_to_chunks(evaluation.records(name), lines)
            if done:
                say(f"{name}: {chunks[done - 1].stop} of {prepared.rows[key]} rows are there")
            left[key] = chunks[done:]
        if any(left.values()):
            _generate(evaluation, prepared, keys, left, answers, say)
    return {name: read_records(evaluation.records(name)) for name in evaluation.sets}


def _same_settings(evaluation: Evaluation, overwrite: bool) -> None:
    """Write the evaluation's settings; raise ConfigError where the folder has different ones."""
    file = evaluation.folder / SETTINGS
    now = {
        "model": evaluation.label,
        "samples": evaluation.samples,
        "sets": {name: attrs.asdict(config) for name, config in evaluation.sets.items()},
        "settings": settings(evaluation.job),
        "weights": _weights(evaluation.job),
    }
    now = json.loads(json.dumps(now, default=str))
    responses = any(evaluation.folder.glob("*.jsonl"))  # else it failed before the first one
    if file.is_file() and responses and not overwrite:
        before = json.loads(file.read_text())
        differing = [key for key in now if before.get(key) != now[key]]
        if differing:
            raise ConfigError(
                f"{evaluation.folder}: has an evaluation of other {', '.join(differing)}; give "
                "this one a folder of its own (--out), or replace that one (--overwrite)"
            )
        return
    for path in (*evaluation.folder.glob("*.jsonl"), evaluation.folder / FIGURES):
        path.unlink(missing_ok=True)
    now["versions"] = versions(evaluation.job)
    file.write_text(json.dumps(now, indent=2) + "\n")


def _weights(job: Job) -> dict[str, tuple[int, int]]:
    """Return file -> (size, time) of the model's weights, by which changed files are noticed."""
    spec = job.models["actor"].spec
    weights = {}
    for folder in (spec.model.path, spec.backend_config.checkpoint):
        for path in sorted(Path(folder).iterdir()) if folder else ():
            if path.suffix in WEIGHTS:
                weights[path.name] = (path.stat().st_size, path.stat().st_mtime_ns)
    return weights


def answering(job: Job, needed: bool) -> Reward | None:
    """Return the job's reward if it can extract a response's answer, else None.

    needed: raise ConfigError instead of returning None.
    """
    parts = job.rewards
    reward = reward_from(parts[0].function, parts[0].options) if len(parts) == 1 else None
    if reward is not None and reward.answers:
        return reward
    if needed:
        name = f"reward {parts[0].function!r}" if len(parts) == 1 else "a sum of rewards"
        raise ConfigError(
            f"--majority: {name} does not say what the answer of a response is; give the reward a "
            "method answer(sample), or a function an attribute `answer` that is such a function"
        )
    return None


def _generate(
    evaluation: Evaluation,
    prepared: Prepared,
    keys: Mapping[str, str],
    left: Mapping[str, Sequence[range]],
    answers: Reward | None,
    say: Say,
) -> None:
    """Generate and score the chunks that are left, and append their records."""
    with Session(evaluation.job, prepared, say) as session:
        ctx = session.context()
        for key, chunks in left.items():
            name = keys[key]
            for rows in chunks:
                batch = session.rows(key, rows.start, rows.stop)
                prompts = batch.select(["prompt_ids", "group", "meta"])

                # A response's number seeds its draws, so it follows from row and sample alone.
                made = [(ctx.actor.generate(prompts, greedy=True), 1)]
                if evaluation.samples:
                    ctx.counters["samples"] = rows.start * evaluation.samples
                    many = prompts.repeat(evaluation.samples)
                    made.append((ctx.actor.generate(many), evaluation.samples))
                records: list[Record] = []
                for index, (responses, each) in enumerate(made):
                    scored = responses.join(ctx.reward.score(responses))
                    column = ctx.roles["reward"].role.column
                    found = _records(scored, column, prepared.tokenizer, answers)
                    for at, record in enumerate(found):
                        row = rows.start + at // each
                        sample = at % each if index else None
                        records.append(attrs.evolve(record, row=row, sample=sample))
                append_records(evaluation.records(name), records)
                ctx.finish()
                say(f"{name}: {rows.stop} of {prepared.rows[key]} rows")


def _records(
    scored: Batch, column: str, tokenizer: Tokenizer, answers: Reward | None
) -> list[Record]:
    """Return the records of a scored batch, whose row numbers are still to be set.

    Raises RewardError for a row that has failed: a figure over fewer rows would be another one.
    """
    scores = torch.as_tensor(scored[column].values).tolist()
    if left_out := sum(map(math.isnan, scores)):
        raise RewardError(
            f"{left_out} of {len(scores)} responses have failed and have no score (the log says "
            "why), and an evaluation leaves no row out; try them again (on_failure.retries), give "
            "them a score (on_failure.score), or mend what failed; the same command goes on here"
        )
    rows = zip(
        scored["prompt_ids"],
        scored["response_ids"],
        scored["meta"].values,
        scored["finish_reason"].values,
        scores,
        strict=True,
    )
    records = []
    for prompt, response, meta, reason, score in rows:
        record = Record(
            row=0,
            sample=None,
            prompt=tokenizer.decode(prompt.numpy()),
            response=tokenizer.decode(response.numpy()),
            response_ids=response.tolist(),
            score=score,
            finish_reason=reason,
            answer=None,
            meta=dict(meta),
        )
        if answers is not None:
            record = attrs.evolve(record, answer=answers.answer(record.to_sample()))
        records.append(record)
    return records


def rescore(
    source: Path, reward: Reward, name: str, out: Path
) -> tuple[dict[str, list[Record]], int]:
    """Score responses again, by another reward, without a model.

    source: the folder of an evaluation, or of a run, whose recorded samples are scored. Returns the
    records of each data set, which are written to `out`, and the number of sampled responses of a
    row, 0 for a run. Raises ConfigError for a folder without a complete evaluation or samples.
    """
    if (source / MARK).is_file():
        before, samples = of_run(source), 0
    else:
        before, samples = _of_evaluation(source, out)
    out.mkdir(parents=True, exist_ok=True)
    sets = {}
    for set_name, records in before.items():
        asked = [record.to_sample() for record in records]
        scores, _ = score_by_rule(reward, asked, name, RewardFailureRule())
        answers = [reward.answer(sample) if reward.answers else None for sample in asked]
        sets[set_name] = [
            attrs.evolve(record, score=float(score), answer=answer)
            for record, score, answer in zip(records, scores, answers, strict=True)
        ]
        (out / f"{set_name}.jsonl").unlink(missing_ok=True)
        append_records(out / f"{set_name}.jsonl", sets[set_name])
    return sets, samples


def _of_evaluation(source: Path, out: Path) -> tuple[dict[str, list[Record]], int]:
    """Return the records of an evaluation by data set, and its sampled responses of a row."""
    file = source / SETTINGS
    if not file.is_file():
        raise ConfigError(
            f"--rescore: {source} is neither the folder of an evaluation (no {SETTINGS}) nor of a "
            f"run (no {MARK})"
        )
    if not (source / FIGURES).is_file():
        raise ConfigError(
            f"--rescore: the evaluation in {source} is not complete; the command that began it "
            "goes on with it"
        )
    if out.resolve() == source.resolve():
        raise ConfigError(f"--out {out}: the scores of the evaluation there would be lost")
    before = json.loads(file.read_text())
    sets = {name: read_records(source / f"{name}.jsonl") for name in before["sets"]}
    return sets, before["samples"]


def summary(
    label: str, samples: int, figures: Mapping[str, Mapping[str, Figure]]
) -> dict[str, Any]:
    """Return the figures of each data set as JSON has them."""
    return {
        "model": label,
        "samples": samples,
        "figures": {
            name: {key: attrs.asdict(value) for key, value in own.items()}
            for name, own in figures.items()
        },
    }
