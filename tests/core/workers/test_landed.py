"""Responses that have left their engine: handed out with their step, and kept until it has ended."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.contracts.rollout import Completion
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.carried import Opened
from hybridflow.core.workers.generation import COLLECTED, rows_of
from hybridflow.core.workers.landed import Landed


def rows(*made: tuple[int, list[int]]) -> Batch:
    """(sample, the version of each token): its tokens count up from ten times its sample."""
    opened = [
        Opened(
            np.array([sample]),
            Completion(
                sample, 10 * sample + np.arange(len(by)), np.full(len(by), -0.5, np.float32),
                np.array(by), "length",
            ),
        )
        for sample, by in made
    ]  # fmt: skip
    return rows_of(opened)


def test_a_step_gets_its_rows_in_its_order_with_their_lags():
    landed = Landed()
    landed.publish({0: 0})
    landed.publish({1: 4})
    assert landed.land(rows((3, [0, 0]), (1, [0, 4, 4]))) == [3, 1]
    assert landed.land(rows((2, [4]))) == [2]
    made = landed.collect([1, 2, 3], 2)
    assert set(made.names) == set(COLLECTED)
    assert [row.tolist() for row in made["response_ids"]] == [[10, 11, 12], [20], [30, 31]]
    assert [row.tolist() for row in made["lag"]] == [[1, 0, 0], [0], [1, 1]]
    metrics = made.metrics.values()
    assert metrics["staleness"] == pytest.approx(3 / 6) and metrics["staleness_max"] == 1
    assert metrics["versions_per_sequence"] == pytest.approx(4 / 3)
    assert metrics["response_length"] == 2 and metrics["clipped"] == 1
    assert landed.collect([], 2).rows == 0


def test_rows_are_kept_until_their_step_has_ended():
    landed = Landed()
    landed.publish({0: 0})
    landed.land(rows((1, [0]), (2, [0]), (3, [0])))
    landed.collect([1], 1)
    landed.collect([2], 2)
    assert landed.rows()["sample_id"].values.tolist() == [1, 2, 3]
    landed.publish({1: 1})
    assert landed.rows()["sample_id"].values.tolist() == [2, 3]
    landed.publish({2: 2})
    kept = landed.rows()
    assert kept["sample_id"].values.tolist() == [3] and kept["finish_reason"].values == ["length"]


def test_a_row_that_has_not_landed_is_refused():
    landed = Landed()
    landed.publish({0: 0})
    landed.land(rows((1, [0])))
    with pytest.raises(HybridFlowError, match="samples 2, 3 are collected and have not landed"):
        landed.collect([1, 2, 3], 1)
