"""What a run says before it begins that its devices will hold, beside what they hold: for configurations drawn by a seed, each
with its embedded engine, in float32 and bfloat16, with and without recomputation, on one rank and on two.

python bench/preflight.py                   12 configurations, about 15 minutes on two cores
python bench/preflight.py --seed 7          others

Bytes are those of all tensors of a rank, counted at the allocator as in bench/memory.py, while the actor generates and while it
trains, from the second call on. The most that a process held (its unique set, with Python and its libraries) is told beside
them. One JSON line per figure; exits 1 where a fullest moment is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import attrs
from common import emit
from memory import MODELS, CountedWorker

import hybridflow.core.running.session as session
from hybridflow.core.contracts.planner import DeviceMemory
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import register
from hybridflow.core.workers.device_memory import host_memory
from hybridflow.planner.calibration.probes import Likelihood, made_up
from hybridflow.planner.preflight import job_memory
from hybridflow.settle.resolve import resolve_jobs

BAR = 0.1
GROUP = 4
CONFIGURATIONS = 12
ROUNDS = 3
"""Generations, each with an update behind it; the first does not count."""


class Counted(CountedWorker):
    @register(Protocol.ONE_TO_ALL)
    def unique(self) -> float:
        """Bytes that this process alone has."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


@attrs.frozen
class Case:
    model: str
    precision: str
    recompute: bool
    ranks: int
    prompts: int
    prompt: int
    response: int
    micro: int
    keep: bool

    @property
    def sequences(self) -> int:
        return GROUP * self.prompts

    def __str__(self) -> str:
        extras = ["recompute"] * self.recompute + ["keep = false"] * (not self.keep)
        what = " ".join([self.model, self.precision, *extras, f"dp {self.ranks}"])
        return f"{what}, {self.sequences} x ({self.prompt}+{self.response}) in micro-batches of {self.micro}"


def drawn(seed: int) -> list[Case]:
    draw = random.Random(seed)
    return [
        Case(
            draw.choice(list(MODELS)), precision, recompute, draw.choice((1, 2)), draw.choice((4, 8, 12)),
            draw.choice((32, 64, 128)), draw.choice((32, 64, 128)), draw.choice((512, 2048, 8192)), draw.random() < 0.7,
        )
        for precision in ("fp32", "bf16") for recompute in (False, True) for _ in range(CONFIGURATIONS // 4)
    ]  # fmt: skip


def tables_of(case: Case, folder: str) -> dict[str, Any]:
    return {
        "run": {"folder": folder, "trackers": [], "device": "cpu"},
        "runtime": {"name": "ray", "threads": 1},
        "pools": {"main": [case.ranks]},
        "tokenizer": {"characters": "0123456789+="},
        "data": {"source": "arithmetic", "answer": "{answer}", "bos": True, "max_prompt_tokens": case.prompt},
        "algorithm": {"name": "grpo", "prompts_per_step": case.prompts, "group_size": GROUP},
        "reward": {"function": "exact_match"},
        "sampling": {"max_tokens": case.response},
        "rollout": {"name": "transformers", "dtype": "float32" if case.precision == "fp32" else "bfloat16"},
        "actor": {
            "model": {"config": MODELS[case.model]}, "micro_batch_tokens": case.micro, "generation": {"keep": case.keep},
            "backend": {"name": "fsdp", "precision": case.precision, "activation_checkpointing": case.recompute},
        },
    }  # fmt: skip


def measure(case: Case) -> tuple[dict[str, float], dict[str, float], float]:
    """(said, found: bytes of each moment; the most bytes of a process)"""
    with tempfile.TemporaryDirectory() as folder:
        [job] = resolve_jobs(tables_of(case, folder), "preflight")
        session.ModelWorker = Counted  # type: ignore[misc]
        held: dict[str, list[list[float]]] = {"generates": [], "trains": []}
        spans: dict[str, list[tuple[int, int]]] = {"generates": [], "trains": []}
        unique = 0.0
        with session.Session(job, session.prepare(job)) as running:
            ctx = running.context()
            actor, batch = ctx.actor, made_up(case.sequences, case.prompt, case.response, GROUP)
            prompts = batch.select(("prompt_ids", "group", "meta"))
            sampling = attrs.evolve(ctx.sampling, ignore_stop=True)
            for _ in range(ROUNDS):
                for verb in ("generates", "trains"):
                    told = actor.group.now().result()
                    held[verb].append([size for _, size in told])
                    if verb == "generates":
                        actor.generate(prompts, sampling=sampling)["response_ids"]
                    else:
                        actor.update((batch, Likelihood())).result()
                    ended = min(when for when, _ in actor.group.now().result())
                    spans[verb].append((max(when for when, _ in told), ended))
                    unique = max(unique, *actor.group.unique().result())
            peaks = actor.group.peaks([*spans["generates"], *spans["trains"]]).result()
    total, free = host_memory() or (0, 0)
    [said] = job_memory(job, {"main": DeviceMemory(total, free)})
    found = {}
    for offset, verb in ((0, "generates"), (ROUNDS, "trains")):
        most = [
            held[verb][at][rank] + own[offset + at][1] - own[offset + at][0]
            for rank, own in enumerate(peaks) for at in range(1, ROUNDS)
        ]  # fmt: skip
        found[verb] = statistics.median(most)
    return {verb: said.phases[f"while actor {verb}"] for verb in found}, found, unique


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the configuration with this number alone, from 0")
    wanted = parser.parse_args()
    started = time.time()
    good = True
    for at, case in enumerate(drawn(wanted.seed)):
        if wanted.only not in (None, at):
            continue
        said, found, unique = measure(case)
        for verb in found:
            against = f"measured {found[verb] / 1e6:.0f} MB"
            emit(
                f"{case}: {verb}",
                said[verb] / 1e6,
                "MB",
                ratio=said[verb] / found[verb],
                against=against,
            )
        error = abs(max(said.values()) / max(found.values()) - 1)
        good &= emit(f"{case}: fullest moment's error", error, "of 1", bar=BAR, at_most=True)
        emit(f"{case}: a process, with libraries", unique / 1e6, "MB")
    emit("time taken", time.time() - started, "s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
