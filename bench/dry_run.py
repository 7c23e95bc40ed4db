"""The planner's formulas for FSDP2's memory beside the backend's own code on GPUs that are not there.

python bench/dry_run.py                       12 configurations, drawn by the commit that last changed the formulas
python bench/dry_run.py --draw 1a2b3c4d       drawn by this seed

Widths of 0.5B to 14B with few layers, bf16, in layouts of up to 64 ranks. One JSON line per figure; exits 1 when a formula (at
rest, in a forward pass, in an update) differs by more than 5% from what the backend's tensors take, as `hybridflow plan
--dry-run` counts them.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, emit

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.model_shape import ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.fakes.process import Asked, rehearse
from hybridflow.planner.cluster import Cluster
from hybridflow.planner.memory import Memory
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import PlannedModel, Task, Workload

BAR = 0.05
COUNT = 12
FORMULAS = ("kit/footprints.py", "planner/memory.py")
WIDTHS = {
    # type, hidden, intermediate, heads, key/value heads, vocabulary, tied
    "0.5B": ("qwen2", 896, 4864, 14, 2, 151936, True),
    "1B": ("llama", 2048, 8192, 32, 8, 128256, True),
    "1.5B": ("qwen2", 1536, 8960, 12, 2, 151936, True),
    "7B": ("qwen2", 3584, 18944, 28, 4, 152064, False),
    "8B": ("llama", 4096, 14336, 32, 8, 128256, False),
    "14B": ("qwen2", 5120, 13824, 40, 8, 152064, False),
}


def fields(width: str, layers: int) -> dict[str, Any]:
    """Of the Hugging Face config."""
    kind, hidden, inner, heads, kv_heads, vocab, tied = WIDTHS[width]
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "num_hidden_layers": layers, "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def drawn(seed: str) -> list[dict[str, Any]]:
    """Configurations, the same ones for the same seed."""
    draw = random.Random(int(seed, 16))
    found = []
    for at in range(COUNT):
        width = draw.choice(list(WIDTHS))
        heads = WIDTHS[width][4]
        tp = draw.choice([size for size in (1, 1, 2, 4) if heads % size == 0])
        dp = draw.choice([8, 16, 32, 64]) // tp
        config: dict[str, Any] = {"activation_checkpointing": draw.random() < 0.5}
        if draw.random() < 0.25:
            config["replicas"] = 2
        rows = draw.choice([1, 2, 4])
        response = draw.choice([256, 512, 1024, 2048])
        layers = draw.choice([2, 3, 4, 6])
        prompt = draw.choice([128, 256, 512])
        case = {
            "width": width,
            "layers": layers,
            "tp": tp,
            "dp": dp,
            "config": config,
            "rows": rows,
        }
        found.append(case | {"prompt": prompt, "response": response, "micros": (1, 8)[at % 2]})
    return found


def compare(case: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Moment -> (bytes by the formula, bytes of the backend's tensors)."""
    model = fields(case["width"], case["layers"])
    config = FSDPConfig(precision="bf16", **case["config"])
    layout = ParallelLayout(dp=case["dp"], tp=case["tp"])
    tokens = case["prompt"] + case["response"]
    rows = {
        "rows": case["rows"],
        "tokens": tokens,
        "response": case["response"],
        "count": case["micros"],
    }
    asked = Asked(
        backend="fsdp", config=config, model=ModelSpec(model, None, 0), optimizer=OptimizerConfig(), layout=layout,
        forward=rows | {"count": 1}, update=rows,
    )  # fmt: skip
    phases = dict(rehearse(asked))

    sequences = case["rows"] * case["micros"] * case["dp"]
    work = Workload(
        (Task("actor", "infer", sequences), Task("actor", "train", sequences)), case["prompt"], case["response"]
    )  # fmt: skip
    planned = PlannedModel(
        "actor", ModelSize(config.model_shape(model)), config, trained=True, micro_batch_tokens=case["rows"] * tokens
    )  # fmt: skip
    simulator = Simulator.of(Cluster.of("h100-80gb", 8, 8).nodes[0], work)
    said = Memory(simulator).bytes(planned, layout)
    return {
        "rest": (said.resident, phases["rest"]["after"]),
        "forward": (said.resident + said.inference, phases["forward"]["peak"]),
        "update": (said.resident + said.training, phases["update"]["peak"]),
    }


def last_change() -> str:
    """The first 8 hex digits of the commit that last changed the formulas."""
    command = ["git", "log", "-1", "--format=%H", "--", *FORMULAS]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout[:8]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", metavar="HEX", help="a seed in place of the commit")
    seed = parser.parse_args().draw or last_change()
    good = True
    for case in drawn(seed):
        options = ", ".join(name for name, value in case["config"].items() if value)
        what = (
            f"{seed}: {case['width']} x {case['layers']}, dp {case['dp']} tp {case['tp']}, "
            f"{case['micros']} x {case['rows']} x ({case['prompt']}+{case['response']}) {options}"
        )
        for moment, (said, found) in compare(case).items():
            against = f"dry run {found / 1e6:.0f} MB"
            emit(f"{what}: {moment}", said / 1e6, "MB", ratio=said / found, against=against)
            good &= emit(
                f"{what}: {moment}'s error", abs(said / found - 1), "of 1", bar=BAR, at_most=True
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
