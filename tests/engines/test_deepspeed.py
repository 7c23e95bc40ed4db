"""DeepSpeed on one rank under the conformance kit."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from hybridflow.backends.deepspeed.backend import DeepSpeedBackend
from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.kit.testing import TrainingBackendConformance, one_rank


@pytest.fixture(scope="module")
def context():
    """For the whole module: DeepSpeed keeps the process groups that it has once seen."""
    with one_rank() as context:
        yield context


class OneRank(TrainingBackendConformance):
    config = DeepSpeedConfig()

    @pytest.fixture
    def build(self, context):
        def make(spec, optimizer):
            backend = DeepSpeedBackend(spec, self.config, optimizer, context)
            backend.build()
            return backend

        return make


class TestStage1(OneRank):
    config = DeepSpeedConfig(stage=1)


class TestStage2(OneRank):
    config = DeepSpeedConfig(stage=2)


class TestStage3(OneRank):
    config = DeepSpeedConfig(stage=3)


class TestOffloaded(OneRank):
    config = DeepSpeedConfig(stage=2, offload_optimizer=True)


class TestStage3InBfloat16(OneRank):
    config = DeepSpeedConfig(stage=3, precision="bf16", offload_optimizer=True, offload_parameters=True)
    tolerance, gradient_tolerance, weight_tolerance = 0.2, 0.3, 1e-2
