"""An update with padded rows beside the same one with packed rows, and with prompts that a group shares.

python bench/packing.py [--rounds 5] [--model 20M]

FSDP's backend in float32, one rank and one thread; responses of groups of 8: the three draws of bench/grpo_step.py with prompts
of 6 tokens, and 8 responses of 128 tokens to a prompt of 512. Each round runs the three in turn. Gradients are compared with
those of padded rows. One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import torch
from common import emit, paired, timed
from grpo_step import COMMON, GROUP, MODELS, draws

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import MicroBatch, OptimizerConfig, Packing
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.workers.micro_batch import make_micro_batch, plan_micro_batches
from hybridflow.kit.memory import keep_freed_memory
from hybridflow.kit.testing import one_rank

BUDGET = 16384
PROMPT = 6
LONG_PROMPTS = "8 x 128 after 512"
SHARED = 2.0
"""Times faster than padded rows, where prompts are long."""
SPARE = 1.02
"""Tokens that are computed for each real one, of packed long-tailed rows without sharing."""
EQUAL = 1e-5
"""Largest difference of a gradient, relative to the largest entry of its parameter."""


def batch(lengths: list[int], prompt: int) -> tuple[Column, Column]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(3, COMMON["vocab_size"], (count,), generator=generator)

    prompts = [draw(prompt) for _ in range(len(lengths) // GROUP)]
    rows = [prompts[row // GROUP] for row in range(len(lengths))]
    return tokens(rows), tokens([draw(length) for length in lengths])


def micros(prompts: Column, responses: Column, packing: Packing) -> list[MicroBatch]:
    plan = plan_micro_batches(
        prompts.lengths + responses.lengths, BUDGET, packing=packing, prompts=prompts
    )
    device = torch.device("cpu")
    return [make_micro_batch(prompts, responses, rows, device, packing=packing) for rows in plan]


def compare(backend: FSDPBackend, name: str, lengths: list[int], prompt: int, rounds: int) -> bool:
    prompts, responses = batch(lengths, prompt)
    ways = {packing: micros(prompts, responses, packing) for packing in Packing}
    count = sum(lengths)
    gradients: dict[Packing, list[torch.Tensor]] = {}

    def update(packing: Packing) -> None:
        for parameter in backend.module.parameters():
            parameter.grad = None
        backend.forward_backward(
            ways[packing], ["logprobs"], lambda _, outputs: outputs["logprobs"].sum() / count
        )

    for packing in Packing:
        update(packing)
        gradients[packing] = [p.grad.clone() for p in backend.module.parameters()]
    seconds: dict[Packing, list[float]] = {packing: [] for packing in Packing}
    for _ in range(rounds):
        for packing in Packing:
            seconds[packing].append(timed(lambda packing=packing: update(packing)))

    good = emit(f"{name}: update, padded", statistics.median(seconds[Packing.PADDED]), "s")
    for packing in (Packing.PACKED, Packing.SHARED):
        bar = SHARED if packing is Packing.SHARED and LONG_PROMPTS in name else None
        good &= emit(
            f"{name}: update, {packing.value}", statistics.median(seconds[packing]), "s",
            ratio=paired(seconds[Packing.PADDED], seconds[packing]), against="padded", bar=bar,
        )  # fmt: skip
        pairs = zip(gradients[packing], gradients[Packing.PADDED], strict=True)
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        good &= emit(f"{name}: gradients, {packing.value}", off, "of the largest", bar=EQUAL, at_most=True)  # fmt: skip
    real = int((prompts.lengths + responses.lengths).sum())
    for packing in Packing:
        computed = sum(micro.ids.numel() for micro in ways[packing])
        bar = SPARE if packing is Packing.PACKED and "long-tailed" in name else None
        good &= emit(
            f"{name}: tokens, {packing.value}", computed, "tokens",
            ratio=computed / real, against="real tokens", bar=bar, at_most=True,
        )  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=list(MODELS))
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    good = True
    with one_rank() as context:
        for model, (config, rows) in MODELS.items():
            if arguments.model not in (None, model):
                continue
            spec = ModelSpec({**config, "max_position_embeddings": 1024}, None, 0)
            backend = FSDPBackend(spec, FSDPConfig(), OptimizerConfig(), context)
            backend.build()
            for name, lengths in draws().items():
                good &= compare(
                    backend, f"{model}, {name}", lengths[:rows], PROMPT, arguments.rounds
                )
            good &= compare(backend, f"{model}, {LONG_PROMPTS}", [128] * 8, 512, arguments.rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
