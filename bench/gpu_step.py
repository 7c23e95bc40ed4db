"""A step of GRPO on one GPU, of models of the shape of Qwen2.5-0.5B and -1.5B: where its time and memory go.

python bench/gpu_step.py                                       both models, the embedded engine; some minutes
python bench/gpu_step.py --models 1.5B 'rollout={name="vllm"}'  one model; settings of the run and of the engine alone
python bench/gpu_step.py --mini                                a tiny model on the CPU, to see that all of this works

Of each model, in processes of their own:

* a run of examples/gpu_grpo.toml: seconds per phase, tokens/s, engine beside trainer, and memory beside what `hybridflow plan`
  says of it;
* updates of 256 long-tailed rows in micro-batches of 8,192 tokens: packed beside padded, and packed with recomputation; of rows
  that are such a micro-batch alone; and the five operations that take most of the first one's time;
* the engine alone, with the run's requests: its tokens/s beside those of the run.

The utilisation counts 6 FLOPs per parameter and token, the head's among them, and attention's products (12 * layers * hidden *
length per token, half of it causal), once: what is recomputed, padded or shared does not count. It is a share of what large
products reach, 0.8 of the data sheet's figure. One JSON line per figure. Exits 1 where a bar is missed; without a GPU it says
that it was skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    MINI_MODEL,
    ROOT,
    device_of,
    emit,
    hybridflow,
    measured,
    reachable_flops,
    release,
    seconds_of,
    synchronize,
)

CONFIG = ROOT / "examples" / "gpu_grpo.toml"
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}  # fmt: skip
"""What differs from examples/gpu_grpo.toml, whose model is the second one."""
UTILISED, MISMATCH, MEMORY = 0.35, 0.05, 0.1
"""The bars: of what is reached, at 1.5B; nats; of the memory that was said."""
AIM = 0.45
BARRED = "1.5B"
BUDGET = 8192
"""Tokens of a micro-batch."""
ROUNDS = 3
WARM = 1
"""Steps of the run that do not count."""
COSTS = 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--mini", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args(arguments)
    device = device_of(options.mini, "gpu step")
    if device is None:
        return 0
    if options.part:
        settings = settings_of(options.models[0], False, overrides)
        print("answer", json.dumps(PARTS[options.part](settings, device, False)))
        return 0

    met = True
    for model in ["1.5B"] if options.mini else options.models:
        met &= measure(model, device, options.mini, overrides)
    return 0 if met else 1


def settings_of(model: str, mini: bool, overrides: list[str]) -> list[str]:
    """The overrides of examples/gpu_grpo.toml for a model."""
    settings = [f"actor.model.config.{key}={value}" for key, value in MODELS[model].items()]
    if mini:
        settings = [
            *MINI_MODEL, "run.steps=2", "algorithm={prompts_per_step=4, group_size=4}", "sampling.max_tokens=24",
            "actor.micro_batch_tokens=128", 'runtime={name="inline", threads=1}',
        ]  # fmt: skip
    return settings + overrides


def measure(model: str, device: str, mini: bool, overrides: list[str]) -> bool:
    """Emit all figures of a model; give whether its bars are met."""
    import torch

    what = "mini" if mini else model
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    emit(f"{what}: device memory, {name}", memory(device) / 1e9, "GB")
    settings = settings_of(model, mini, overrides)

    def answer(part: str) -> dict[str, Any]:
        if mini:
            return PARTS[part](settings, device, True)
        return measured(__file__, "--part", part, "--models", model, *overrides)

    # The figures of a run
    rows, job = run(settings, mini)
    met, inside = report_run(what, rows, job, memory(device), mini)

    # The engine alone
    apart = answer("alone")
    emit(
        f"{what}: generation inside a step", inside, "tokens/s", ratio=inside / apart["tokens_per_second"],
        against=f"the engine alone, {apart['tokens_per_second']:.4g}",
    )  # fmt: skip
    costs(f"{what}: generation", apart["costs"])

    # Updates
    found = answer("updates")
    reached = reachable_flops(name)
    for case, figures in found["cases"].items():
        padded = found["cases"]["padded"]["seconds"]
        emit(
            f"{what}: update, {case}", figures["tokens"] / figures["seconds"], "tokens/s",
            **({"ratio": padded / figures["seconds"], "against": "padded"} if figures["same"] else {}),
        )  # fmt: skip
        emit(f"{what}: update, {case}: peak", figures["peak"] / 1e9, "GB")
        if reached is not None:
            bar = {"bar": UTILISED} if model == BARRED and case == "packed" else {}
            used = figures["flops"] / figures["seconds"] / reached
            met &= emit(f"{what}: update, {case}: utilisation", used, "of what is reached", aim=AIM, **bar)  # fmt: skip
    costs(f"{what}: update", found["costs"])
    return met


def memory(device: str) -> int:
    """Bytes of the device."""
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return 24 * 2**30


def costs(what: str, largest: list[tuple[str, float]]) -> None:
    """Emit the operations that took most of the time."""
    for at, (name, share) in enumerate(largest, 1):
        emit(f"{what}: cost {at}, {name}", share, "of the time")


# --- a run ---


def run(settings: list[str], here: bool) -> tuple[list[dict[str, float]], Any]:
    """The metrics of the steps that count, and the job. here: in this process."""
    from hybridflow.settle.launch import load_config

    [job] = load_config(CONFIG, settings)
    with tempfile.TemporaryDirectory() as folder:
        places = [f"run.folder={folder}", "run.final_checkpoint=false", "run.report=false"]
        hybridflow(["run", str(CONFIG), *places, *settings], here)
        lines = (Path(folder) / CONFIG.stem / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM:], job


def report_run(
    what: str, rows: list[dict[str, float]], job: Any, total: int, mini: bool
) -> tuple[bool, float]:
    """Emit the figures of a run; give whether its bars are met, and tokens/s of its generation."""
    from hybridflow.core.contracts.planner import DeviceMemory
    from hybridflow.planner.preflight import job_memory

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    algorithm = job.algorithm.config
    tokens = algorithm.prompts_per_step * algorithm.group_size * mean("actor/response_length")
    for phase in sorted(key for key in rows[0] if key.startswith("seconds/")):
        emit(f"{what}: {phase}", mean(phase), "s")
    emit(f"{what}: a step", tokens / mean("seconds/step"), "response tokens/s")
    mismatch = max(row["actor/mismatch_mean"] for row in rows)
    met = emit(
        f"{what}: mismatch of engine and trainer", mismatch, "nats", bar=MISMATCH, at_most=True
    )
    inside = tokens / mean("actor/generate_seconds")

    # The sums count what the engine keeps, as the allocator does; a CPU's figures are of the whole process.
    [said] = job_memory(job, {"main": DeviceMemory(total, total)})
    for phase, key in (("while actor trains", "update"), ("while actor generates", "generate")):
        found = max(row[f"actor/{key}_peak_gb"] for row in rows)
        bar = {"bar": MEMORY, "at_most": True} if key == "update" and not mini else {}
        if phase in said.phases:
            emit(f"{what}: memory that was said, {phase}", said.phases[phase] / 1e9, "GB")
            off = abs(said.phases[phase] / 1e9 / found - 1)
            met &= emit(f"{what}: it is off from {found:.4g} GB by", off, "of 1", **bar)
        else:
            emit(f"{what}: memory, {phase}", found, "GB")
    return met, inside


# --- the engine alone ---


def alone(settings: list[str], device: str, mini: bool) -> dict[str, Any]:
    """Tokens/s of the engine with the run's requests and nothing beside it, and its largest costs."""
    import attrs
    import numpy as np

    from hybridflow.core.contracts.rollout import Request
    from hybridflow.core.rollouts.build import build_engine, start_engine
    from hybridflow.kit.testing import one_rank
    from hybridflow.settle.launch import load_config

    [job] = load_config(CONFIG, settings)
    role, algorithm = job.models["actor"].spec, job.algorithm.config
    with one_rank(device, "actor") as context, tempfile.TemporaryDirectory() as logs:
        engine = build_engine(role.engine, role.model, role.engine_config, context, logs)
        start_engine(engine)
        fill(engine, device)
        drawn = np.random.default_rng(0)
        sequences = algorithm.prompts_per_step * algorithm.group_size
        prompts = drawn.integers(3, 14, (algorithm.prompts_per_step, 7))
        requests = [
            Request(row, prompts[row // algorithm.group_size], job.sampling, seed=row)
            for row in range(sequences)
        ]
        done: list[Any] = []

        def generate() -> None:
            done[:] = engine.submit(requests)

        seconds = seconds_of(generate, device, 1 if mini else 2)
        tokens = sum(len(one.response_ids) for one in done)
        # Each operation is recorded, so fewer tokens.
        few = attrs.evolve(job.sampling, max_tokens=min(64, job.sampling.max_tokens))
        requests = [attrs.evolve(request, sampling=few) for request in requests]
        largest = profiled(generate, device)
        engine.close()
    return {"tokens_per_second": tokens / seconds, "costs": largest}


def fill(engine: Any, device: str) -> None:
    """Give the engine random weights."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    layout = engine.layout()
    engine.begin_update(1)
    for name, boxes in layout.held[0].items():
        for box in boxes:
            dtype = layout.params[name].dtype
            values = torch.randn(box.shape, device=device, generator=generator) * 0.02
            engine.receive(name, box, values.to(dtype))
    engine.end_update()


# --- updates ---


def updates(settings: list[str], device: str, mini: bool) -> dict[str, Any]:
    """Seconds, tokens, FLOPs and peak memory of each case, and the largest costs of the first."""
    import attrs

    from hybridflow.core.contracts.training import Packing
    from hybridflow.core.workers.memory import measured as measured_memory
    from hybridflow.core.workers.model_worker import ModelWorker
    from hybridflow.kit.testing import one_rank
    from hybridflow.planner.calibration.probes import Likelihood
    from hybridflow.settle.launch import load_config

    budget = 256 if mini else BUDGET
    # Positions for the long rows
    settings = [*settings, f"actor.model.config.max_position_embeddings={2 * budget}"]
    rows = long_tailed(16 if mini else 256, 48 if mini else 1024)
    long = [budget - PROMPT] * (2 if mini else 16)
    found: dict[str, Any] = {}
    largest: list[tuple[str, float]] = []
    for recompute, cases in (
        (False, {"packed": rows, "padded": rows, f"packed, rows of {budget}": long}),
        (True, {"packed, recomputed": rows}),
    ):
        recomputation = f"actor.backend.activation_checkpointing={str(recompute).lower()}"
        [job] = load_config(CONFIG, [*settings, recomputation])
        role = attrs.evolve(
            job.models["actor"].spec, engine=None, engine_config=None, micro_batch_tokens=budget
        )
        with one_rank(device, "actor") as context:
            worker = ModelWorker(context, role)
            worker.build()
            packing = worker.backend.packing
            for case, lengths in cases.items():
                worker.backend.packing = Packing.PADDED if case == "padded" else packing
                group = GROUP if lengths is rows else 1
                update = partial(worker.update, [(batch_of(lengths, group), Likelihood())])
                with measured_memory(context.device) as peak:
                    seconds = seconds_of(update, device, 1 if mini else ROUNDS)
                if case == "packed":
                    largest = profiled(update, device)
                found[case] = {
                    "seconds": seconds, "tokens": sum(lengths) + PROMPT * len(lengths) // group,
                    "flops": flops(role.model.hf_config, lengths, group), "peak": peak.most, "same": lengths is rows,
                }  # fmt: skip
            del worker, update
        release(device)
    return {"cases": found, "costs": largest}


PROMPT, GROUP = 7, 8
"""Tokens of a prompt, and the responses to each."""


def long_tailed(rows: int, longest: int) -> list[int]:
    """Lengths of responses, of which half are shorter than a third of the longest."""
    import numpy as np

    drawn = np.random.default_rng(7).lognormal(0.0, 1.0, rows)
    return np.clip((drawn * longest * 0.3).astype(int), 1, longest).tolist()


def batch_of(lengths: list[int], group: int) -> Any:
    """A batch of random tokens: responses of these lengths, to each prompt so many."""
    import numpy as np
    import torch

    from hybridflow.core.values.batch import Batch
    from hybridflow.core.values.columns import tokens

    drawn = np.random.default_rng(0)

    def ids(count: int) -> torch.Tensor:
        return torch.from_numpy(drawn.integers(3, 14, count))

    owners = np.arange(len(lengths)) // group
    prompts = [ids(PROMPT) for _ in range(owners[-1] + 1)]
    return Batch(
        {
            "prompt_ids": tokens([prompts[owner] for owner in owners], torch.int64),
            "response_ids": tokens([ids(length) for length in lengths], torch.int64),
            "loss_mask": tokens([torch.ones(n, dtype=torch.uint8) for n in lengths], torch.uint8),
            "group": torch.from_numpy(owners),
            "meta": [{}] * len(lengths),
        }
    )


def flops(model: Any, lengths: list[int], group: int) -> float:
    """Of the forward and backward pass: each response's tokens, and its group's prompt once.

    Embeddings are looked up; the head, tied or not, is a product for each response token.
    """
    h, ffn, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    kv = h // model["num_attention_heads"] * model["num_key_value_heads"]
    trunk = layers * (2 * h * h + 2 * h * kv + 3 * h * ffn)
    tokens = sum(lengths) + PROMPT * len(lengths) / group
    attention = 12 * layers * h * sum(length**2 for length in lengths) / 2
    return 6 * (trunk * tokens + model["vocab_size"] * h * sum(lengths)) + attention


def profiled(action: Any, device: str) -> list[tuple[str, float]]:
    """The operations that take most of the device's time, and their shares of it."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        action()
        synchronize(device)

    def own(event: Any) -> float:
        return event.self_device_time_total if cuda else event.self_cpu_time_total

    events = sorted(seen.key_averages(), key=own, reverse=True)
    every = sum(map(own, events)) or 1.0
    return [(event.key[:80], own(event) / every) for event in events[:COSTS]]


PARTS = {"updates": updates, "alone": alone}
"""What runs in a process of its own, whose device has nothing else."""

if __name__ == "__main__":
    sys.exit(main())
