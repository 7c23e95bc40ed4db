"""Ends a run in which too many rows have failed."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.errors import EnvironmentFailure, HybridFlowError, RewardError
from hybridflow.core.job.job import Job
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import FAILED_ENVIRONMENT, FAILED_TOOL


def check_failed(job: Job, step: int, metrics: Metrics) -> None:
    """Raise EnvironmentFailure or RewardError if a share of the step's rows is above max_failed."""
    values = metrics.values()
    for names, rule, setting, error in _masked(job):
        share = sum(values.get(name, 0.0) for name in names)
        if share > rule.max_failed:
            shares = ", ".join(f"{name} {values.get(name, 0.0):.3g}" for name in names)
            raise error(
                f"step {step}: {share:.0%} of the rows have failed ({shares}), more than "
                f"{setting} = {rule.max_failed:g}; the log has each failure: mend them, or raise "
                "the limit"
            )


def _masked(job: Job) -> Iterator[tuple[list[str], FailureRule, str, type[HybridFlowError]]]:
    """Yield for each rule that leaves rows out: its metrics, itself, its setting, its error."""
    if job.environment is not None and job.environment.on_failure.mask:
        rule = job.environment.on_failure
        for name, placed in job.models.items():
            if placed.spec.engine is not None:
                names = [f"{name}/{FAILED_TOOL}", f"{name}/{FAILED_ENVIRONMENT}"]
                yield names, rule, "environment.on_failure.max_failed", EnvironmentFailure
    for name, scorer in job.scorers.items():
        for part in scorer.parts:
            if part.on_failure.mask:
                setting = f"{name}.on_failure.max_failed"
                if len(scorer.parts) > 1:
                    setting = f"on_failure.max_failed of {name}'s part {part.name!r}"
                yield [f"{name}/{part.name}_failed"], part.on_failure, setting, RewardError
