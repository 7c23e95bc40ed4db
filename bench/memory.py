"""What `hybridflow plan` says a device's memory holds, beside what it holds: the bytes of all tensors of a rank, counted at the
allocator, of models of 180 to 250 MB in float32 on two processes under FSDP2 and, in the environment of `make test-engines`,
ZeRO.

python bench/memory.py                                   FSDP2; 25 minutes on two cores
python bench/memory.py --model "62M deep" --tp 2         one of the models, in layouts with this tp
.venv-engines/bin/python bench/memory.py --zero          ZeRO 1 to 3

Counted from the building of the model on, so without what the process had before. What another thread (of a collective) frees
the count does not see: at the beginning of each phase it is set to the tensors that are there. The median
over ranks and updates from the second on (when the optimizer has its moments) counts: a collective that is not over may still
hold its buffer. One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from common import emit

import hybridflow.core.running.session as session
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import register
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.planner.calibration.probes import Likelihood, made_up
from hybridflow.planner.cluster import Cluster
from hybridflow.planner.jobs import planned_model
from hybridflow.planner.memory import Memory
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import Task, Workload
from hybridflow.settle.resolve import resolve_jobs

BAR = 0.1
MODELS = {
    "55M tied": {
        "model_type": "qwen2", "vocab_size": 16384, "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12,
        "num_key_value_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    },
    "61M GQA": {
        "model_type": "llama", "vocab_size": 8000, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 2816, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    },
    "62M deep": {
        "model_type": "qwen3", "vocab_size": 24000, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    "45M wide": {
        "model_type": "llama", "vocab_size": 100000, "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "intermediate_size": 1152, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""The formulas were written with the first at hand, mended by the second and the third (tp); the fourth changed nothing."""
FSDP = (
    # model, backend, tp, sequences, prompt tokens, response tokens, micro_batch_tokens
    ("55M tied", {}, 1, 8, 64, 64, 4096),
    ("55M tied", {}, 1, 8, 64, 64, 128),
    ("55M tied", {}, 2, 8, 64, 64, 4096),
    ("55M tied", {"activation_checkpointing": True}, 1, 16, 64, 64, 4096),
    ("55M tied", {"precision": "bf16"}, 1, 16, 64, 64, 4096),
    ("55M tied", {"wrap_min_parameters": 1_000_000}, 1, 16, 64, 64, 4096),
    ("55M tied", {"wrap_min_parameters": 1_000_000}, 1, 16, 64, 64, 256),
    ("55M tied", {}, 1, 32, 128, 128, 8192),
    ("61M GQA", {}, 1, 16, 96, 32, 4096),
    ("61M GQA", {}, 2, 16, 32, 96, 1024),
    ("61M GQA", {"wrap_min_parameters": 1_000_000, "precision": "bf16"}, 1, 16, 64, 64, 2048),
    (
        "61M GQA",
        {"activation_checkpointing": True, "wrap_min_parameters": 1_000_000},
        1,
        16,
        64,
        64,
        512,
    ),
    ("62M deep", {}, 1, 16, 64, 64, 4096),
    ("62M deep", {}, 2, 16, 32, 96, 2048),
    ("62M deep", {"precision": "bf16"}, 2, 16, 32, 96, 2048),
    ("62M deep", {"wrap_min_parameters": 1_000_000}, 1, 16, 64, 64, 1024),
    (
        "62M deep",
        {"activation_checkpointing": True, "wrap_min_parameters": 1_000_000},
        1,
        32,
        96,
        32,
        4096,
    ),
    ("45M wide", {}, 1, 64, 32, 96, 4096),
    ("45M wide", {}, 2, 32, 32, 96, 4096),
    ("45M wide", {"precision": "bf16"}, 1, 64, 32, 96, 4096),
)
ZERO = (
    ("55M tied", {"stage": 1}, 1, 8, 64, 64, 4096),
    ("55M tied", {"stage": 2}, 1, 8, 64, 64, 4096),
    ("55M tied", {"stage": 2}, 1, 32, 128, 128, 8192),
    ("55M tied", {"stage": 2, "precision": "bf16"}, 1, 16, 64, 64, 4096),
    ("55M tied", {"stage": 3}, 1, 8, 64, 64, 4096),
    ("55M tied", {"stage": 3}, 1, 32, 128, 128, 8192),
    ("61M GQA", {"stage": 2}, 1, 16, 96, 32, 1024),
    ("61M GQA", {"stage": 3, "precision": "bf16"}, 1, 16, 64, 64, 2048),
    ("62M deep", {"stage": 3, "precision": "bf16"}, 1, 16, 64, 64, 4096),
    ("62M deep", {"stage": 2}, 1, 16, 64, 64, 1024),
    ("62M deep", {"stage": 3}, 1, 16, 96, 32, 2048),
    ("45M wide", {"stage": 2}, 1, 64, 32, 96, 4096),
)


