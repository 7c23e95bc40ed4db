"""What the ranks of a generation replica run whose first rank hosts a tensor-parallel SGLang."""

from __future__ import annotations

import torch

from hybridflow.backends.sglang.config import SGLangConfig
from hybridflow.backends.sglang.engine import SGLangEngine
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing.engine_base import PROMPTS, give_weights, requests


def speak(
    rank: int, world: int, spec: ModelSpec, updates: list[dict[str, torch.Tensor]], weights: str, logs: str
) -> dict:
    """Greedy tokens and logprobs after each of several updates, and samples."""
    layout = ParallelLayout(dp=world)
    generation = generation_layout(layout, tp=world, grouping="consecutive")
    context = RankContext("actor", rank, layout, torch.device("cpu"), 0, generation)
    config = SGLangConfig(kv_tokens=4096, max_sequences=8, weights=weights, bucket_mb=0.1)
    engine = HostedEngine(SGLangEngine, spec, config, context, logs)
    try:
        engine.start()
        holding = len(engine.layout().held[rank])
        found = []
        for version, parameters in enumerate(updates):
            if holding:
                give_weights(engine, parameters, version, pieces=2)
            else:
                engine.begin_update(version)
                engine.end_update()
            done = engine.generate(requests(PROMPTS, SamplingParams(max_tokens=10, temperature=0.0)))
            found.append([(c.response_ids.tolist(), c.logprobs.tolist(), set(c.weight_version.tolist())) for c in done])
        sampled = engine.generate(requests(PROMPTS, SamplingParams(max_tokens=10)))
    finally:
        engine.close()
    return {"greedy": found, "sampled": [c.response_ids.tolist() for c in sampled], "holding": holding}
