"""A whole GRPO step beside TRL's: same model, completions, lengths, float32, in one run.

python bench/grpo_step.py [--model 20M] [--case "long-tailed"] [--rounds 5]

128 completions of a model of 0.8M parameters, or 32 of one of 20M.

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
from common import MODES, Timing, emit, race, stamp  # noqa: E402

GROUP, WARM = 8, 4
BARS = {"fixed 32": 1.3, "short 3 to 5": 1.3, "long-tailed": 4.3}
"""Of the 0.8M model: times as fast as TRL."""
AIMS = {"fixed 32": 1.5, "short 3 to 5": 1.3, "long-tailed": 5.0}
"""What is wished for, with either model."""
COMMON = {
    "model_type": "qwen2", "vocab_size": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "0.8M": ({**COMMON, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 384}, 128),
    "20M": ({**COMMON, "hidden_size": 384, "num_hidden_layers": 10, "num_attention_heads": 12,
             "num_key_value_heads": 6, "intermediate_size": 1536}, 32),
}  # fmt: skip
"""Config, and responses a step."""
PROCESSOR = "processor.txt"
"""File of a run's folder with the processor seconds after each step."""


def draws(rows: int = 128) -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    tail = np.clip(rng.exponential(24, rows).astype(int) + 1, 1, 128)
    tail[0] = 128
    return {
        "fixed 32": [32] * rows,
        "short 3 to 5": rng.integers(3, 6, rows).tolist(),
        "long-tailed": tail.tolist(),
    }


def make_model(folder: Path, config: dict) -> None:
    """The one set of weights that both train, with a character tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridflow.core.contracts.tokenizer import TokenizerConfig
    from hybridflow.core.plugins.resolve import build_tokenizer

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(folder)
    build_tokenizer(TokenizerConfig(characters="0123456789+="), None, lambda: []).save(folder)


def config(folder: Path, steps: int, ranks: int) -> str:
    rows = len(json.loads((folder / "lengths.json").read_text()))
    return f"""
algorithm.name = "grpo_step:Forced"
algorithm.lengths = "{folder}/lengths.json"
algorithm.prompts_per_step = {rows // GROUP}
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
    import torch

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
            limited = prompts.with_columns(max_tokens=torch.tensor(self._lengths))
            return self._ctx.actor.generate(limited, sampling=sampling)

        def logprobs(self, batch):
            return self._ctx.actor.logprobs(batch)

        def update(self, pairs):
            return self._ctx.actor.update(pairs)

    class Forced(GRPO):
        Config = ForcedConfig

        def step(self, ctx):
            lengths = Path(self.config.lengths)
            super().step(Lengthened(ctx, json.loads(lengths.read_text())))
            stamp(lengths.with_name(PROCESSOR))

    return Forced


def run(folder: Path, text: str, mode: str, overrides: tuple[str, ...] = ()) -> list[Timing]:
    """The steps of a run of this config in a process of its own, behind the warm-up."""
    path = folder / "ours.toml"
    path.write_text(text)
    (folder / PROCESSOR).unlink(missing_ok=True)
    environment = {**os.environ, **MODES[mode], "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", str(path), "--overwrite"]
    done = subprocess.run(
        [*command, *overrides], env=environment, capture_output=True, text=True, cwd=HERE
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    log = (folder / "runs/ours/metrics.jsonl").read_text()
    walls = [json.loads(line)["seconds/step"] for line in log.splitlines()][WARM:]

    # A run goes through the step once before it starts, so there may be more stamps than steps.
    stamps = np.array([float(line) for line in (folder / PROCESSOR).read_text().splitlines()])
    return list(zip(walls, np.diff(stamps)[-len(walls) :].tolist(), strict=True))


def ours(folder: Path, steps: int, mode: str, ranks: int = 1) -> list[Timing]:
    overrides = ("runtime.threads=1",) if ranks > 1 else ()
    return run(folder, config(folder, steps, ranks), mode, overrides)


def trl(folder: Path, steps: int, mode: str) -> list[Timing]:
    return timings(peer("trl_grpo.py", [folder / "model", folder / "lengths.json", steps], mode))


def peer(script: str, options: list, mode: str) -> dict:
    """What a script says that runs one of TRL's trainers in TRL's own environment."""
    environment = {
        **os.environ,
        **MODES[mode],
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [HERE.parent / ".bench/trl/bin/python", HERE / "peers" / script, *options]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def timings(found: dict) -> list[Timing]:
    """The steps that a peer tells, behind the warm-up."""
    return list(zip(found["seconds"], found["processor"], strict=True))[WARM:]


def compare(
    model: str, case: str, folder: Path, lengths: list[int], rounds: int, steps: int
) -> bool:
    (folder / "lengths.json").write_text(json.dumps(lengths))
    choices = {mode: (lambda n, mode=mode: ours(folder, n, mode)) for mode in MODES}
    choices["2 ranks"] = lambda n: ours(folder, n, "1 thread", ranks=2)
    peers = {mode: (lambda n, mode=mode: trl(folder, n, mode)) for mode in MODES}
    found = race(choices, peers, rounds, steps, WARM + 8)
    what = f"{model}, {case} (mean {sum(lengths) / len(lengths):.1f} tokens)"
    wall, cpu = found.medians(1)
    emit(f"grpo step of TRL, {what}, {found.theirs}", wall, "s", cpu=cpu)
    wall, cpu = found.medians(0)
    return emit(
        f"grpo step of hybridflow, {what}, {found.ours}", wall, "s", cpu=cpu,
        ratio=statistics.median(found.ratios), against="TRL", spread=found.ratios,
        bar=BARS[case] if model == "0.8M" else None, aim=AIMS[case],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--case", choices=list(BARS))
    parser.add_argument("--model", choices=list(MODELS), default="0.8M")
    arguments = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields, rows = MODELS[arguments.model]
        make_model(folder / "model", fields)
        for case, lengths in draws(rows).items():
            if arguments.case in (None, case):
                good &= compare(
                    arguments.model, case, folder, lengths, arguments.rounds, arguments.steps
                )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
