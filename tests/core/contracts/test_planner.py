"""What a planner does where its author wrote no what-if."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.contracts.planner import NotPlanned, Plan, Planner, Prediction
from hybridflow.core.errors import HybridFlowError


class Fixed(Planner):
    """Everything in one pool."""

    @attrs.frozen
    class Config:
        seconds: float = 2.0

    def plan(self, job, cluster, alternatives=3, placed=False):
        return Plan(settings={"pools": {"all": [1]}}, prediction=self.predict(job, cluster))

    def predict(self, job, cluster):
        return Prediction(self.config.seconds)

    def problems(self, job, cluster):
        return []


def test_a_planner_without_a_what_if_says_so():
    with pytest.raises(NotPlanned, match="the planner Fixed has no what-if") as caught:
        Fixed(Fixed.Config()).scaling(None, "here", [8, 16])
    assert isinstance(caught.value, HybridFlowError)
