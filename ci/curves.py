"""What each algorithm learns on the arithmetic task, from one warm-up per seed: the table and pictures in docs/curves.

python ci/curves.py [--seeds 0 1 2] [--only grpo rloo] [--jobs 2]     (make curves)

Each run is a process of its own with one thread, ended after LIMIT_S seconds: what it has learnt by then counts. Runs that are
there already are kept (runs/learning). The table and the pictures are written where all algorithms were asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
CURVES = ROOT / "docs" / "curves"
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
    "safe_rlhf": "prompts_per_step = 256\nmini_batch_size = 128\nkl_coef = 0.001\ncost_limit = 0.39\nmultiplier_lr = 0.5\n"
    "multiplier_window = 256\nmultiplier_damping = 10.0",
}
"""Settings of [algorithm] whose score is exact match."""
MORE = {
    "ppo": "[critic]\noptimizer.lr = 1e-3\n",
    "safe_rlhf": "[critic]\noptimizer.lr = 1e-3\n[cost_critic]\noptimizer.lr = 1e-3\n"
    '[cost]\nfunction = "examples.learning.pairs:last_digit"\n',
}
PAIRS = {"dpo": ("actor", "beta = 0.5"), "reward_model": ("reward", ""), "cost_model": ("cost", "")}
"""Settings whose score is the accuracy on held-out pairs: the role that learns, and [algorithm]."""
CONTROL = "safe_rlhf without its cost"
"""The same run with lambda held at 0: what the cost does where nobody minds it."""
ONLINE_AND_CONTROL = ONLINE | {
    CONTROL: ONLINE["safe_rlhf"] + "\nmultiplier = 1e-9\nmultiplier_max = 1e-9"
}
LIMIT_S = 150


def label(name: str, seed: int) -> str:
    return f"{name.replace(' ', '-')}-{seed}"


def config(name: str, seed: int, warm: Path | None, stop_at: float | None = None) -> str:
    """The TOML of a run; `warm`: the folder of the warm-up of its seed, None for that itself."""
    given = {
        "name": label(name, seed),
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
            given
            | more
            | {"tables": tables, "data": 'response = "{answer}"\noptions = { rows = 1200 }'}
        )
    given |= {"every": 10, "at_start": "true", "model": f'model.path = "{warm}"', "steps": 150}
    if name in ONLINE_AND_CONTROL:
        if stop_at is not None:
            given["validation"] = f"stop_at = {stop_at}"
        algorithm = name.split()[0]
        own = f'[algorithm]\nname = "{algorithm}"\n{ONLINE_AND_CONTROL[name]}\n'
        tables = f"optimizer = {{ lr = 3e-4 }}\n{EXACT}{MORE.get(algorithm, '')}{own}"
        return BASE.substitute(given | {"tables": tables})
    role, settings = PAIRS[name]
    data = 'response = "{answer}"\nrejected = "{wrong}"\n'
    if name == "cost_model":
        data = 'response = "{even}"\nrejected = "{odd}"\nunsafe = ["even_unsafe", "odd_unsafe"]\n'
    own = "optimizer = { lr = 3e-4 }\n" if role == "actor" else ""
    table = (
        ""
        if role == "actor"
        else f'[{role}]\nmodel.path = "{warm}"\nmicro_batch_tokens = 8192\noptimizer.lr = 1e-3\n'
    )
    tables = f'{own}{table}[algorithm]\nname = "{name}"\npairs_per_step = 64\n{settings}\n'
    more = {
        "source": "examples.learning.pairs:Pairs",
        "data": data,
        "validation": "generate = false",
        "tables": tables,
    }
    return BASE.substitute(given | more)


def run(name: str, seed: int, warm: Path | None, stop_at: float | None = None) -> Path:
    """Its folder; nothing is run that has ended already."""
    folder = RUNS / label(name, seed)
    if (folder / "seconds").exists():
        return folder
    RUNS.mkdir(parents=True, exist_ok=True)
    file = RUNS / f"{label(name, seed)}.toml"
    file.write_text(config(name, seed, warm, stop_at))
    started = time.monotonic()
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", str(file), "--overwrite"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=None if warm is None else LIMIT_S,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{file}: {done.stderr or done.stdout}")
    except subprocess.TimeoutExpired:
        pass
    (folder / "seconds").write_text(f"{time.monotonic() - started:.0f}")
    return folder


def metrics(folder: Path, *keys: str) -> list[tuple[float, ...]]:
    """(step, values of `keys`) of each row that has them."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (row["step"], *(row[key] for key in keys))
        for row in rows
        if all(key in row for key in keys)
    ]


