"""Auto-mapping as a planner: the fastest placement by simulated times (arXiv:2409.19256, section 6)."""

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
    """A plugin of kind "planner", name "auto-mapping". Clusters are TOML files, or texts such as "a100-80gb:2x8"."""

    def plan(
        self, job: PlannableJob, cluster: str, alternatives: int = 3, placed: bool = False
    ) -> Plan:
        plan = plan_job(job, cluster)
        check_ranks(job, plan.cluster)
        best = plan.best(alternatives)
        ends = (best.stages[0], best.stages[0] + best.stages[1], best.seconds)
        return Plan(
            settings=settings_of(best, plan.cluster),
            prediction=prediction(best),
            cluster=kinds_of(plan.cluster),
            explanation=tuple(report(plan, best, placed)) if alternatives else (),
            bars=tuple(bars(best)),
            ends=ends,
        )

    def predict(self, job: PlannableJob, cluster: str) -> Prediction:
        plan = plan_job(job, cluster)
        written = plan.written()
        if job.device == "cpu" and all(
            n.device == DEVICES.get(n.device.name) for n in plan.cluster.nodes
        ):
            log.warning("placement.cluster %r is no cluster of CPUs, on which this runs", cluster)
        return prediction(written)

    def problems(self, job: PlannableJob, cluster: str) -> list[str]:
        misfit = plan_job(job, cluster).misfit()
        return [] if misfit is None else [misfit]

    def scaling(self, job: PlannableJob, cluster: str, devices: Sequence[int]) -> tuple[Block, ...]:
        plan = plan_job(job, cluster)
        check_ranks(job, plan.cluster)
        return (scaling(plan, devices),)


def prediction(mapping: Mapping) -> Prediction:
    """The seconds of a mapping, role by role."""
    choices = [choice for pool in mapping.pools for choice in pool.entry.choices]
    work = {
        (c.option.model.name, verb): time
        for c in choices
        for verb in STAGES
        if (time := c.time(verb))
    }
    return Prediction(mapping.seconds, work)
