"""Whether runs on a GPU repeat their bits with `run.deterministic = true`, and what that costs.

python bench/gpu_determinism.py [--steps 20] [SETTINGS]
python bench/gpu_determinism.py --mini          few steps on the CPU, to see that all of this works

examples/arithmetic.toml (a supervised stage, then GRPO) in bfloat16 on one process, four times: twice whole, once ended after
half of its second stage's steps and resumed, and once without the setting. Compared are the bits of the final weights and of
every metric but times and memory. Bars: of the first three no weight and no metric differs. Told: what differs without the
setting, and its cost in a step's time. One JSON line per figure. Exits 1 where a bar is missed; without a GPU it says that it
was skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, device_of, emit, hybridflow

CONFIG = ROOT / "examples" / "arithmetic.toml"
TIMES = ("seconds", "timestamp", "_gb", "_mb", "per_second")
"""Parts of the names of metrics that tell a time or memory."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="of GRPO; an even number")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=200,
        help="supervised steps before, without which no reward is earned",
    )
    parser.add_argument("--mini", action="store_true", help="few steps on the CPU")
    options, overrides = parser.parse_known_args(arguments)
    device = device_of(options.mini, "gpu determinism")
    if device is None:
        return 0
    steps, before = (2, 2) if options.mini else (options.steps, options.warm_up)
    settings = [
        'runtime={name="inline", threads=1}', f"run.device={device}", "run.report=false", "validation.stop_at=1",
        "stages.warm-up.validation.stop_at=1", f"stages.warm-up.run.steps={before}",
    ]  # fmt: skip
    if options.mini:
        settings += ["stages.warm-up.algorithm.batch_size=8", "stages.grpo.algorithm={prompts_per_step=4, group_size=4}",
                     "validation.data.limit=4"]  # fmt: skip
    else:
        settings += [
            "actor.backend.precision=bf16",
            "rollout.dtype=bfloat16",
            "rollout.kv_memory_gb=1.0",
        ]
    settings += overrides

    with tempfile.TemporaryDirectory() as folder:

        def run(name: str, deterministic: bool, upto: int = steps, resume: bool = False) -> None:
            command = ["run", str(CONFIG), f"run.folder={folder}", f"run.name={name}", *settings]
            command += [
                f"run.deterministic={str(deterministic).lower()}",
                f"stages.grpo.run.steps={upto}",
            ]
            hybridflow(command + ["--resume"] * resume, here=options.mini)

        run("once", True)
        run("again", True)
        run("resumed", True, upto=steps // 2)
        run("resumed", True, resume=True)
        run("free", False)
        found = {
            name: outcome(Path(folder) / name / "grpo")
            for name in ("once", "again", "resumed", "free")
        }

    met, (weights, rows) = True, found["once"]
    emit("steps", len(rows), "")
    emit("reward in the last of them", rows[-1]["reward/scores"], "")
    met &= emit("metrics compared", len({key for row in rows for key in row}), "", bar=10)
    for name in ("again", "resumed", "free"):
        bar = {} if name == "free" else {"bar": 0, "at_most": True}
        others, metrics = found[name]
        differ = [key for key in weights if others[key] != weights[key]]
        met &= emit(f"{name}: tensors of {len(weights)} that differ", len(differ), "", **bar)
        keys = {
            key
            for a, b in zip(rows, metrics, strict=True)
            for key in a.keys() | b.keys()
            if a.get(key) != b.get(key) and not any(part in key for part in TIMES)
        }
        met &= emit(f"{name}: metrics that differ", len(keys), ", ".join(sorted(keys)[:3]), **bar)
    times = {
        name: statistics.median(row["seconds/step"] for row in found[name][1][1:])
        for name in ("once", "free")
    }
    emit(
        "a step that repeats its bits", times["once"], "s", ratio=times["once"] / times["free"],
        against=f"one that need not, {times['free']:.3g} s",
    )  # fmt: skip
    return 0 if met else 1


def outcome(folder: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """(name -> digest of each weight's bits, metrics of each step) of a run stage."""
    import torch
    from safetensors import safe_open

    digests = {}
    for file in sorted((folder / "export" / "actor").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                values = tensors.get_tensor(name).contiguous().view(torch.uint8)
                digests[name] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return digests, [row for row in rows if "seconds/step" in row]  # others are of validations


if __name__ == "__main__":
    sys.exit(main())
