"""The conformance kit on FSDP2 and on the embedded engine, with their one rank on a GPU."""

from __future__ import annotations

import pytest

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.kit.testing import (
    RolloutEngineConformance,
    TrainingBackendConformance,
    one_rank,
)


class TestFSDP(TrainingBackendConformance):
    backend, config, device = FSDPBackend, FSDPConfig(), "cuda"
    layouts = ()


class TestFSDPWithExperts(TestFSDP):
    architectures = ("qwen3_moe",)
    kinds = ("policy",)


class TestTransformers(RolloutEngineConformance):
    config = TransformersEngineConfig()

    @pytest.fixture
    def start(self):
        def make(spec):
            engine = TransformersEngine(spec, self.config, context)
            engine.start()
            return engine

        with one_rank("cuda") as context:
            yield make


class TestTransformersWithExperts(TestTransformers):
    architectures = ("qwen3_moe",)


class TestItsGenericDecoder(TestTransformers):
    architectures = ("qwen2",)
    config = TransformersEngineConfig(fast=False)
