"""A whole GRPO step beside TRL's: same model (0.8M parameters), 128 completions, lengths, float32, in one run.

Three draws of lengths, forced on both: 32 tokens each; 3 to 5 (a half-trained adder's); long-tailed (mean about 24,
largest 128). Both are tried with 1 thread, 2 threads, 2 spinning threads (ours also with 2 ranks); the best of each
are then run in turns. One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from common import emit  # noqa: E402

ROWS, GROUP, WARM = 128, 8, 4
BARS = {"fixed 32": 1.25, "short 3 to 5": 1.2, "long-tailed": 3.5}
MODES = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"},
    "2 spinning threads": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "100000"},
}
MODEL = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 384, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def draws() -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    tail = np.clip(rng.exponential(24, ROWS).astype(int) + 1, 1, 128)
    tail[0] = 128
    return {
        "fixed 32": [32] * ROWS,
        "short 3 to 5": rng.integers(3, 6, ROWS).tolist(),
        "long-tailed": tail.tolist(),
    }


def make_model(folder: Path) -> None:
    """The one set of weights that both train, with a character tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridflow.core.contracts.tokenizer import TokenizerConfig
    from hybridflow.core.plugins.resolve import build_tokenizer

    fields = {k: v for k, v in MODEL.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(MODEL["model_type"], **fields))
    model.save_pretrained(folder)
    build_tokenizer(TokenizerConfig(characters="0123456789+="), None, lambda: []).save(folder)


def config(folder: Path, steps: int, ranks: int) -> str:
    return f"""
algorithm.name = "grpo_step:Forced"
algorithm.lengths = "{folder}/lengths.json"
algorithm.prompts_per_step = {ROWS // GROUP}
algorithm.group_size = {GROUP}
runtime = "{"ray" if ranks > 1 else "inline"}"
pools.main = [{ranks}]
run = {{ steps = {steps}, folder = "{folder}/runs", trackers = ["jsonl"] }}
data = {{ source = "arithmetic", answer = "{{answer}}", max_prompt_tokens = 8 }}
sampling.max_tokens = 128
reward.function = "grpo_step:digits"
rollout.name = "transformers"
actor = {{ model.path = "{folder}/model", optimizer.lr = 1e-4 }}
"""


def digits(sample) -> float:
    """The share of answer positions whose character is right."""
    return sum(x == y for x, y in zip(sample.response, sample.answer, strict=False)) / len(
        sample.answer
    )


def __getattr__(name: str):
    """`grpo_step:Forced`, made when the run asks for it, so that this file starts without torch."""
    if name != "Forced":
        raise AttributeError(name)
    import attrs

    from hybridflow.algorithms.grpo import GRPO, GRPOConfig

    @attrs.frozen
    class ForcedConfig(GRPOConfig):
        """GRPO with forced lengths."""

        lengths: str = ""
        """File with the length of each of a step's responses."""

    class Lengthened:
        """A step's context whose actor generates the lengths of the draw."""

        def __init__(self, ctx, lengths):
            self._ctx, self._lengths = ctx, lengths

        def __getattr__(self, name):
            return getattr(self._ctx, name) if name != "actor" else self

        def generate(self, prompts):
            sampling = attrs.evolve(self._ctx.sampling, ignore_stop=True)
            return self._ctx.actor.generate(prompts, sampling=sampling, max_tokens=self._lengths)

        def logprobs(self, batch):
            return self._ctx.actor.logprobs(batch)

        def update(self, pairs):
            return self._ctx.actor.update(pairs)

    class Forced(GRPO):
        Config = ForcedConfig

        def step(self, ctx):
            super().step(Lengthened(ctx, json.loads(Path(self.config.lengths).read_text())))

    return Forced


def ours(folder: Path, steps: int, mode: str, ranks: int = 1) -> list[float]:
    path = folder / "ours.toml"
    path.write_text(config(folder, steps, ranks))
    environment = {**os.environ, **MODES[mode], "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", str(path), "--overwrite"]
    command += ["runtime.threads=1"] if ranks > 1 else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE)
    if done.returncode:
        raise RuntimeError(done.stderr)
    rows = [
        json.loads(line) for line in (folder / "runs/ours/metrics.jsonl").read_text().splitlines()
    ]
    return [row["seconds/step"] for row in rows][WARM:]


def trl(folder: Path, steps: int, mode: str) -> list[float]:
    python = HERE.parent / ".bench/trl/bin/python"
    environment = {
        **os.environ,
        **MODES[mode],
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [
        str(python),
        str(HERE / "peers/trl_grpo.py"),
        str(folder / "model"),
        str(folder / "lengths.json"),
        str(steps),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])["seconds"][WARM:]


def compare(case: str, folder: Path, lengths: list[int], rounds: int, steps: int) -> bool:
    (folder / "lengths.json").write_text(json.dumps(lengths))
    choices = {mode: (lambda n, mode=mode: ours(folder, n, mode)) for mode in MODES}
    choices["2 ranks"] = lambda n: ours(folder, n, "1 thread", ranks=2)
    peers = {mode: (lambda n, mode=mode: trl(folder, n, mode)) for mode in MODES}
    scout = WARM + 8
    best_us = min(choices, key=lambda m: statistics.median(choices[m](scout)))
    best_trl = min(peers, key=lambda m: statistics.median(peers[m](scout)))
    a, b, ratios = [], [], []
    for _ in range(rounds):  # in turns, so that both see the same machine
        mine, theirs = choices[best_us](steps), peers[best_trl](steps)
        a += mine
        b += theirs
        ratios.append(statistics.median(theirs) / statistics.median(mine))
    ratio = statistics.median(ratios)
    mean = sum(lengths) / len(lengths)
    emit(
        f"grpo step of TRL, {case} (mean {mean:.1f} tokens), {best_trl}", statistics.median(b), "s"
    )
    return emit(
        f"grpo step of hybridflow, {case} (mean {mean:.1f} tokens), {best_us}", statistics.median(a), "s",
        ratio=ratio, against="TRL", bar=BARS[case],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--case", choices=list(BARS))
    arguments = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for case, lengths in draws().items():
            if arguments.case in (None, case):
                good &= compare(case, folder, lengths, arguments.rounds, arguments.steps)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
