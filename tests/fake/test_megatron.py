"""Megatron on GPUs and ranks that are not there; pipelines are not: stages send one another shapes, which nobody sends.

That training with pp 2 goes on after its memory was given back is tested on a CPU (tests/engines/test_training_backends.py).
"""

from __future__ import annotations

import pytest

from hybridflow.backends.megatron.backend import MegatronBackend
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing.fake_gpu import FakeCase, FakeGPUConformance, Lived, hollow_model, live

pytest.importorskip("megatron.core")


def case(layout: dict, shards: int, optimizer_shards: int, **more) -> FakeCase:
    """bf16: weights of 2 bytes and gradients of 4 on each dp rank; masters and moments of 12 over all."""
    stated = {
        "weight_bytes": 2.0, "kept_gradient_bytes": 4.0, "moment_bytes": 12.0, "moments_at_build": True,
        "gradient_bytes": 0.0, "saves": False, **more,
    }  # fmt: skip
    return FakeCase(
        layout=ParallelLayout(**layout), config=MegatronConfig(precision="bf16"), shards=shards,
        optimizer_shards=optimizer_shards, **stated,
    )  # fmt: skip


class TestMegatron(FakeGPUConformance):
    backend = MegatronBackend
    layers = 2
    cases = {
        # Without Transformer Engine, megatron-core reads the norm of each gradient tensor by itself.
        "dp 8": case({"dp": 8}, 1, 8, step_waits=2),
        "tp 4 dp 2": case({"tp": 4, "dp": 2}, 4, 8, step_waits=10),
        "tp 4, frozen": case(
            {"tp": 4}, 4, 4, trained=False, kept_gradient_bytes=0.0, moments_at_build=False
        ),
    }


class MastersStay(MegatronBackend):
    """Leaves the float32 masters of bfloat16 weights on the device, as Megatron's own offload does."""

    def _optimizer_tensors(self):
        for optimizer in self._optimizers():
            for moments in optimizer.optimizer.state.values():
                yield from moments.values()


def test_masters_that_stay_are_seen(tmp_path_factory):
    stated = TestMegatron.cases["tp 4 dp 2"]
    record = live(MastersStay, stated, hollow_model(tmp_path_factory.getbasetemp(), 1))
    with pytest.raises(AssertionError, match="likely cause"):
        FakeGPUConformance().test_offload_leaves_nothing(Lived(stated, record))