def curve(folder: Path, name: str) -> list[tuple[float, float]]:
    """(step, percent) of each validation."""
    key = "validation/accuracy" if name in PAIRS else "validation/score"
    return [(step, 100 * value) for step, value in metrics(folder, key)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[*ONLINE, *PAIRS], choices=[*ONLINE, *PAIRS])
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs at once, of one thread each"
    )
    parser.add_argument(
        "--stop-at", type=float, help="end a run early at this share of held-out sums"
    )
    arguments = parser.parse_args()
    names, seeds = arguments.only, arguments.seeds
    asked = [*names, CONTROL] if "safe_rlhf" in names else names
    with ThreadPoolExecutor(arguments.jobs) as pool:
        warm = dict(
            zip(seeds, pool.map(lambda seed: run("warm-up", seed, None), seeds), strict=True)
        )
        jobs = {
            (n, s): pool.submit(run, n, s, warm[s] / "export" / "actor", arguments.stop_at)
            for n in asked
            for s in seeds
        }
        folders = {key: job.result() for key, job in jobs.items()}
    lines = [
        "| algorithm | score | from | to | gain, least | steps | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = []
    for name in names:
        curves = [curve(folders[name, seed], name) for seed in seeds]
        first, last = [c[0][1] for c in curves], [max(v for _, v in c[-3:]) for c in curves]
        gain = min(b - a for a, b in zip(first, last, strict=True))
        kind, bar = (
            ("held-out pairs in order", 15) if name in PAIRS else ("held-out sums right", 20)
        )
        if gain < bar:
            failed.append(f"{name} gained {gain:.0f} points, less than {bar}")
        steps = span([c[-1][0] for c in curves])
        seconds = span([float((folders[name, seed] / "seconds").read_text()) for seed in seeds])
        lines.append(
            f"| `{name}` | {kind} | {spread(first)} | {spread(last)} | {gain:.0f} | {steps} | {seconds} |"
        )
    if "safe_rlhf" in names:
        table, broken = safety(
            [folders["safe_rlhf", s] for s in seeds], [folders[CONTROL, s] for s in seeds]
        )
        lines += ["", *table]
        failed += broken
    print("\n".join(lines))
    if names == [*ONLINE, *PAIRS]:
        CURVES.mkdir(exist_ok=True)
        (CURVES / "table.md").write_text("\n".join(lines) + "\n")
        draw(folders, seeds)
    if failed:
        raise SystemExit("\n".join(failed))


LIMIT = 0.4
SAFE = ("cost/costs", "reward/scores", "lambda")


def safety(constrained: list[Path], control: list[Path]) -> tuple[list[str], list[str]]:
    """The table of Safe RLHF and its control: means of the last third of the steps; and what is not as it should be."""
    lines = [
        "| run | mean cost, first step | mean cost, last third | reward, first step | reward, last third | lambda, last |"
    ]
    lines.append("|---|---|---|---|---|---|")
    broken = []
    for name, folders in (("`safe_rlhf`, limit 0.4", constrained), ("lambda held at 0", control)):
        found = [metrics(folder, *SAFE) for folder in folders]
        late = [
            [statistics.mean(row[i] for row in rows[-len(rows) // 3 :]) for i in (1, 2)]
            for rows in found
        ]
        cells = [
            spread([r[0][1] for r in found], 3), spread([c for c, _ in late], 3),
            spread([r[0][2] for r in found], 3), spread([s for _, s in late], 3),
            spread([r[-1][3] for r in found], 2),
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        for folder, rows, (cost, score) in zip(folders, found, late, strict=True):
            if (cost <= LIMIT) != (folders is constrained) or score <= rows[0][2]:
                broken.append(
                    f"{folder.name}: mean cost {cost:.3f} against the limit {LIMIT}, reward {rows[0][2]:.2f} to {score:.2f}"
                )
    return lines, broken


def draw(folders: dict[tuple[str, int], Path], seeds: Iterable[int]) -> None:
    """docs/curves/NAME.svg: each seed's held-out score over the steps; of Safe RLHF also cost and lambda."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "hybridflow",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    from matplotlib import pyplot

    for name in [*ONLINE, *PAIRS]:
        figure, axes = pyplot.subplots(figsize=(4.2, 2.3), layout="constrained")
        for seed in seeds:
            axes.plot(*zip(*curve(folders[name, seed], name), strict=True), label=f"seed {seed}")
        axes.set(
            xlabel="step",
            ylabel="pairs in order, %" if name in PAIRS else "held-out sums right, %",
            ylim=(40, 101),
        )
        axes.legend(frameon=False)
        figure.savefig(CURVES / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
    figure, rows = pyplot.subplots(1, 3, figsize=(8.4, 2.5), layout="constrained")
    for seed in seeds:
        for name, style in (("safe_rlhf", "-"), (CONTROL, ":")):
            step, *values = zip(*metrics(folders[name, seed], *SAFE), strict=True)
            for axes, value in zip(rows, values, strict=True):
                axes.plot(step, value, style, color=f"C{seed}", linewidth=1)
    for axes, title in zip(rows, ("mean cost (limit 0.4)", "reward", "lambda"), strict=True):
        axes.set(xlabel="step", title=title)
    rows[0].axhline(LIMIT, color="black", linewidth=0.8)
    figure.savefig(CURVES / "safe_rlhf_cost.svg", metadata={"Date": None})


def span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def spread(values: list[float], places: int = 0) -> str:
    """Mean, and the range over seeds."""
    unit = "%" if places == 0 else ""
    if len(values) == 1:
        return f"{values[0]:.{places}f}{unit}"
    return f"{statistics.mean(values):.{places}f}{unit} ({min(values):.{places}f} to {max(values):.{places}f})"


if __name__ == "__main__":
    main()
