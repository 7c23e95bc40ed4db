"""Does GRPO here learn what TRL's GRPO learns? The same model, data, reward function and settings, three seeds of each.

python bench/like_trl.py [--seeds 0 1 2] [--steps 100]

A model of 0.8M parameters is warmed up on worked sums once; both go on from its export, whose tokenizer, rows and reward
file both read as they are. Bars: the reward of each side gains 0.20 from the first ten steps to the last ten, and the
means over seeds of the last ten differ by at most two standard errors. One JSON line per figure; exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from common import ROOT, emit  # noqa: E402

WARM_UP = 0.35
"""Of the held-out sums, right after the warm-up: enough to learn from, and much left to learn."""
LAST = 10
"""Steps at either end whose reward is a side's figure."""
GAIN = 0.20
REWARDS = """
def right(completions, answer, **columns):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""


def warm_up(folder: Path) -> None:
    """Write the model's folder, and the rows that both train on."""
    from hybridflow.backends.data.arithmetic import ArithmeticSource
    from hybridflow.core.contracts.data_source import DataConfig

    _hybridflow(
        folder, ROOT / "examples/arithmetic.toml", "--stage", "warm-up", f"run.folder={folder}/runs",
        "run.name=sums", "runtime=inline", "runtime.threads=1", f"validation.stop_at={WARM_UP}",
        f"stages.warm-up.validation.stop_at={WARM_UP}",
    )  # fmt: skip
    rows = ArithmeticSource(DataConfig(source="arithmetic"))
    lines = (json.dumps(rows[i]) for i in range(len(rows)))
    (folder / "sums.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "rewards.py").write_text(REWARDS)


def settings(folder: Path, steps: int) -> dict:
    return {
        "model": str(folder / "runs/sums/warm-up/export/actor"),
        "data": str(folder / "sums.jsonl"),
        "rewards": str(folder / "rewards.py"),
        "prompts": 32,
        "group": 8,
        "tokens": 4,
        "lr": 3e-4,
        "steps": steps,
    }


def ours(folder: Path, given: dict, seed: int) -> list[float]:
    """The mean reward of each step of a run here."""
    config = folder / f"seed-{seed}.toml"
    config.write_text(f"""
runtime = "inline"
algorithm = {{ name = "grpo", prompts_per_step = {given["prompts"]}, group_size = {given["group"]}, how = "token-mean" }}
data = {{ source = "jsonl", path = "{given["data"]}", bos = true, max_prompt_tokens = 8 }}
sampling.max_tokens = {given["tokens"]}
reward = {{ function = "trl", options = {{ function = "rewards:right" }} }}
actor = {{ model.path = "{given["model"]}", optimizer.lr = {given["lr"]} }}
run = {{ steps = {given["steps"]}, seed = {seed}, folder = "{folder}/runs", trackers = ["jsonl"], export = false }}
""")
    _hybridflow(folder, config)
    log = (folder / f"runs/seed-{seed}/metrics.jsonl").read_text()
    return [json.loads(line)["reward/scores"] for line in log.splitlines()]


def trl(folder: Path, given: dict, seed: int) -> list[float]:
    """The mean reward of each step of TRL's trainer, in TRL's own environment."""
    (folder / "settings.json").write_text(json.dumps(given))
    script = HERE / "peers/trl_curve.py"
    python = ROOT / ".bench/trl/bin/python"
    said = _run([python, script, folder / "settings.json", seed], folder)
    return json.loads(said.splitlines()[-1])["rewards"]


def _hybridflow(folder: Path, *arguments: object) -> None:
    _run([sys.executable, "-m", "hybridflow.cli.main", "run", *arguments], folder)


def _run(command: list, folder: Path) -> str:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(folder),
    }  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), env=environment, cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:] or done.stdout[-4000:])
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    if not (ROOT / ".bench/trl/.done").exists():
        raise SystemExit("TRL is not installed: make .bench/trl/.done")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up(folder)
        given = settings(folder, arguments.steps)
        # A run is one process of one thread; nothing is timed.
        with ThreadPoolExecutor(2) as pool:
            runs = [
                [pool.submit(side, folder, given, seed) for seed in arguments.seeds]
                for side in (ours, trl)
            ]
            curves = [[run.result() for run in side] for side in runs]

    good = True
    last = []
    for side, seeds in zip(("hybridflow", "TRL"), curves, strict=True):
        first = statistics.mean(statistics.mean(curve[:LAST]) for curve in seeds)
        ends = [statistics.mean(curve[-LAST:]) for curve in seeds]
        last.append(ends)
        emit(f"reward of {side}, first {LAST} steps", first, "mean reward")
        emit(
            f"reward of {side}, last {LAST} steps",
            statistics.mean(ends),
            "mean reward",
            spread=ends,
        )
        good &= emit(f"gain of {side}", statistics.mean(ends) - first, "mean reward", bar=GAIN)

    mine, peer = last
    error = (statistics.variance(mine) / len(mine) + statistics.variance(peer) / len(peer)) ** 0.5
    apart = abs(statistics.mean(mine) - statistics.mean(peer))
    good &= emit("apart at the end", apart / error, "standard errors", bar=2.0, at_most=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
