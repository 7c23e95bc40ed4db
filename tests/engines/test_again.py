"""One process, one run after another: each has a process group of its own, as stages under the inline runtime have."""

from __future__ import annotations

import pytest
import torch
from helpers.training_jobs import OPTIMIZER, spec_of
from helpers.training_reference import make_batch

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.plugins import registry
from hybridflow.core.workers.micro_batch import make_micro_batch
from hybridflow.kit.testing import one_rank

CONFIGS = {
    "fsdp": ("fsdp", FSDPConfig(precision="bf16")),
    "megatron": ("megatron", MegatronConfig()),
    "zero 2": ("deepspeed", DeepSpeedConfig(stage=2)),
    "zero 3": ("deepspeed", DeepSpeedConfig(stage=3, persist_elements=0)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_backend_works_in_a_process_whose_group_has_ended_once(folder, name):
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    backend_name, config = CONFIGS[name]
    batch, found = make_batch(4), []
    micro = make_micro_batch(
        batch["prompt_ids"], batch["response_ids"], torch.arange(4).numpy(), torch.device("cpu")
    )
    for _ in range(2):
        with one_rank() as context:
            backend = registry().get("training_backend", backend_name)(
                spec_of(folder("llama")), config, OPTIMIZER, context
            )
            backend.build()
            backend.forward_backward(
                [micro], ["logprobs"], lambda at, outputs: outputs["logprobs"].sum()
            )
            backend.optim_step()
            found.append({n: p.float().clone() for n, p in backend.full_parameters()})
    for parameter, values in found[0].items():
        assert torch.equal(values, found[1][parameter]), parameter
