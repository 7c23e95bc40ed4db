"""Rows that are open in a worker: taken by their samples, and kept in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from helpers.counting import counting

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.workers.opens_rows import OpensRows

ROWS = Batch(
    {"prompt_ids": tokens([[10], [20], [30]]), "sample_id": torch.tensor([4, 5, 9]), "max_tokens": torch.tensor([1, 3, 5])}
)  # fmt: skip
SAMPLING = SamplingParams(max_tokens=40)


def worker() -> OpensRows:
    made = OpensRows(RankContext("x", 0, ParallelLayout(), torch.device("cpu")))
    made.sends = frozenset()
    return made


def test_open_rows_go_on_in_another_worker_with_what_was_made():
    first, engine = worker(), counting()
    first.open(ROWS, SAMPLING, 3)
    assert first.carried.advance(engine, 2)
    first.carried.stop(engine)
    kept = first.unfinished()
    assert kept["sample_id"].values.tolist() == [4, 5, 9]
    assert [row.tolist() for row in kept["response_ids"]] == [[11], [21, 22], [31, 32]]
    assert list(kept["finish_reason"].values) == ["length", "abort", "abort"]

    second = worker()
    second.carry_on(kept)
    second.open(ROWS, SAMPLING, 3)
    made = second.carried.collect(counting(step=2.0), [4, 5, 9])
    assert [one.response_ids.tolist() for one in made] == [[11], [21, 22, 24], [31, 32, 34, 36, 38]]
    assert second.unfinished().rows == 0


def test_a_checkpoints_rows_of_other_prompts_are_refused():
    first, second = worker(), worker()
    first.open(ROWS, SAMPLING, 3)
    second.carry_on(first.unfinished())
    with pytest.raises(HybridFlowError, match="sample 5 goes on from a checkpoint"):
        second.open(ROWS.with_columns(prompt_ids=tokens([[10], [21], [30]])), SAMPLING, 3)
