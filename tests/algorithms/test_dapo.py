"""DAPO: which groups are trained on, and how many are drawn."""

from __future__ import annotations

import attrs
import torch
from helpers.jobs import job, problem
from helpers.steps import Watched, close, column

from hybridflow.algorithms.dapo import DAPO, DAPOConfig
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.kit.testing import TinyRun

CONFIG = DAPOConfig(prompts_per_step=4, group_size=3)


class Kept(Watched, DAPO):
    pass


def rare(sample: RewardSample) -> float:
    """1 for the few responses that begin with token 5: most groups are all 0."""
    return float(len(sample.response_ids) > 0 and sample.response_ids[0] == 5)


def never(sample: RewardSample) -> float:
    return 0.0


def reward(name: str) -> dict:
    return {"reward": {"function": f"tests.algorithms.test_dapo:{name}"}}


def test_f12_a_punishment_beyond_the_longest_response_is_refused():
    settings = ("algorithm.name=dapo", "algorithm.overlong_cache=9")
    said = problem(*settings, "sampling.max_tokens=8")
    assert said.startswith("algorithm: overlong_cache 9 is more than the 8 tokens of a response")
    assert job(*settings, "sampling.max_tokens=9").algorithm.config.overlong_cache == 9


def test_dapo_punishes_what_is_too_long():
    algorithm = DAPO(DAPOConfig(scale="none", overlong_cache=2))
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    found = algorithm.advantages(torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), mask, limit=3)
    # lengths 1 and 3 of a limit of 3 with a cache of 2: 0 and (1 - 3) / 2; scores 1 and 0, centred
    close(found["advantages"], [[0.5, 0.0, 0.0], [-0.5, -0.5, -0.5]])


def test_prompts_are_drawn_until_the_batch_is_full_of_groups_that_differ():
    draws = []
    with TinyRun(Kept(attrs.evolve(CONFIG, max_draws=40)), reward("rare")) as run:
        for _ in range(3):
            metrics = run.step()
            draws.append(metrics["draws"])
            scores = column(run.algorithm.batch, "scores").view(-1, 3)
            groups = column(run.algorithm.batch, "group").view(-1, 3)
            assert metrics["filled"] == 1.0 and 0 < metrics["kept"] <= 1
            assert run.algorithm.batch.rows == 12 and (scores.amax(1) > scores.amin(1)).all()
            assert (groups == groups[:, :1]).all() and len(groups[:, 0].unique()) == 4
    assert max(draws) > 1, "the test needs a step that draws again"


def test_a_step_whose_draws_are_used_up_trains_on_what_it_has():
    with TinyRun(Kept(attrs.evolve(CONFIG, max_draws=1)), reward("rare")) as run:
        found = [run.step() for _ in range(4)]
    assert all(m["draws"] == 1 for m in found)
    assert any(0 < m["filled"] < 1 for m in found)


def test_without_any_group_to_learn_from_the_weights_stay():
    with TinyRun(Kept(attrs.evolve(CONFIG, max_draws=2)), reward("never")) as run:
        before = run.checksums()
        metrics = run.step()
        assert run.checksums() == before
    assert metrics["filled"] == 0.0 and metrics["draws"] == 2.0


def test_the_punishment_of_length_does_not_make_groups_unequal():
    config = attrs.evolve(CONFIG, max_draws=1, overlong_cache=3)
    with TinyRun(Kept(config), reward("never")) as run:
        assert run.step()["filled"] == 0.0
