"""examples/gpu_grpo.toml on one GPU: seconds per phase, tokens/s, model FLOP utilisation of the update, peak memory.

Without a GPU it prints that it was skipped. The utilisation counts 6 FLOPs per parameter and token, and attention
(12 * layers * hidden * context per token, half of it causal), once; recomputed activations are not counted.
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

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s from the data sheets."""
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
    return report(rows, tomllib.loads(config.read_text()), torch.cuda.get_device_name())


def report(rows: list[dict], tables: dict, device: str) -> int:
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
    used = update_flops(model, sequences, length + 7) / mean("actor/update_seconds")
    peak = next((flops for name, flops in PEAK_BF16.items() if name in device), None)
    if peak is None:
        emit("FLOP/s of the update", used, "FLOP/s")
        return 0
    return 0 if emit("model FLOP utilisation of the update", used / peak, "of peak", bar=0.4) else 1


def update_flops(model: dict, sequences: float, tokens: float) -> float:
    """Forward and backward of `sequences` rows of `tokens` each; embeddings are looked up, the tied head is a product."""
    h, ffn, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    kv = h // model["num_attention_heads"] * model["num_key_value_heads"]
    parameters = layers * (2 * h * h + 2 * h * kv + 3 * h * ffn) + model["vocab_size"] * h
    attention = 12 * layers * h * tokens / 2
    return sequences * tokens * (6 * parameters + attention)


if __name__ == "__main__":
    sys.exit(main())
