"""What Megatron needs without CUDA: active on a CPU inside `on_cpu` alone, and each of it needed."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from helpers.installed import needs
from helpers.training_jobs import Setup, step_without
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.backends.megatron.cpu import EXPECTED, PATCHES, no_warnings_of_what_is_meant, on_cpu
from hybridflow.core.values.parallel import ParallelLayout

CPU = torch.device("cpu")
OF_MEGATRON = "checkpointed layers keep the GPU's state"
"""The patch that changes Megatron itself; the others change torch, and can be tried without it."""


@needs("megatron.core")
@pytest.mark.parametrize("why", PATCHES)
def test_each_patch_for_the_cpu_is_needed(ranks, folder, why):
    """Without it a step of two stages with recomputed layers fails. When one of these tests fails, the patch can go."""
    setup = Setup(
        folder("qwen2-deep"),
        layout=ParallelLayout(pp=2),
        backend="megatron",
        config=MegatronConfig(recompute=True),
    )
    with pytest.raises(RuntimeError, match=r"(?i)cuda|nvidia"):
        ranks(step_without, 2, setup, [(make_batch(4), Blend())], why)


@needs("megatron.core")
def test_megatrons_random_states_are_those_of_the_cpu():
    import megatron.core.tensor_parallel.random as random

    before = random._get_cuda_rng_state
    with on_cpu(CPU):
        state = random._get_cuda_rng_state()
        first = torch.rand(3)
        random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), first)
    assert random._get_cuda_rng_state is before


def test_what_asks_for_a_gpu_gets_the_cpu():
    with on_cpu(CPU, without=[OF_MEGATRON]):
        made = torch.zeros(2, device="cuda:0", dtype=torch.bfloat16)
        assert made.device == CPU and made.cuda() is made
        # the distributed optimizer and gradient clipping look for this name
        assert (
            made.type() == "torch.cuda.BFloat16Tensor"
            and torch.ones(1).type() == "torch.cuda.FloatTensor"
        )
        assert torch.cuda.current_device() == CPU
        torch.cuda.synchronize()
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())


def test_no_patch_is_active_elsewhere():
    synchronize, current, states = (
        torch.cuda.synchronize,
        torch.cuda.current_device,
        torch.cuda.get_rng_state,
    )
    with contextlib.suppress(KeyError), on_cpu(CPU, without=[OF_MEGATRON]):
        assert (
            torch.cuda.synchronize is not synchronize and torch.cuda.current_device is not current
        )
        raise KeyError("a step that failed")
    with on_cpu(torch.device("cuda")):
        assert torch.cuda.synchronize is synchronize and torch.cuda.current_device is current
    assert (torch.cuda.synchronize, torch.cuda.current_device) == (synchronize, current)
    assert torch.cuda.get_rng_state is states and torch.ones(1).type() == "torch.FloatTensor"


def test_warnings_that_no_user_can_do_anything_about_are_not_said_and_others_are():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        no_warnings_of_what_is_meant()
        for text in EXPECTED:
            warnings.warn(f"{text}: more of it", stacklevel=1)
        warnings.warn("the loss is nan", stacklevel=1)
    assert [str(warning.message) for warning in said] == ["the loss is nan"]
