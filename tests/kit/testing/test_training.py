"""TrainingBackendConformance is the sum of its parts."""

from __future__ import annotations

from helpers.expect import invariants

from hybridflow.kit.testing.backend_gradients import BackendGradients
from hybridflow.kit.testing.backend_outputs import BackendOutputs
from hybridflow.kit.testing.backend_ranks import BackendRanks
from hybridflow.kit.testing.backend_weights import BackendWeights
from hybridflow.kit.testing.training import TrainingBackendConformance


def test_it_has_the_invariants_of_every_part_and_none_hides_another():
    parts = (BackendOutputs, BackendGradients, BackendWeights, BackendRanks)
    of_parts = sorted(name for part in parts for name in invariants(part))
    assert of_parts == [n for n in dir(TrainingBackendConformance) if n.startswith("test_")]
