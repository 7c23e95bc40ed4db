"""Cost models: the loss of order and signs by hand, what they learn in a real run, and the data that they need."""

from __future__ import annotations

import pytest
import torch
from helpers.pair_rows import DATA, UNSAFE, late_over_early, log_sigmoid, values

from hybridflow.algorithms.cost_model import CostLoss, CostModel, CostModelConfig
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import TABLES


def test_the_cost_loss_by_hand():
    batch = {"preferred": torch.tensor([1, 0, 1, 0]), "unsafe": torch.tensor([0, 1, 1, 1])}
    costs = torch.tensor([-1.0, 2.0, 0.5, -0.5])
    found = values(CostLoss()(batch, {"scores": costs}))
    # pair 0: worse 2, safer -1, signs +, -: s(3), s(2), s(1).  pair 1: worse -0.5, safer 0.5, both +: s(-1), s(-0.5), s(0.5)
    first = -log_sigmoid(3.0) - log_sigmoid(2.0) - log_sigmoid(1.0)
    second = -log_sigmoid(-1.0) - log_sigmoid(-0.5) - log_sigmoid(0.5)
    assert found["cost_loss"] == [first, second]
    assert found["accuracy"] == [1.0, 0.0] and found["sign_accuracy"] == [1.0, 0.5]


def test_a_cost_model_learns_the_signs():
    tables = {"data": UNSAFE, "cost": {**TABLES["actor"], "optimizer": {"lr": 1e-2}}}
    with TinyRun(CostModel(CostModelConfig(pairs_per_step=16)), tables) as run:
        metrics = [run.step() for _ in range(24)]
        assert set(run.job.models) == {"cost"}
    assert late_over_early(metrics, "cost/sign_accuracy", 4, 2) > 0.15


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (DATA, ConfigError, r"data\.unsafe: .*name the two fields"),
        ({**UNSAFE, "unsafe": ["x"]}, ConfigError, r"data\.unsafe names two fields"),
        ({**UNSAFE, "unsafe": ["chosen_unsafe", "gone"]}, DataError, "no field 'gone'"),
        ({**UNSAFE, "unsafe": ["chosen_unsafe", "chosen"]}, DataError, "true or false"),
    ],
)
def test_data_without_signs_is_refused(data, error, said):
    with pytest.raises(error, match=said):
        TinyRun(CostModel(CostModelConfig()), {"data": data, "cost": TABLES["actor"]})
