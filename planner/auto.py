"""Auto-mapping as a planner: the placement with the fastest simulated step.

It is that of arXiv:2409.19256, section 6. A job becomes a workload and models (jobs.py), the search
finds their mapping on a cluster (search.py), and the mapping becomes tables of a config again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping as Table, Sequence
from typing import Any

from hybridflow.core.contracts.planner import (
    STAGES,
    Block,
    DeviceMemory,
    Plan,
    PlannableJob,
    Planner,
    PoolMemory,
    Prediction,
)
from hybridflow.planner.ahead import ahead
from hybridflow.planner.cluster import DEVICES
from hybridflow.planner.dry_run import dry_run
from hybridflow.planner.jobs import JobPlan, Misfit, check_ranks, plan_job, settings_of
from hybridflow.planner.preflight import job_memory
from hybridflow.planner.report import bars, kinds_of, report, scaling, unfit, worth, written
from hybridflow.planner.search import Mapping, NothingFitsError
from hybridflow.planner.switches import Switches, Trial, hinted, what_fits
from hybridflow.planner.trace import read_early
from hybridflow.settle.config.load import merge

log = logging.getLogger(__name__)


class AutoMapping(Planner):
    """Simulates a step on every placement, and takes the fastest.

    Clusters are TOML files, or texts such as "a100-80gb:2x8".
    """

    def plan(
        self, job: PlannableJob, cluster: str, alternatives: int = 3, placed: bool = False
    ) -> Plan:
        """Return the fastest placement; its explanation only with `alternatives`."""
        plan = plan_job(job, cluster)
        check_ranks(job, plan.cluster)

        # `placement = "auto"` changes no settings of a run, and its explanation is not printed.
        if not alternatives:
            try:
                best = plan.best()
            except NothingFitsError as error:
                raise hinted(plan, error) from error
            return _plan(plan, best)

        # A job that does not fit as it is written is planned with settings that make it fit.
        switches = Switches(plan)
        trial, problems = _fitting(switches)
        best = trial.plan.best(alternatives)
        own = written(plan, best) if placed else "the same (placement = auto)"
        explanation = [
            *unfit(problems, switches, trial),
            *report(trial.plan, best, own, worth(switches, trial)),
            *(ahead(trial.plan, best) if job.run.max_staleness else ()),
        ]
        return _plan(plan, best, switches.tables(trial.changes), explanation)

    def predict(self, job: PlannableJob, cluster: str) -> Prediction:
        """Return a step of the job as it is placed; warns where a job on CPUs is timed on
        accelerators.
        """
        plan = plan_job(job, cluster)
        mapping = plan.written()

        # Predictions for a known accelerator say nothing of a run on CPUs.
        if job.device == "cpu" and all(
            nodes.device == DEVICES.get(nodes.device.name) for nodes in plan.cluster.nodes
        ):
            log.warning("placement.cluster %r is no cluster of CPUs, on which this runs", cluster)
        return prediction(mapping)

    def problems(self, job: PlannableJob, cluster: str) -> list[str]:
        """Return why the job as placed does not fit the cluster, and a placement that does."""
        # One sentence at most, with what fits instead.
        plan = plan_job(job, cluster)
        try:
            plan.written()
        except Misfit as error:
            return [f"the config does not fit its cluster: {error}; {what_fits(plan)}"]
        return []

    def memory(self, job: PlannableJob, devices: Table[str, DeviceMemory]) -> list[PoolMemory]:
        """Return the memory that the placed job takes on each pool's devices (preflight.py)."""
        return job_memory(job, devices)

    def scaling(self, job: PlannableJob, cluster: str, devices: Sequence[int]) -> tuple[Block, ...]:
        """Return a table of the best placements on other numbers of devices."""
        plan = plan_job(job, cluster)
        check_ranks(job, plan.cluster)
        return (scaling(plan, devices),)

    def read_early(self, job: PlannableJob, trained: Collection[str]) -> Sequence[str]:
        return read_early(type(job.algorithm)(job.algorithm.config), trained)

    def rehearse(self, job: PlannableJob, cluster: str) -> Iterator[Block]:
        """Yield the memory of the best placement from the backends' own code, role by role."""
        plan = plan_job(job, cluster)
        check_ranks(job, plan.cluster)
        trial, _ = _fitting(Switches(plan))
        yield from dry_run(trial.plan, trial.plan.best())


def _fitting(switches: Switches) -> tuple[Trial, list[str]]:
    """Return the job's trial and why the job does not fit as written: [] if it does.

    The trial is the job as it is written if that fits, else with the settings that make it fit.
    Raises NothingFitsError where no settings do.
    """
    try:
        switches.plan.best()
    except NothingFitsError as error:
        trial = switches.that_fit()
        if trial is None:
            raise hinted(switches.plan, error) from error
        return trial, error.problems
    return switches.trial({}), []


def _plan(
    plan: JobPlan,
    best: Mapping,
    changes: Table[str, Any] | None = None,
    explanation: Sequence[Block] = (),
) -> Plan:
    """Return a mapping, with the settings that make it fit, as a Plan."""
    generation, inference, _ = best.stages
    return Plan(
        settings=merge(settings_of(best, plan.cluster), changes or {}),
        prediction=prediction(best),
        cluster=kinds_of(plan.cluster),
        explanation=tuple(explanation),
        bars=tuple(bars(best)),
        ends=(generation, generation + inference, best.seconds),
    )


def prediction(mapping: Mapping) -> Prediction:
    """Return the seconds of a mapping, and of each role's work in each step stage."""
    work = {}
    for pool in mapping.pools:
        for choice in pool.entry.choices:
            for verb in STAGES:
                time = choice.time(verb)
                # A role without work in a stage is left out.
                if time:
                    work[choice.option.model.name, verb] = time
    return Prediction(mapping.seconds, work)
