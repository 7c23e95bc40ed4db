"""GSM8K's solutions of four models, right and wrong, as demonstrations and as pairs: see rlhf.toml and safe_rlhf.toml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import DataError

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
ANNOTATION = re.compile(r"<<.*?>>")


class Solutions(DataSource):
    """Rows of `data.path` (example_model_solutions.jsonl): {"prompt", "answer", "right", "wrong", "shorter", "longer", ...}.

    Options: `pairs`: "correct" (a right over a wrong solution) or "short" (a shorter over a longer one; `shorter_long` and
    `longer_long` say whether they exceed `limit` characters), or "none": one row per right solution. `split`: "train", or
    "held-out": the last tenth of the questions; `longest`: characters that a solution may have, others are left out.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.options = self.read_options(pairs="correct", split="train", longest=160, limit=80)
        if config.path is None or not Path(config.path).is_file():
            raise DataError(
                f"data.path: there is no file {config.path!r}; give GSM8K's example_model_solutions.jsonl"
            )
        lines = Path(config.path).read_text().splitlines()
        cut = len(lines) * 9 // 10
        kept = lines[cut:] if self.options["split"] == "held-out" else lines[:cut]
        self.rows = [row for line in kept for row in self._rows(json.loads(line))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]

    def _rows(self, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
        base = {"prompt": found["question"].split(".")[-1].split("?")[0].strip()[-60:] + "?\n"}
        texts: dict[bool, list[str]] = {True: [], False: []}
        for model in MODELS:
            text = ANNOTATION.sub("", found[model]["solution"])
            if len(text) <= self.options["longest"] and text not in texts[True] + texts[False]:
                texts[found[model]["is_correct"]].append(text)
        answer = found["ground_truth"].rpartition("A: ")[2]
        if self.options["pairs"] == "none":
            yield from ({**base, "answer": answer, "right": text} for text in texts[True])
        elif self.options["pairs"] == "correct":
            for right in texts[True]:
                yield from (
                    {**base, "answer": answer, "right": right, "wrong": wrong}
                    for wrong in texts[False]
                )
        else:
            every, limit = sorted(texts[True] + texts[False], key=len), self.options["limit"]
            for short, long in pairwise(every):
                if len(short) < len(long):
                    flags = {"shorter_long": len(short) > limit, "longer_long": len(long) > limit}
                    yield {**base, "answer": answer, "shorter": short, "longer": long, **flags}


def form(sample: RewardSample) -> float:
    """Half a point for a last line "A: ...", half for a number in it: what a tiny model can learn of these solutions."""
    last = sample.response.strip().rpartition("\n")[2]
    return 0.5 * last.startswith("A: ") + 0.5 * bool(re.fullmatch(r"A: [\d.,]+", last))
