"""What the ranks of a tensor-parallel engine run, and what they must say: the same as Hugging Face, after every update."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from helpers.network import beyond_loopback, listening
from helpers.shared_memory import in_shared_memory
from hybridflow.backends.sglang.config import SGLangConfig
from hybridflow.backends.sglang.engine import SGLangEngine
from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.sandbox.jail import below
from hybridflow.kit.testing.engine_base import PROMPTS, requests
from hybridflow.kit.testing.models import Reference, reference

Updates = list[dict[str, torch.Tensor]]
TOKENS = 10


def without_semaphores() -> set[str]:
    """Names in shared memory that somebody would have to remove."""
    return {name for name in in_shared_memory() if "sem." not in name}


def context_of(rank: int, world: int) -> RankContext:
    """Of one replica over all ranks."""
    layout = ParallelLayout(dp=world)
    generation = generation_layout(layout, tp=world, grouping="consecutive")
    return RankContext("actor", rank, layout, torch.device("cpu"), 0, generation)


def speak(engine: Any, rank: int, updates: Updates) -> dict[str, Any]:
    """Greedy tokens and logprobs after each of several updates, samples, the elements held here, and where others reach it."""
    engine.start()
    own = engine.layout().held[rank]
    holding = sum(box.numel for boxes in own.values() for box in boxes)
    found = []
    for version, parameters in enumerate(updates):
        engine.begin_update(version)
        for name, boxes in own.items():
            for box in boxes:
                engine.receive(name, box, parameters[name][box.slices()])
        engine.end_update()
        done = engine.generate(
            requests(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0.0))
        )
        found.append(
            [
                (c.response_ids.tolist(), c.logprobs.tolist(), set(c.weight_version.tolist()))
                for c in done
            ]
        )
    sampled = engine.generate(requests(PROMPTS, SamplingParams(max_tokens=TOKENS)))
    # Processes of the engine's own; ranks of these tests meet at a port by themselves.
    children = below(os.getpid())
    return {
        "reachable": beyond_loopback(listening(children)) if children else [],
        "greedy": found,
        "sampled": [c.response_ids.tolist() for c in sampled],
        "holding": holding,
    }


def vllm(rank: int, world: int, spec: ModelSpec, updates: Updates) -> dict[str, Any]:
    """With what is left in shared memory."""
    before = without_semaphores()
    config = VLLMConfig(kv_memory_gb=0.05, max_sequences=8)
    engine = VLLMEngine(spec, config, context_of(rank, world))
    try:
        said = speak(engine, rank, updates)
        return {**said, "left": sorted(without_semaphores() - before)}
    finally:
        engine.close()


def sglang(rank: int, world: int, spec: ModelSpec, updates: Updates, logs: str) -> dict[str, Any]:
    """The first rank hosts the engine."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as the Ray runtime does
    config = SGLangConfig(kv_tokens=4096, max_sequences=8, bucket_mb=0.02)
    engine = HostedEngine(SGLangEngine, spec, config, context_of(rank, world), logs)
    try:
        return speak(engine, rank, updates)
    finally:
        engine.close()


def two_ranks(
    ranks: Any, job: Callable[..., Any], architecture: str, *more: Any
) -> list[dict[str, Any]]:
    """What two ranks of a job say after each of five updates, which must be what Hugging Face says."""
    references = [reference(architecture, seed=seed, width=128) for seed in range(5)]
    spec = attrs.evolve(references[0].spec, path=None)
    found = ranks(job, 2, spec, [ref.parameters for ref in references], *more)
    for answer in found:
        assert answer["sampled"] == found[0]["sampled"]
        for version, (spoken, ref) in enumerate(zip(answer["greedy"], references, strict=True)):
            check_spoken(spoken, ref, version)
    return found


def check_spoken(spoken: Sequence[tuple], ref: Reference, version: int) -> None:
    for prompt, (ids, logprobs, versions) in zip(PROMPTS, spoken, strict=True):
        assert ids == ref.greedy(np.asarray(prompt), TOKENS)
        assert versions == {version}
        expected = ref.outputs(torch.tensor(prompt), torch.tensor(ids))["logprobs"].detach()
        assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
