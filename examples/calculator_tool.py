"""Products that a small model cannot work out by itself, and the calculator that it can ask: see calculator_tool.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn

CALL = re.compile(r"\[(\d{1,4})\*(\d{1,4})=$")


class Products(DataSource):
    """Rows {"prompt": "37*48?", "answer": "1776", "shown": ...}: products of two-digit numbers.

    `shown`: what warm-up imitates: in a third of the rows a call of the calculator, else a guess of its own (a wrong one).
    Options: `split` ("train", "held-out"), `held_out` (rows).
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(split="train", held_out=500)
        order = np.random.Generator(np.random.Philox(key=7)).permutation(90 * 90)
        cut = options["held_out"]
        self.rows = order[:cut] if options["split"] == "held-out" else order[cut:]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = int(self.rows[i])
        a, b = 10 + row // 90, 10 + row % 90
        call, guess = f"[{a}*{b}={a * b:04d}]{a * b:04d}", f"{(a * b + 1 + row % 7):04d}"
        return {
            "prompt": f"{a}*{b}?",
            "answer": f"{a * b:04d}",
            "shown": call if row % 3 == 0 else guess,
        }


class Calculator(Environment):
    """A turn that ends with `[A*B=` gets the product and `]`; the turn that ends the text is the answer: 1 if it is right."""

    stops = ("=",)

    def __init__(self, digits: int = 4):
        self.digits = digits
        self.meta: Mapping[str, Any] = {}

    def reset(self, start: Start) -> Answer:
        self.meta = start.meta
        return Answer(state=start.prompt)

    def step(self, turn: Turn) -> Answer:
        if turn.ended:
            return Answer(reward=float(turn.text == self.meta["answer"]), done=True)
        call = CALL.search(turn.text)
        said = f"{int(call[1]) * int(call[2]):0{self.digits}d}]" if call else "?]"
        return Answer(said, state=f"{self.meta['prompt']}{turn.text}{said}")
