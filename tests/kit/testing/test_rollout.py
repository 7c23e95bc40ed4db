"""RolloutEngineConformance is the sum of its parts."""

from __future__ import annotations

from helpers.expect import invariants

from hybridflow.kit.testing.engine_flow import EngineFlow
from hybridflow.kit.testing.engine_requests import EngineRequests
from hybridflow.kit.testing.engine_sampling import EngineSampling
from hybridflow.kit.testing.engine_tokens import EngineTokens
from hybridflow.kit.testing.rollout import RolloutEngineConformance


def test_it_has_the_invariants_of_every_part_and_none_hides_another():
    parts = (EngineTokens, EngineSampling, EngineRequests, EngineFlow)
    of_parts = sorted(name for part in parts for name in invariants(part))
    assert of_parts == [n for n in dir(RolloutEngineConformance) if n.startswith("test_")]
