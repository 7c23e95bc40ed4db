"""What a step of two roles that leave the device to each other moves over the bus, counted on a GPU that is not there."""

from __future__ import annotations

import attrs
import torch
from fake.test_waits import MODEL
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.job.job import ModelRole
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.kit.fakes.device import FakeGPU, fake_device
from hybridflow.kit.fakes.ranks import fake_ranks
from hybridflow.kit.fakes.rehearsal import unpacked

SLACK = 4096
"""Bytes of token ids, lengths and logprobs of the few short rows."""


def test_each_byte_moves_once_each_way_in_a_phase():
    """bf16: masters of 4 bytes a parameter and moments of 8; the frozen role has 2."""
    spec, settings = ModelSpec(MODEL, None, 0), FSDPConfig(precision="bf16")
    prompts = tokens([torch.arange(1, 6 + row) for row in range(4)], torch.int64)
    rows = Batch({"prompt_ids": prompts, "sample_id": torch.arange(4)})
    batch = make_batch(4)
    with FakeGPU() as gpu, fake_ranks(ParallelLayout(), fake_device()) as rank, unpacked():
        context = attrs.evolve(rank, generation=generation_layout(ParallelLayout()))
        engine = TransformersEngineConfig(dtype="bfloat16")
        role = ModelRole(
            spec, "fsdp", settings, 64, OptimizerConfig(), engine="transformers", engine_config=engine, offload=True
        )  # fmt: skip
        frozen = ModelRole(spec, "fsdp", settings, 64, offload=True)
        actor = ModelWorker(context, role)
        ref = ModelWorker(attrs.evolve(context, role="ref"), frozen)
        parameters = actor.build().parameters
        ref.build()

        def moved(call, *arguments) -> tuple[float, float]:
            """Bytes a parameter that come and go."""
            gpu.memory.restart()
            call(*arguments)
            found = (gpu.memory.arrived, gpu.memory.left)
            return tuple(round((n if n > SLACK else 0) / parameters, 1) for n in found)

        actor.update([(batch, Blend())])  # which makes the moments
        for step in range(3):
            # The sync finds the weights where the update left them, and then they leave with the moments.
            generated = moved(actor.generate, rows, SamplingParams(max_tokens=4), step)
            # What a forward pass has not changed is on the host still, so nothing goes back.
            assert moved(ref.logprobs, batch, {"logprobs": "ref_logprobs"}) == (2.0, 0.0)
            assert moved(actor.logprobs, batch, {"logprobs": "old_logprobs"}) == (4.0, 0.0)
            assert moved(actor.update, [(batch, Blend())]) == (8.0, 0.0)
            assert moved(actor.update, [(batch, Blend())]) == (0.0, 0.0)
            if step:  # the first generation brings the engine's tables
                assert generated == (0.0, 12.0)
