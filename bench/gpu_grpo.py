"""examples/gpu_grpo.toml on one GPU: seconds per phase, tokens/s, model FLOP utilisation of the update, peak memory beside what
the run's sums say, and how far engine and trainer differ.

python bench/gpu_grpo.py                          the embedded engine
python bench/gpu_grpo.py 'rollout={name="vllm"}'  vLLM

Without a GPU it prints that it was skipped. The utilisation counts 6 FLOPs per parameter and token, and attention
(12 * layers * hidden * context per token, half of it causal), once; recomputed activations are not counted. It is a share of
what large products reach, 0.8 of the data sheet's figure. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from common import emit  # noqa: E402

from hybridflow.core.contracts.planner import DeviceMemory  # noqa: E402
from hybridflow.core.job.job import Job  # noqa: E402
from hybridflow.planner.preflight import job_memory  # noqa: E402
from hybridflow.settle.launch import load_config  # noqa: E402

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s from the data sheets."""
REACHED = 0.8
"""The share of them that large products reach, 790e12 of an H100."""
UTILISED, MISMATCH, MEMORY = 0.35, 0.05, 0.1
"""The bars: of what is reached; nats; of the memory that was said."""
PROMPT, GROUP = 7, 8
"""Tokens of a prompt of the arithmetic task, and the responses to each (examples/gpu_grpo.toml)."""
WARM = 1


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"name": "gpu grpo step", "skipped": "no CUDA device"}))
        return 0
    config = HERE.parent / "examples/gpu_grpo.toml"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "hybridflow.cli.main",
            "run",
            str(config),
            f"run.folder={folder}",
            *sys.argv[1:],
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        rows = [
            json.loads(r)
            for r in (Path(folder) / "gpu_grpo/metrics.jsonl").read_text().splitlines()
        ][WARM:]
    _, total = torch.cuda.mem_get_info()
    [job] = load_config(config, sys.argv[1:])
    return report(rows, tomllib.loads(config.read_text()), job, total, torch.cuda.get_device_name())


def report(rows: list[dict], tables: dict, job: Job, total: int, device: str) -> int:
    def mean(key: str) -> float:
        return sum(row[key] for row in rows) / len(rows)

    model, algorithm = tables["actor"]["model"]["config"], tables["algorithm"]
    sequences = algorithm["prompts_per_step"] * algorithm["group_size"]
    length = mean("actor/response_length")
    for phase in sorted(k for k in rows[0] if k.startswith("seconds/")):
        emit(f"{phase} on {device}", mean(phase), "s")
    for key in sorted(k for k in rows[0] if k.endswith("_peak_gb")):
        emit(f"{key} on {device}", max(row[key] for row in rows), "GB")
    emit(
        "response tokens per second of a step",
        sequences * length / mean("seconds/step"),
        "tokens/s",
    )
    emit(
        "response tokens per second of generation",
        sequences * length / mean("actor/generate_seconds"),
        "tokens/s",
    )
    mismatch = max(row["actor/mismatch_mean"] for row in rows)
    good = emit("mismatch of engine and trainer", mismatch, "nats", bar=MISMATCH, at_most=True)

    # The sums count what the engine keeps, as the allocator does.
    [said] = job_memory(job, {"main": DeviceMemory(total, total)})
    trains = said.phases["while actor trains"] / 1e9
    found = max(row["actor/update_peak_gb"] for row in rows)
    emit(
        "memory that was said, while it trains",
        trains,
        "GB",
        ratio=trains / found,
        against=f"allocated {found:.1f} GB",
    )
    good &= emit("it is off by", abs(trains / found - 1), "of 1", bar=MEMORY, at_most=True)

    used = update_flops(model, sequences, length + PROMPT / GROUP) / mean("actor/update_seconds")
    peak = next((flops for name, flops in PEAK_BF16.items() if name in device), None)
    if peak is None:
        emit("FLOP/s of the update", used, "FLOP/s")
        return 0 if good else 1
    good &= emit(
        "model FLOP utilisation of the update",
        used / (REACHED * peak),
        "of what is reached",
        bar=UTILISED,
    )
    return 0 if good else 1


def update_flops(model: dict, sequences: float, tokens: float) -> float:
    """Forward and backward of `sequences` rows of `tokens` each, with their share of the group's prompt.

    Embeddings are looked up, the tied head is a product.
    """
    h, ffn, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    kv = h // model["num_attention_heads"] * model["num_key_value_heads"]
    parameters = layers * (2 * h * h + 2 * h * kv + 3 * h * ffn) + model["vocab_size"] * h
    attention = 12 * layers * h * tokens / 2
    return sequences * tokens * (6 * parameters + attention)


if __name__ == "__main__":
    sys.exit(main())
