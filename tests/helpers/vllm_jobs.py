"""What the ranks of a tensor-parallel vLLM engine run."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.testing.engine_base import PROMPTS, give_weights, requests


def speak(rank: int, world: int, spec: ModelSpec, updates: list[dict[str, torch.Tensor]]) -> dict:
    """Greedy tokens and logprobs after each of several updates, samples, and what is left in /dev/shm."""
    before = {p.name for p in Path("/dev/shm").iterdir()}
    layout = ParallelLayout(dp=world)
    generation = generation_layout(layout, tp=world, grouping="consecutive")
    context = RankContext("actor", rank, layout, torch.device("cpu"), 0, generation)
    engine = VLLMEngine(spec, VLLMConfig(kv_memory_gb=0.05, max_sequences=8), context)
    engine.start()
    found = []
    for version, parameters in enumerate(updates):
        give_weights(engine, parameters, version, pieces=2)
        done = engine.generate(requests(PROMPTS, SamplingParams(max_tokens=10, temperature=0.0)))
        found.append([(c.response_ids.tolist(), c.logprobs.tolist(), set(c.weight_version.tolist())) for c in done])
    sampled = engine.generate(requests(PROMPTS, SamplingParams(max_tokens=10)))
    left = {p.name for p in Path("/dev/shm").iterdir() if "sem." not in p.name} - before
    return {"greedy": found, "sampled": [c.response_ids.tolist() for c in sampled], "left": sorted(left)}
