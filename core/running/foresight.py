"""What `hybridflow plan` would say of a run, beside what it takes."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job import Job
from hybridflow.core.mapping.cluster import DEVICES, read_cluster
from hybridflow.core.mapping.job import as_written, plannable
from hybridflow.core.mapping.pools import seconds
from hybridflow.core.mapping.search import Mapping as Placed
from hybridflow.core.mapping.workload import STAGE_NAMES, STAGES

log = logging.getLogger(__name__)
METHODS = {
    "generate": "generate", "episodes": "generate", "logprobs": "infer", "values": "infer", "score": "infer", "loss": "infer",
    "update": "train",
}  # fmt: skip
"""Worker methods -> the stage that they are work of."""
SKIPPED = 1
"""First steps that are not counted: they also warm up."""


class Foresight:
    """Predicted seconds of a step and of each role's work, and what they were."""

    def __init__(self, step: float, work: Mapping[tuple[str, str], float]):
        self.seconds, self.work = step, dict(work)
        """(role, "generate", "infer" or "train") -> seconds of a step."""
        self._steps: list[Mapping[str, float]] = []

    @classmethod
    def of(cls, job: Job) -> Foresight | None:
        """None for a job that does not say what it runs on (placement.cluster), or that cannot be planned."""
        if job.placement.cluster is None:
            return None
        try:
            cluster = read_cluster(job.placement.cluster)
            found = as_written(job, plannable(job), cluster)
        except HybridFlowError:  # core.mapping.placement has said so, and why
            return None
        if job.device == "cpu" and all(nodes.device == DEVICES.get(nodes.device.name) for nodes in cluster.nodes):
            log.warning("placement.cluster %r is no cluster of CPUs, on which this runs", job.placement.cluster)
        return cls(found.seconds, _work(found)) if isinstance(found, Placed) else None

    def add(self, values: Mapping[str, float]) -> None:
        """A step's metrics."""
        self._steps.append({k: v for k, v in values.items() if k.startswith("seconds/")})

    def lines(self) -> list[str]:
        """Predicted and measured, for a reader; nothing before a step counts."""
        steps = self._steps[SKIPPED:]
        if not steps:
            return []
        step = statistics.median(s["seconds/step"] for s in steps)
        said = [
            f"a step took {seconds(step)} (median), {seconds(self.seconds)} were predicted ({_off(self.seconds, step)})"
        ]
        for (role, verb), predicted in self.work.items():
            measured = statistics.median(_spent(s, role, verb) for s in steps)
            if measured:
                off = _off(predicted, measured)
                said.append(
                    f"  {role} {STAGE_NAMES[verb]}: {seconds(measured)}, predicted {seconds(predicted)} ({off})"
                )
        return said


def _work(mapping: Placed) -> dict[tuple[str, str], float]:
    choices = [c for pool in mapping.pools for c in pool.entry.choices]
    return {(c.option.model.name, verb): time for c in choices for verb in STAGES if (time := c.time(verb))}


def _spent(values: Mapping[str, float], role: str, verb: str) -> float:
    return sum(values.get(f"seconds/{role}/{method}", 0.0) for method, of in METHODS.items() if of == verb)


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f}%"
