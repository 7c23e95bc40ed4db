"""A debate of two roles with one model: see debate.toml."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.backends.data.arithmetic import ArithmeticSource

DIGITS = 3
"""Of each answer."""


async def argue(model, row) -> float:
    """A answers a sum; B, who sees that, gives an answer of its own; A, who sees that, has the last word, which is paid."""
    asked = row["prompt"]
    said = [{"role": "user", "content": f"A{asked}"}]
    first = await model.chat(said, max_tokens=DIGITS)
    other = await model.chat(
        [{"role": "user", "content": f"B{asked}{first.content}="}], max_tokens=DIGITS
    )
    said += [first.message, {"role": "user", "content": f"|{other.content}="}]
    last = await model.chat(said, max_tokens=DIGITS)
    return float(last.content == row["answer"])


class Turns(ArithmeticSource):
    """Worked turns of both roles, for the warm-up: what was said before them is right in half of the cases."""

    def __len__(self) -> int:
        return 3 * super().__len__()

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = super().__getitem__(i // 3)
        draws = np.random.default_rng(i)
        first, other = (self.said(row["answer"], draws) for _ in range(2))
        asked = row["prompt"]
        turns = (f"A{asked}", f"B{asked}{first}=", f"A{asked}{first}|{other}=")
        return {**row, "prompt": turns[i % 3]}

    @staticmethod
    def said(answer: str, draws: np.random.Generator) -> str:
        """An answer, or one with another last digit."""
        if draws.random() < 0.5:
            return answer
        return f"{answer[:-1]}{(int(answer[-1]) + draws.integers(1, 10)) % 10}"
