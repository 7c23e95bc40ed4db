"""Megatron on one rank under the conformance kit, and its patches for the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from helpers.training_jobs import Setup, step_without
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.megatron.backend import MegatronBackend
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.backends.megatron.cpu import PATCHES, on_cpu
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing import TrainingBackendConformance, one_rank


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


class OneRank(TrainingBackendConformance):
    config = MegatronConfig()

    @pytest.fixture
    def build(self, context):
        def make(spec, optimizer):
            backend = MegatronBackend(spec, self.config, optimizer, context)
            backend.build()
            return backend

        return make


class TestPadded(OneRank):
    pass


class TestPacked(OneRank):
    config = MegatronConfig(packing=True, vocab_multiple=1, recompute=True)


class TestBfloat16(OneRank):
    config = MegatronConfig(precision="bf16")
    tolerance, gradient_tolerance, weight_tolerance = 0.2, 0.3, 1e-2


@pytest.mark.parametrize("why", PATCHES)
def test_each_patch_for_the_cpu_is_needed(ranks, folder, why):
    """Without it a step of two stages with recomputed layers fails. When one of these tests fails, the patch can go."""
    setup = Setup(
        folder("qwen2-deep"), layout=ParallelLayout(pp=2), backend="megatron", config=MegatronConfig(recompute=True)
    )
    with pytest.raises(RuntimeError, match=r"(?i)cuda|nvidia"):
        ranks(step_without, 2, setup, [(make_batch(4), Blend())], why)


def test_no_patch_is_active_elsewhere():
    synchronize, current = torch.cuda.synchronize, torch.cuda.current_device
    with on_cpu(torch.device("cpu")):
        assert torch.cuda.synchronize is not synchronize
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.cuda.synchronize is synchronize and torch.cuda.current_device is current
    with on_cpu(torch.device("cuda")):
        assert torch.cuda.synchronize is synchronize and torch.cuda.current_device is current
