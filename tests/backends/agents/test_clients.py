"""Three agents by clients of others, as they are, with the embedded engine; with the other engines in tests/engines."""

from __future__ import annotations

from helpers.clients import three_agents
from helpers.programs import run


def test_agents_of_three_clients_are_trained_on_what_was_sampled(tmp_path):
    turns, sequences = three_agents(tmp_path, {})
    # Four turns in two sequences, six in three, and three in two; each kind is there.
    assert turns > 90 and sequences > 60


def test_clients_in_a_sandbox_are_trained_on_what_was_sampled(tmp_path):
    run("pass")
    turns, sequences = three_agents(tmp_path, {}, function="plays_in_a_sandbox", rows=4)
    assert (turns, sequences) == (20, 12)
