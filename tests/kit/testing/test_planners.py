"""Every invariant of PlannerConformance notices the fault that it is for."""

from __future__ import annotations

from itertools import count

import pytest
from helpers.expect import caught, each_fault

from hybridflow.core.contracts.planner import NotPlanned, Plan, Planner, Prediction
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.testing.planners import PlannerConformance
from hybridflow.kit.testing.runs import tiny_job


class First(Planner):
    """Clusters are numbers of devices; every model is on all of them."""

    pool = "all"
    used = 0
    seconds = 60.0
    stage = "infer"

    def devices(self, cluster):
        if not cluster.isdigit():
            raise HybridFlowError(f"{cluster!r} is no number of devices")
        return int(cluster)

    def layout(self, devices):
        return {"dp": devices, "tp": 1, "pp": 1}

    def plan(self, job, cluster, alternatives=3, placed=False):
        devices = self.devices(cluster)
        table = {"pool": self.pool, "layout": self.layout(devices)}
        tables = dict.fromkeys(self.placed(job), table)
        pools = {"all": [self.used or devices]}
        return Plan(settings={"pools": pools, **tables}, prediction=self.predict(job, cluster))

    def placed(self, job):
        return job.models

    def predict(self, job, cluster):
        work = {(name, self.stage): self.seconds for name in job.models}
        return Prediction(self.seconds / self.devices(cluster), work)

    def problems(self, job, cluster):
        return []


class CountsDevicesTwice(First):
    used = 4


class ForgetsAModel(First):
    def placed(self, job):
        return list(job.models)[:1]


class PoolOfNoDevices(First):
    pool = "main"


class HalfAWorld(First):
    def layout(self, devices):
        return {"dp": 1, "tp": 1}


class Endless(First):
    seconds = float("inf")


class OwnStage(First):
    stage = "thinking"


class Chance(First):
    numbers = count(1)

    def predict(self, job, cluster):
        return Prediction(float(next(self.numbers)))


class TakesNoTime(First):
    seconds = 0.0


class NoReason(First):
    def predict(self, job, cluster):
        raise NotPlanned("")


class Doubts(First):
    def problems(self, job, cluster):
        return ["too small"]


FAULTS = {
    "test_a_plan_places_every_model_on_devices_that_there_are": [
        CountsDevicesTwice,
        ForgetsAModel,
        PoolOfNoDevices,
        HalfAWorld,
    ],
    "test_a_prediction_is_of_the_roles_and_stages_that_there_are": [Endless, OwnStage],
    "test_equal_questions_have_equal_answers": [Chance],
    "test_a_job_that_is_placed_is_predicted_or_told_why_not": [TakesNoTime, NoReason, Doubts],
}
UNREADABLE = "test_a_cluster_that_cannot_be_read_is_told"


@pytest.fixture(scope="module")
def job():
    algorithm = {"name": "grpo", "prompts_per_step": 4, "kl_coef": 0.1}
    return tiny_job({"algorithm": algorithm})


@each_fault(PlannerConformance, FAULTS, {UNREADABLE})
def test_the_fault_is_noticed(fault, method, job):
    caught(PlannerConformance, method, planner=fault(), cluster="2", job=job)


def test_a_planner_that_reads_any_cluster_is_noticed(job):
    class ReadsAnything(First):
        def devices(self, cluster):
            return 2

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        getattr(PlannerConformance(), UNREADABLE)(ReadsAnything(), job)


class TestAGoodPlanner(PlannerConformance):
    """With the kit's own job."""

    @pytest.fixture
    def planner(self):
        return First()

    @pytest.fixture
    def cluster(self):
        return "2"

    def test_the_job_has_an_actor_and_a_reference(self, job):
        assert set(job.models) == {"actor", "ref"}
