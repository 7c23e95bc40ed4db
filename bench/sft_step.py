"""Supervised fine-tuning beside TRL's SFTTrainer: tokens per second, packed and padded, float32, in one run.

python bench/sft_step.py [--model 20M] [--rounds 5]

Both train on the same rows, long-tailed (mean 32 tokens with the prompt, largest 134), 128 of them a step with 0.8M parameters
and 32 with 20M. Ours are packed; TRL's are padded in one batch, or packed into sequences of 256 or 1024 tokens, several a pass
or one. Each is tried with 1 thread, 2 threads and 2 spinning threads, and the best are then run in turns. TRL says whether a
packed row sees its neighbour. One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from common import MODES, Timing, emit, race, stamp  # noqa: E402
from grpo_step import MODELS, PROCESSOR, WARM, draws, make_model, peer, run, timings  # noqa: E402

PROMPT = 6
PACKED = {
    "256 tokens, 4 a pass": (256, 4),
    "256 tokens, 1 a pass": (256, 1),
    "1024 tokens, 1 a pass": (1024, 1),
}
"""TRL's ways: tokens of a packed sequence, and sequences of a pass."""
BAR = 1.1
"""Times TRL's tokens per second, packed, of the 0.8M model."""


def __getattr__(name: str):
    """`sft_step:Stamped`, made when the run asks for it, so that this file starts without torch."""
    if name != "Stamped":
        raise AttributeError(name)
    import attrs

    from hybridflow.algorithms.sft import SFT, SFTConfig

    @attrs.frozen
    class StampedConfig(SFTConfig):
        """SFT with a file of processor seconds."""

        stamps: str = ""
        """The file, which gets a line after each step."""

    class Stamped(SFT):
        Config = StampedConfig

        def step(self, ctx):
            super().step(ctx)
            stamp(Path(self.config.stamps))

    return Stamped


def config(folder: Path, steps: int, rows: int) -> str:
    return f"""
algorithm.name = "sft_step:Stamped"
algorithm.batch_size = {rows}
algorithm.stamps = "{folder / PROCESSOR}"
runtime = "inline"
run = {{ steps = {steps}, folder = "{folder}/runs", trackers = ["jsonl"] }}
data = {{ source = "jsonl", path = "{folder}/rows.jsonl", prompt = "{{prompt}}", response = "{{response}}" }}
actor = {{ model.path = "{folder}/model", optimizer.lr = 1e-4 }}
"""


def write_rows(folder: Path, lengths: list[int]) -> None:
    """The rows as text for us, whose responses end with eos, and as tokens for TRL."""
    rng = np.random.default_rng(0)
    rows = []
    with (folder / "rows.jsonl").open("w") as file:
        for length in lengths:
            text = "".join(rng.choice(list("0123456789"), PROMPT + length - 1))
            file.write(json.dumps({"prompt": text[:PROMPT], "response": text[PROMPT:]}) + "\n")
            rows.append([*(3 + int(digit) for digit in text), 2])
    (folder / "rows.json").write_text(json.dumps(rows))


def per_token(steps: list[Timing], tokens: list[int]) -> list[Timing]:
    """Seconds of a thousand tokens."""
    return [
        (1e3 * wall / count, 1e3 * cpu / count)
        for (wall, cpu), count in zip(steps, tokens, strict=True)
    ]


def ours(folder: Path, lengths: list[int], steps: int, mode: str) -> list[Timing]:
    taken = run(folder, config(folder, steps, len(lengths)), mode)
    tokens = sum(lengths) + PROMPT * len(lengths)
    return per_token(taken, [tokens] * len(taken))


class Peers:
    """TRL's trainer on the rows of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.isolated = True
        """Whether no packed row has seen its neighbour so far."""

    def run(self, steps: int, mode: str, how: list) -> list[Timing]:
        files = [self.folder / "model", self.folder / "rows.json"]
        found = peer("trl_sft.py", [*files, steps, *how], mode)
        self.isolated &= found["isolated"]
        return per_token(timings(found), found["tokens"][WARM:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--model", choices=list(MODELS), default="0.8M")
    arguments = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields, rows = MODELS[arguments.model]
        make_model(folder / "model", fields)
        lengths = draws(rows)["long-tailed"]
        write_rows(folder, lengths)
        mine = {mode: (lambda n, mode=mode: ours(folder, lengths, n, mode)) for mode in MODES}
        for kind in ("packed", "padded"):
            peers = Peers(folder)
            ways = PACKED if kind == "packed" else {"": ()}
            theirs = {
                f"{mode}, {way}".rstrip(", "): (
                    lambda n, mode=mode, how=how, kind=kind, peers=peers: peers.run(
                        n, mode, [kind, *how]
                    )
                )
                for mode in MODES
                for way, how in ways.items()
            }
            found = race(mine, theirs, arguments.rounds, arguments.steps, WARM + 6)
            apart = "" if peers.isolated else ", rows see their neighbours"
            wall, cpu = found.medians(1)
            what = f"{arguments.model}, long-tailed rows"
            emit(
                f"sft of TRL, {kind}{apart}, {what}, {found.theirs}",
                1e3 / wall, "tokens/s", cpu=cpu,
            )  # fmt: skip
            wall, cpu = found.medians(0)
            good &= emit(
                f"sft of hybridflow, packed, {what}, {found.ours}", 1e3 / wall, "tokens/s", cpu=cpu,
                ratio=statistics.median(found.ratios), against=f"TRL, {kind}", spread=found.ratios,
                bar=BAR if kind == "packed" and arguments.model == "0.8M" else None,
            )  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
