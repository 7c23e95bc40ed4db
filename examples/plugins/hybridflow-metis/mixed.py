"""Problems of which a third teaches something, and a warm-up that teaches to judge by what is shown.

The sums of two-digit numbers are learnt; those of one-digit numbers are soon mastered; the products have answers that
follow no rule. All look different, so a policy that knows what it was rewarded for can tell which to practise.
"""

from __future__ import annotations

import random

from hybridflow.core.contracts.data_source import DataConfig, DataSource

KINDS = ("mastered", "learnt", "hopeless")


def problem(kind: str, draws: random.Random) -> dict[str, str]:
    """{"kind", "prompt", "answer"}, all prompts and answers of one length."""
    most = 9 if kind == "mastered" else 99
    a, b = draws.randint(0, most), draws.randint(0, most)
    if kind == "hopeless":
        answer = random.Random(1000 * a + b).randint(0, 198)
        return {"kind": kind, "prompt": f"{a:02d}*{b:02d}=", "answer": f"{answer:03d}"}
    return {"kind": kind, "prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def question(draws: random.Random) -> dict[str, str]:
    """A judgement: the variance last shown with a problem of this kind, else 0.12.

    The variances shown are random, so that none is learnt for a kind.
    """
    variance = {kind: draws.randint(0, 25) / 100 for kind in KINDS}
    shown = draws.choices(KINDS, k=draws.randint(0, 3))
    asked = draws.choice(KINDS)
    examples = [f"{problem(kind, draws)['prompt']}{variance[kind]:.2f}?" for kind in shown]
    said = variance[asked] if asked in shown else 0.12
    prompt = "".join(examples) + problem(asked, draws)["prompt"] + "?"
    return {"kind": "question", "prompt": prompt, "answer": f"{said:.2f}"}


class Mixed(DataSource):
    """rows: how many; kinds: those that are drawn, with "question"; seed: of the draws."""

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(rows=6000, kinds=list(KINDS), seed=0)
        draws = random.Random(options["seed"])
        kinds = draws.choices(options["kinds"], k=options["rows"])
        self.rows = [question(draws) if k == "question" else problem(k, draws) for k in kinds]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, str]:
        return self.rows[i]
