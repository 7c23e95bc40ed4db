"""A small coding task, as an agent that tests its programs in a sandbox: see coding.toml."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.kit.sandbox.process import Limits
from hybridflow.kit.sandbox.session import Sandbox

TRIES = 2
TESTED = (1, 2, 5, 10)
"""The values of x for which a program is run; the model sees what it returns for the first of them."""
RIGHT = "(x{sign}{n})*{m}"
READINGS = (RIGHT, "x{sign}{n}*{m}", "{m}*x{sign}{n}")
"""How the worked tries of the warm-up read a task: as it is meant, without parentheses, or in the other order."""
MOST = 99
HELD_OUT = 500
PROGRAM = """
import json
def f(x):
    return {0}
print(json.dumps([f(x) for x in {1}]))
"""
LIMITS = Limits(seconds=5.0, memory_mb=100, disk_mb=1, processes=2, output_bytes=1000)


def solve(model, row) -> float:
    """The model writes a program; if a test fails, it sees what the program has returned, and tries again."""
    said = [{"role": "user", "content": row["prompt"]}]
    with Sandbox(limits=LIMITS) as box:
        for _ in range(TRIES):
            reply = model.chat(said, max_tokens=10)
            found = returned(box.python(PROGRAM.format(reply.content, TESTED)).output)
            if found == row["values"]:
                return 1.0
            said += [reply.message, {"role": "user", "content": failure(found, row["values"])}]
    return 0.0


def returned(output: str) -> list[int]:
    """What a program has printed; nothing where it failed, or printed something else."""
    try:
        found = json.loads(output)
    except ValueError:
        return []
    return found if isinstance(found, list) and all(type(one) is int for one in found) else []


def failure(found: list[int], values: list[int]) -> str:
    """What the model hears of a test: a number, where the program returned one that is not too long for it."""
    text = str(found[0]) if found else ""
    return f"|{text if len(text) < 8 else ''} not {values[0]}="


class Functions(DataSource):
    """Rows {"prompt": "add 7 times 23=", "values": [184, 207, 276, 391], "answer": "(x+7)*23"}.

    split: "train" or "held-out".
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(split="train")
        order = np.random.default_rng(0).permutation(2 * MOST * MOST)
        self.chosen = order[HELD_OUT:] if options["split"] == "train" else order[:HELD_OUT]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> dict[str, Any]:
        rest, m = divmod(int(self.chosen[i]), MOST)
        subtracted, n = divmod(rest, MOST)
        n, m = n + 1, m + 1
        values = [(x - n if subtracted else x + n) * m for x in TESTED]
        numbers = {"sign": "-" if subtracted else "+", "n": n, "m": m}
        return {
            "prompt": f"{'sub' if subtracted else 'add'} {n} times {m}=",
            "values": values,
            "numbers": numbers,
            "answer": RIGHT.format(**numbers),
        }


class Tries(Functions):
    """Worked tries, for the warm-up, of all readings alike: a first, and one after a program that was wrong."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = super().__getitem__(i // 2)
        draws = np.random.default_rng(i)
        worked = READINGS[draws.integers(len(READINGS))].format(**row["numbers"])
        if i % 2 == 0:
            return {**row, "answer": worked}
        wrong = READINGS[draws.integers(1, len(READINGS))].format(**row["numbers"])
        found = [eval(wrong, {"x": TESTED[0]})]  # of this file's own
        prompt = f"{row['prompt']}{wrong}{failure(found, row['values'])}"
        return {**row, "prompt": prompt, "answer": worked}
