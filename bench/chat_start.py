"""Processor seconds until `hybridflow chat` has answered a line, beyond importing torch and transformers.

python bench/chat_start.py [--rounds 5]

The model is the demo's (0.8M parameters, random weights). One JSON line per figure; exits 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from common import emit  # noqa: E402
from grpo_step import MODELS, make_model  # noqa: E402

BAR_S = 6.0
IMPORTS = (
    "import torch, transformers; transformers.AutoModelForCausalLM, transformers.AutoTokenizer"
)


def processor_seconds(command: list[str], text: str = "") -> tuple[float, str]:
    """What a process took of the processors, with all that it started, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        make_model(folder, MODELS["0.8M"][0])
        chat = [
            sys.executable,
            "-m",
            "hybridflow.cli.main",
            "chat",
            str(folder),
            "sampling.max_tokens=8",
        ]
        imports, answers = [], []
        for _ in range(rounds):
            imports.append(processor_seconds([sys.executable, "-c", IMPORTS])[0])
            seconds, said = processor_seconds(chat, "1+1=\n")
            assert said.strip(), "no answer"
            answers.append(seconds)

    emit("importing torch and transformers", statistics.median(imports), "s")
    beyond = [answer - own for answer, own in zip(answers, imports, strict=True)]
    met = emit(
        "chat until its first answer, beyond that",
        statistics.median(beyond),
        "s",
        bar=BAR_S,
        at_most=True,
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
