"""Which column the verb of a role makes."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.role import Role


@pytest.mark.parametrize(
    "role, column",
    [
        (Role("actor", trained=True), "old_logprobs"),
        (Role("ref"), "ref_logprobs"),
        (Role("teacher"), "teacher_logprobs"),
        (Role("critic", "value", trained=True), "values"),
        (Role("cost_critic", "value", trained=True), "cost_values"),
        (Role("reward", "reward"), "scores"),
        (Role("cost", "reward"), "costs"),
        (Role("model", "score", trained=True), "scores"),
        (Role("ref", writes="before"), "before"),
    ],
    ids=lambda value: value.name if isinstance(value, Role) else value,
)
def test_a_role_writes_the_column_of_its_kind_and_name(role, column):
    assert role.column == column


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'kind' must be in"):
        Role("actor", "polcy")
