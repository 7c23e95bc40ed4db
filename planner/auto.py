"""Auto-mapping as a planner: the placement with the fastest simulated step.

It is that of arXiv:2409.19256, section 6. A job becomes a workload and models (jobs.py), the search
finds their mapping on a cluster (search.py), and the mapping becomes tables of a config again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hybridflow.core.contracts.planner import STAGES, Block, Plan, PlannableJob, Planner, Prediction
from hybridflow.planner.cluster import DEVICES
from hybridflow.planner.jobs import check_ranks, plan_job, settings_of
from hybridflow.planner.report import bars, kinds_of, report, scaling
from hybridflow.planner.search import Mapping

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
        best = plan.best(alternatives)

        # Without alternatives nobody reads the explanation (`placement = "auto"`).
        generation, inference, _ = best.stages
        return Plan(
            settings=settings_of(best, plan.cluster),
            prediction=prediction(best),
            cluster=kinds_of(plan.cluster),
            explanation=tuple(report(plan, best, placed)) if alternatives else (),
            bars=tuple(bars(best)),
            ends=(generation, generation + inference, best.seconds),
        )

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
        """Return why the job as it is placed does not fit the cluster, and a placement that does."""
        # One sentence at most, with what fits instead.
        misfit = plan_job(job, cluster).misfit()
        return [] if misfit is None else [misfit]

    def scaling(self, job: PlannableJob, cluster: str, devices: Sequence[int]) -> tuple[Block, ...]:
        """Return a table of the best placements on other numbers of devices."""
        plan = plan_job(job, cluster)
        check_ranks(job, plan.cluster)
        return (scaling(plan, devices),)


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
