"""How often the host waits for values of a GPU that is not there, in the worker around a backend and in the embedded engine."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.job.job import ModelRole
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.kit.fakes.device import FakeGPU, fake_device
from hybridflow.kit.fakes.ranks import fake_ranks
from hybridflow.kit.fakes.rehearsal import unpacked

MODEL = {
    "model_type": "qwen2", "vocab_size": 68, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@contextlib.contextmanager
def waits(layout: ParallelLayout):
    """(the device, the context of a rank, a function that gives the waits since it was last called)"""
    with FakeGPU() as gpu, fake_ranks(layout, fake_device()) as context, unpacked():

        def since() -> dict[str, int]:
            found = dict(gpu.waits)
            gpu.waits.clear()
            return found

        yield context, since


@pytest.mark.parametrize(("layout", "rows"), [({}, 4), ({}, 24), ({"dp": 4, "tp": 2}, 24)], ids=str)
def test_an_update_waits_for_its_figures_and_the_norm(layout, rows, monkeypatch):
    with waits(ParallelLayout(**layout)) as (context, since):
        config = FSDPConfig(precision="bf16")
        role = ModelRole(ModelSpec(MODEL, None, 0), "fsdp", config, 64, OptimizerConfig())
        worker = ModelWorker(context, role)
        worker.build()
        since()
        batch = make_batch(rows)
        for _ in range(2):
            worker.update([(batch, Blend())])
            assert since() == {"copy": 1, "item": 1}

        # Each micro-batch's logprobs come when all are queued.
        queued = []
        forward = worker.backend.forward
        monkeypatch.setattr(
            worker.backend, "forward", lambda micros, *more: queued.append(len(micros)) or forward(micros, *more)
        )  # fmt: skip
        worker.logprobs(batch, {"logprobs": "old_logprobs"})
        assert since() == {"copy": queued[0]} and (queued[0] > 1) == (rows > 4)


def start(context, **changes) -> TransformersEngine:
    settings = TransformersEngineConfig(dtype="bfloat16", **changes)
    engine = TransformersEngine(ModelSpec(MODEL, None, 0), settings, context)
    engine.start()
    engine.begin_update(1)
    layout = engine.layout()
    for name, boxes in layout.held[0].items():
        for box in boxes:
            dtype = layout.params[name].dtype
            engine.receive(name, box, torch.zeros(box.shape, dtype=dtype, device=context.device))
    engine.end_update()
    return engine


@pytest.mark.parametrize(
    ("fast", "lengths"), [(True, ((1, 1), (17, 2), (18, 3))), (False, ((18, 3),))],
    ids=["decoder", "Hugging Face"],
)  # fmt: skip
def test_the_engine_waits_once_in_sixteen_tokens(fast, lengths):
    with waits(ParallelLayout()) as (context, since):
        engine = start(context, fast=fast)
        assert since() == {}  # a sync is a copy on the device
        for tokens, reads in lengths:  # the first token is the prefill's
            sampling = SamplingParams(max_tokens=tokens, top_p=0.9, top_k=20)
            requests = [Request(i, np.arange(1, 6 + i), sampling, 7 + i) for i in range(8)]
            done = list(engine.submit(requests))
            assert [len(one.response_ids) for one in done] == [tokens] * 8
            assert since() == {"copy": 2 * reads}  # tokens and logprobs
