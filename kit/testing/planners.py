"""PlannerConformance: a plan says where every model goes, on devices that there are, and what a step takes."""

from __future__ import annotations

from math import isfinite, prod

import pytest

from hybridflow.core.contracts.planner import STAGES, NotPlanned, Planner, Prediction
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.kit.testing.checks import missing_fixture, require
from hybridflow.kit.testing.runs import tiny_job


class PlannerConformance:
    """Give a fixture `planner`: an instance of your Planner; and `cluster`: a text of a cluster that it understands."""

    devices = 2
    """That the cluster has."""

    @pytest.fixture
    def planner(self) -> Planner:
        return missing_fixture(self, "planner", "an instance of your Planner")

    @pytest.fixture
    def cluster(self) -> str:
        return missing_fixture(self, "cluster", "a text of a cluster")

    @pytest.fixture
    def job(self) -> Job:
        """A small GRPO with an actor and a reference."""
        algorithm = {"name": "grpo", "prompts_per_step": 4, "kl_coef": 0.1}
        return tiny_job({"algorithm": algorithm, "runtime": registry().default("runtime")})

    def test_a_plan_places_every_model_on_devices_that_there_are(self, planner, cluster, job):
        settings = planner.plan(job, cluster).settings
        used = sum(sum(pool) for pool in settings["pools"].values())
        require(
            0 < used <= self.devices,
            got=f"pools {settings['pools']}",
            expected=f"at most {self.devices} devices",
            likely="devices are counted twice",
        )
        for name in job.models:
            table = settings.get(name)
            require(
                table is not None and table["pool"] in settings["pools"],
                got=f"{name}: {table}",
                expected=f"a table with a pool of {', '.join(settings['pools'])}",
                likely="a model is forgotten",
            )
            world = sum(settings["pools"][table["pool"]])
            sizes = {
                axis: size
                for axis, size in table["layout"].items()
                if axis in ("pp", "tp", "dp", "cp")
            }
            require(
                prod(sizes.values()) == world,
                got=f"{name}: layout {sizes} on {world} devices",
                expected="sizes whose product is the pool's devices",
                likely="a size is left out",
            )

    def test_a_prediction_is_of_the_roles_and_stages_that_there_are(self, planner, cluster, job):
        found = planner.plan(job, cluster).prediction
        require(
            isinstance(found, Prediction) and isfinite(found.seconds) and found.seconds > 0,
            got=repr(found),
            expected="a Prediction of finite seconds",
            likely="seconds are summed over nothing",
        )
        strange = [key for key in found.work if key[0] not in job.models or key[1] not in STAGES]
        require(
            not strange,
            got=f"work of {strange}",
            expected=f"roles of the job, stages {STAGES}",
            likely="other names",
        )

    def test_equal_questions_have_equal_answers(self, planner, cluster, job):
        one, other = planner.plan(job, cluster), planner.plan(job, cluster)
        require(
            one.settings == other.settings and one.prediction == other.prediction,
            got=f"{other.settings}",
            expected=f"{one.settings}",
            likely="chance, or state that a plan leaves behind",
        )

    def test_a_job_that_is_placed_is_predicted_or_told_why_not(self, planner, cluster, job):
        try:
            found = planner.predict(job, cluster)
        except NotPlanned as error:
            require(
                str(error),
                got="no message",
                expected="why nothing can be said",
                likely="an empty exception",
            )
            return
        require(
            found.seconds > 0,
            got=repr(found),
            expected="seconds above 0",
            likely="nothing is counted",
        )
        problems = planner.problems(job, cluster)
        require(
            problems == [],
            got=f"problems {problems}",
            expected="none of a job that is predicted",
            likely="problems looks at what predict does not",
        )

    def test_a_cluster_that_cannot_be_read_is_told(self, planner, job):
        with pytest.raises(HybridFlowError):
            planner.plan(job, "no such cluster")
