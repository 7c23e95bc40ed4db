"""What each algorithm learns on the arithmetic task, from one warm-up per seed: a table for docs/benchmarks.md.

python docs/make_curves.py [--seeds 0 1 2] [--only grpo rloo]     (make curves)

Each run is a process of its own, on one core; figures of runs that are there already are kept (runs/learning).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "learning"
BASE = Template("""
runtime = "inline"
[run]
name = "$name"
folder = "$folder"
seed = $seed
steps = $steps
export = $export
trackers = ["jsonl"]
[data]
source = "$source"
bos = true
answer = "{answer}"
max_prompt_tokens = 8
$data
[sampling]
max_tokens = 4
[validation]
every = $every
at_start = $at_start
data.options = { split = "held-out" }
$validation
[actor]
micro_batch_tokens = 8192
$model
$tables
""")
FRESH = """model.config = { model_type = "qwen2", vocab_size = 16, hidden_size = 128, num_hidden_layers = 4, \
num_attention_heads = 4, num_key_value_heads = 2, intermediate_size = 384, max_position_embeddings = 64, \
tie_word_embeddings = true }"""
EXACT = '[reward]\nfunction = "exact_match"\n'
ONLINE = {
    "grpo": "group_size = 8\nprompts_per_step = 64",
    "dr_grpo": "group_size = 8\nprompts_per_step = 64\nlength = 4",
    "dapo": "group_size = 8\nprompts_per_step = 32\nmax_draws = 4",
    "gspo": "group_size = 8\nprompts_per_step = 64\nmini_batch_size = 256\nclip_low = 0.05\nclip_high = 0.05",
    "cispo": "group_size = 8\nprompts_per_step = 64\nmini_batch_size = 256",
    "rloo": "group_size = 4\nprompts_per_step = 128\nkl_coef = 0.0",
    "remax": "prompts_per_step = 256\nkl_coef = 0.0",
    "reinforce_pp": "prompts_per_step = 512\nkl_coef = 0.0",
    "reinforce_pp_baseline": "group_size = 8\nprompts_per_step = 64\nkl_coef = 0.0",
    "ppo": "prompts_per_step = 512\nmini_batch_size = 256\nkl_coef = 0.001",
    "safe_rlhf": "prompts_per_step = 512\nmini_batch_size = 256\nkl_coef = 0.001\ncost_limit = 0.2",
}
"""Settings of [algorithm] whose score is exact match."""
MORE = {
    "ppo": "[critic]\noptimizer.lr = 1e-3\n",
    "safe_rlhf": "[critic]\noptimizer.lr = 1e-3\n[cost_critic]\noptimizer.lr = 1e-3\n"
    '[cost]\nfunction = "examples.learning.pairs:nines"\n',
}
PAIRS = {"dpo": ("actor", "beta = 0.5"), "reward_model": ("reward", ""), "cost_model": ("cost", "")}
"""Settings whose score is the accuracy on held-out pairs: the role that learns, and [algorithm]."""
LIMIT_S = 180


def config(name: str, seed: int, warm: Path | None) -> str:
    """The TOML of a run; `warm`: the folder of the warm-up of its seed, None for that itself."""
    given = {
        "name": f"{name}-{seed}",
        "folder": RUNS,
        "seed": seed,
        "source": "arithmetic",
        "validation": "",
        "data": "",
        "export": "false",
    }
    characters = '[tokenizer]\ncharacters = "0123456789+="\n'
    if warm is None:
        tables = f"optimizer = {{ lr = 2e-3 }}\nmodel.init_seed = {seed}\n{EXACT}"
        tables += f'[algorithm]\nname = "sft"\nbatch_size = 64\n{characters}'
        more = {
            "steps": 600,
            "every": 5,
            "at_start": "false",
            "export": "true",
            "model": FRESH,
            "validation": "stop_at = 0.6",
        }
        return BASE.substitute(
            given | more | {"tables": tables, "data": 'response = "{answer}"\noptions = { rows = 1200 }'}
        )
    given |= {"every": 10, "at_start": "true", "model": f'model.path = "{warm}"', "steps": 150}
    if name in ONLINE:
        tables = (
            f'optimizer = {{ lr = 3e-4 }}\n{EXACT}{MORE.get(name, "")}[algorithm]\nname = "{name}"\n{ONLINE[name]}\n'
        )
        return BASE.substitute(given | {"tables": tables})
    role, settings = PAIRS[name]
    data = 'response = "{answer}"\nrejected = "{wrong}"\n'
    if name == "cost_model":
        data = 'response = "{even}"\nrejected = "{odd}"\nunsafe = ["even_unsafe", "odd_unsafe"]\n'
    own = "optimizer = { lr = 3e-4 }\n" if role == "actor" else ""
    table = (
        "" if role == "actor" else f'[{role}]\nmodel.path = "{warm}"\nmicro_batch_tokens = 8192\noptimizer.lr = 1e-3\n'
    )
    tables = f'{own}{table}[algorithm]\nname = "{name}"\npairs_per_step = 64\n{settings}\n'
    more = {"source": "examples.learning.pairs:Pairs", "data": data, "validation": "generate = false", "tables": tables}
    return BASE.substitute(given | more)


def run(name: str, seed: int, warm: Path | None) -> Path:
    """Its folder; nothing is run that has ended already."""
    folder = RUNS / f"{name}-{seed}"
    if (folder / "seconds").exists():
        return folder
    RUNS.mkdir(parents=True, exist_ok=True)
    file = RUNS / f"{name}-{seed}.toml"
    file.write_text(config(name, seed, warm))
    started = time.monotonic()
    command = [sys.executable, "-m", "hybridflow.core.cli", "run", str(file), "--overwrite"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=None if warm is None else LIMIT_S,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{file}: {done.stderr or done.stdout}")
    except subprocess.TimeoutExpired:  # what it has learnt by then counts
        pass
    (folder / "seconds").write_text(f"{time.monotonic() - started:.0f}")
    return folder


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, percent) of each validation."""
    key = "validation/accuracy" if name in PAIRS else "validation/score"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], 100 * row[key]) for row in rows if key in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[*ONLINE, *PAIRS])
    arguments = parser.parse_args()
    failed = []
    print("| algorithm | score | from | to | steps | seconds |\n|---|---|---|---|---|---|")
    for name in arguments.only:
        curves, seconds = [], []
        for seed in arguments.seeds:
            warm = run("warm-up", seed, None) / "export" / "actor"
            folder = run(name, seed, warm)
            curves.append(curve(folder, name))
            seconds.append(float((folder / "seconds").read_text()))
        first, last = [c[0][1] for c in curves], [max(v for _, v in c[-3:]) for c in curves]
        kind, bar = ("held-out pairs in order", 15) if name in PAIRS else ("held-out sums right", 20)
        if min(b - a for a, b in zip(first, last, strict=True)) < bar:
            failed.append(name)
        steps = " ".join(str(c[-1][0]) for c in curves)
        row = [f"`{name}`", kind, spread(first), spread(last), steps, " ".join(f"{s:.0f}" for s in seconds)]
        print("| " + " | ".join(row) + " |", flush=True)
    if failed:
        raise SystemExit(f"gained less than asked: {', '.join(failed)}")


def spread(values: list[float]) -> str:
    """Mean, and the range over seeds."""
    if len(values) == 1:
        return f"{values[0]:.0f}%"
    return f"{statistics.mean(values):.0f}% ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    main()
