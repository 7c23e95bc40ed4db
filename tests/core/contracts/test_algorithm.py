"""What an algorithm says of itself where its author wrote roles and a step alone."""

from __future__ import annotations

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams


class Shortest(Algorithm):
    @attrs.frozen
    class Config:
        rows: int = 6

    def roles(self):
        return (Role("actor", trained=True),)

    def step(self, ctx):
        ctx.log(rows=self.config.rows)


class Counted(Shortest):
    @property
    def rows_per_step(self):
        return self.config.rows


def test_roles_and_a_step_are_enough():
    algorithm = Shortest(Shortest.Config())
    assert algorithm.config.rows == 6
    assert algorithm.problems(SamplingParams()) == []
    assert dict(algorithm.losses()) == dict(algorithm.data_sets) == {}
    assert (algorithm.rows_per_step, algorithm.rows_per_update, algorithm.updates_per_step()) == (
        None,
        None,
        None,
    )


def test_an_update_is_of_all_rows_of_a_step_unless_it_says_otherwise():
    assert Counted(Shortest.Config(rows=8)).rows_per_update == 8


def test_what_keeps_nothing_resumes_from_nothing():
    algorithm = Shortest(Shortest.Config())
    assert algorithm.state_dict() == {}
    algorithm.load_state_dict({})
    assert algorithm.state_dict() == {}
