"""What `hybridflow plan` says a step takes, beside what it takes: calibrates this machine, then runs GRPO and PPO on models
of 0.8M and 20M parameters in the layouts that two processes allow, all with one calibration.

python bench/predictions.py [--rounds 5] [--keep FOLDER]     about half an hour on two cores

Every round runs every configuration once, for four steps, of which the first is not counted; the best step of all rounds
counts. A configuration's spread is that of its rounds' best. One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
from common import emit

PROCESSES, STEPS = 2, 4
MEAN_ERROR = 0.15
"""Of predicted step times, at most."""
SIZES = {
    "0.8M": "vocab_size = 16, hidden_size = 128, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 384",
    "20M": "vocab_size = 8192, hidden_size = 384, num_hidden_layers = 10, num_attention_heads = 6, intermediate_size = 1024",
}
WORK = (
    # algorithm, model, prompt tokens, response tokens, prompts, responses of each
    ("grpo", "0.8M", 8, 8, 64, 4),
    ("grpo", "0.8M", 8, 64, 16, 4),
    ("ppo", "0.8M", 64, 32, 32, 1),
    ("grpo", "20M", 16, 16, 8, 4),
    ("grpo", "20M", 64, 64, 4, 4),
)
LAYOUTS = ((1, 1), (2, 1), (2, 2))
"""tp of training, tp of generation."""


def config(folder: Path, work: tuple, layout: tuple[int, int]) -> Path:
    algorithm, size, prompt, response, prompts, group = work
    name = f"{algorithm}-{size}-{prompt}+{response}-tp{layout[0]}-engine{layout[1]}"
    data = folder / f"{prompt}.jsonl"
    draw = random.Random(0)
    rows = (
        {"prompt": "".join(draw.choices("0123456789", k=prompt)), "answer": "1"} for _ in range(256)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = f'{{ model_type = "qwen2", num_key_value_heads = 2, max_position_embeddings = 512, {SIZES[size]} }}'
    grouped = f", group_size = {group}" if algorithm == "grpo" else ""
    path = folder / f"{name}.toml"
    path.write_text(f"""
run = {{ steps = {STEPS}, folder = "{folder}/runs", trackers = ["jsonl"], device = "cpu" }}
placement = {{ name = "given", cluster = "{folder}/cluster.toml" }}
runtime = {{ name = "ray", threads = 1 }}
pools.main = [{PROCESSES}]
tokenizer.characters = "0123456789+="
data = {{ source = "jsonl", path = "{data}", answer = "{{answer}}", max_prompt_tokens = {prompt} }}
sampling = {{ max_tokens = {response}, logit_bias = {{ 2 = -1e9 }} }}  # no response ends before max_tokens
reward.function = "exact_match"
algorithm = {{ name = "{algorithm}", prompts_per_step = {prompts}, kl_coef = 0.01{grouped} }}
rollout = "transformers"
[actor]
micro_batch_tokens = 2048
model.config = {model}
layout.tp = {layout[0]}
generation.tp = {layout[1]}
""")
    return path


def hybridflow(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "hybridflow.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip


def steps_of(path: Path) -> list[dict[str, float]]:
    lines = (path.parent / "runs" / path.stem / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--keep",
        help="a folder for the cluster file, the configs and the runs; a cluster file that is there is taken",
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        return compare(Path(arguments.keep or temporary), arguments.rounds)


def compare(folder: Path, rounds: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    cluster = folder / "cluster.toml"
    if not cluster.exists():
        hybridflow("calibrate", "--devices", str(PROCESSES), "--write", str(cluster))
    paths = {
        (work, layout): config(folder, work, layout)
        for work, layout in itertools.product(WORK, LAYOUTS)
    }
    found: dict[tuple, list[list[dict[str, float]]]] = {key: [] for key in paths}
    for at in range(rounds):
        for key, path in paths.items():
            hybridflow("run", str(path), "--overwrite")
            found[key].append(steps_of(path))
        print(f"round {at + 1} of {rounds}", file=sys.stderr, flush=True)
    best = {
        key: [min(step["seconds/step"] for step in steps) for steps in runs]
        for key, runs in found.items()
    }
    predicted = {key: runs[0][0]["seconds/predicted"] for key, runs in found.items()}
    errors = []
    for key, path in paths.items():
        measured = min(best[key])
        errors.append(abs(predicted[key] / measured - 1))
        emit(
            path.stem,
            predicted[key],
            "s",
            ratio=predicted[key] / measured,
            against=f"measured {measured:.4g} s",
        )
    good = emit(
        "mean error of the step time",
        sum(errors) / len(errors),
        "of 1",
        bar=MEAN_ERROR,
        at_most=True,
    )
    for work in WORK:
        said = min(LAYOUTS, key=lambda layout: predicted[work, layout])
        was = min(LAYOUTS, key=lambda layout: min(best[work, layout]))
        lost = min(best[work, said]) / min(best[work, was])
        spread = max(best[work, was]) / min(best[work, was])
        what = f"{' '.join(map(str, work[:4]))}: tp {said[0]} engine {said[1]} is predicted the best, measured against the best"
        good &= emit(what, lost, "times", bar=max(spread, 1.0), at_most=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