class CountedWorker(ModelWorker):
    """Notes every allocation from the building of the model on."""

    def __init__(self, *given):
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self.profile.start()
        super().__init__(*given)

    @register(Protocol.ONE_TO_ALL)
    def now(self) -> tuple[int, float]:
        """The time, and the bytes of the tensors that are there."""
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return time.time_ns(), float(sum(found.values()))

    @register(Protocol.ONE_TO_ALL)
    def peaks(self, spans: list[tuple[int, int]]) -> list[tuple[float, float]]:
        """(bytes at its beginning, the most bytes) of each span, by the allocator."""
        self.profile.stop()
        events = self.profile.profiler.kineto_results.events()
        noted = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        at, held = np.array([when for when, _ in noted]), np.cumsum([size for _, size in noted])
        edges = [(np.searchsorted(at, a), np.searchsorted(at, b)) for a, b in spans]
        return [(float(held[a - 1]), float(held[a:b].max())) for a, b in edges]


def measure(name: str, case: tuple) -> tuple[dict[str, float], dict[str, float]]:
    """(predicted, measured) bytes at rest, in inference and in training."""
    size, backend, tp, sequences, prompt, response, micro = case
    with tempfile.TemporaryDirectory() as folder:
        tables: dict[str, Any] = {
            "run": {"folder": folder, "trackers": [], "device": "cpu"},
            "runtime": {"name": "ray", "threads": 1},
            "pools": {"main": [2]},
            "tokenizer": {"characters": "0123456789+="},
            "data": {"source": "arithmetic", "answer": "{answer}", "response": "{answer}", "bos": True, "max_prompt_tokens": 8},
            "algorithm": {"name": "sft", "batch_size": 4},
            "actor": {
                "model": {"config": MODELS[size]}, "backend": {"name": name, **backend}, "layout": {"tp": tp},
                "micro_batch_tokens": micro,
            },
        }  # fmt: skip
        [job] = resolve_jobs(tables, "memory")
        session.ModelWorker = CountedWorker  # type: ignore[misc]
        with session.Session(job, session.prepare(job)) as running:
            actor, spans = running.context().actor, []
            batch = made_up(sequences, prompt, response)
            held: list[list[float]] = []
            for verb in ("train", "train", "train", "train", "infer"):
                told = actor.group.now().result()
                started = max(when for when, _ in told)
                held.append([size for _, size in told])
                if verb == "infer":
                    actor.logprobs(batch)["old_logprobs"]
                else:
                    actor.update((batch, Likelihood())).result()
                spans.append((started, min(when for when, _ in actor.group.now().result())))
            every = actor.group.peaks(spans).result()
        model = planned_model("actor", job.models["actor"], [])
        layout = job.models["actor"].layout
    work = Workload(
        (Task("actor", "infer", sequences), Task("actor", "train", sequences)), prompt, response
    )
    said = Memory(Simulator.of(Cluster.of("a100-80gb", 1, 2).nodes[0], work)).bytes(model, layout)
    peaks = [
        [held[at][rank] + r[at][1] - r[at][0] for rank, r in enumerate(every)]
        for at in range(len(held))
    ]
    middle = statistics.median
    most = {
        "rest": middle([*itertools.chain(*held[1:])]),
        "train": middle([*itertools.chain(*peaks[1:-1])]),
        "infer": middle(peaks[-1]),
    }
    return {
        "rest": said.resident,
        "infer": said.resident + said.inference,
        "train": said.resident + said.training,
    }, most


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zero", action="store_true", help="DeepSpeed's ZeRO in place of FSDP2")
    parser.add_argument("--model", choices=tuple(MODELS), help="this one alone")
    parser.add_argument("--tp", type=int, help="cases of this size alone")
    wanted = parser.parse_args()
    name, cases = ("deepspeed", ZERO) if wanted.zero else ("fsdp", FSDP)
    good = True
    for case in cases:
        if wanted.model not in (None, case[0]) or wanted.tp not in (None, case[2]):
            continue
        predicted, measured = measure(name, case)
        size, backend, tp, sequences, prompt, response, micro = case
        options = "".join(f" {k}={v}" for k, v in backend.items())
        what = f"{size}, {name}{options} tp {tp}, {sequences} x ({prompt}+{response}) in micro-batches of {micro}"
        for phase in ("rest", "infer", "train"):
            ratio = predicted[phase] / measured[phase]
            bar = {"ratio": ratio, "against": f"measured {measured[phase] / 1e6:.0f} MB"}
            emit(f"{what}: {phase}", predicted[phase] / 1e6, "MB", **bar)
        good &= emit(f"{what}: peak's error", abs(max(predicted.values()) / max(measured.values()) - 1), "of 1", bar=BAR,
                     at_most=True)  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
