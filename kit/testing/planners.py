"""PlannerConformance: a plan places every model on the cluster's devices, and predicts a step."""

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
    """Subclass it and give two fixtures: `planner` and `cluster`.

    `planner` is an instance of your Planner, `cluster` the text of a cluster that it understands.
    """

    devices = 2
    """The number of devices of the cluster."""

    @pytest.fixture
    def planner(self) -> Planner:
        """The author's planner."""
        return missing_fixture(self, "planner", "an instance of your Planner")

    @pytest.fixture
    def cluster(self) -> str:
        """The cluster to plan for, as a config names it."""
        return missing_fixture(self, "cluster", "a text of a cluster")

    @pytest.fixture
    def job(self) -> Job:
        """A small GRPO with an actor and a reference."""
        # A job as users have them, and not on the inline runtime of TABLES.
        algorithm = {"name": "grpo", "prompts_per_step": 4, "kl_coef": 0.1}
        return tiny_job({"algorithm": algorithm, "runtime": registry().default("runtime")})

    def test_a_plan_places_every_model_on_devices_that_there_are(self, planner, cluster, job):
        """Pools fit the cluster; every model has a pool, and a layout that fills it."""
        settings = planner.plan(job, cluster).settings
        # A pool is a list of devices per node.
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

            # The layout has other keys too, such as the order of its axes.
            world = sum(settings["pools"][table["pool"]])
            layout = table["layout"].items()
            sizes = {axis: size for axis, size in layout if axis in ("pp", "tp", "dp", "cp")}
            require(
                prod(sizes.values()) == world,
                got=f"{name}: layout {sizes} on {world} devices",
                expected="sizes whose product is the pool's devices",
                likely="a size is left out",
            )

    def test_a_prediction_is_of_the_roles_and_stages_that_there_are(self, planner, cluster, job):
        """A plan's prediction has finite seconds, and only roles and step stages of the job."""
        prediction = planner.plan(job, cluster).prediction
        is_prediction = isinstance(prediction, Prediction)
        require(
            is_prediction and isfinite(prediction.seconds) and prediction.seconds > 0,
            got=repr(prediction),
            expected="a Prediction of finite seconds",
            likely="seconds are summed over nothing",
        )

        # A key is (role, step stage).
        unknown = [
            key for key in prediction.work if key[0] not in job.models or key[1] not in STAGES
        ]
        require(
            not unknown,
            got=f"work of {unknown}",
            expected=f"roles of the job, stages {STAGES}",
            likely="other names",
        )

    def test_equal_questions_have_equal_answers(self, planner, cluster, job):
        """Two plans of one job have the same settings and prediction."""
        one = planner.plan(job, cluster)
        other = planner.plan(job, cluster)
        require(
            one.settings == other.settings and one.prediction == other.prediction,
            got=f"{other.settings}",
            expected=f"{one.settings}",
            likely="chance, or state that a plan leaves behind",
        )

    def test_a_job_that_is_placed_is_predicted_or_told_why_not(self, planner, cluster, job):
        """`predict` gives seconds and `problems` finds none; or NotPlanned says why not."""
        try:
            prediction = planner.predict(job, cluster)
        except NotPlanned as error:
            require(
                str(error),
                got="no message",
                expected="why nothing can be said",
                likely="an empty exception",
            )
            return

        require(
            prediction.seconds > 0,
            got=repr(prediction),
            expected="seconds above 0",
            likely="nothing is counted",
        )

        # A job with a prediction must fit.
        problems = planner.problems(job, cluster)
        require(
            problems == [],
            got=f"problems {problems}",
            expected="none of a job that is predicted",
            likely="problems looks at what predict does not",
        )

    def test_a_cluster_that_cannot_be_read_is_told(self, planner, job):
        """A text that names no cluster is a HybridFlowError."""
        with pytest.raises(HybridFlowError):
            planner.plan(job, "no such cluster")
