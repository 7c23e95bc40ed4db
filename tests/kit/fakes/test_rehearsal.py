from __future__ import annotations

from helpers import fake_jobs
from helpers.ranks import fresh


def test_the_phases_of_a_role_with_their_bytes():
    found = fresh(fake_jobs.rehearsal, fake_jobs.reference_folder())
    record = found["record"]
    assert found["on"] == {"fakegpu"}

    # qwen2 with hidden size 32: embedding 32 x 32, norms of 32, per layer q 32x32+32, k and v 16x32+16 each,
    # o 32x32, gate, up and down 48x32 each, two norms. Tied.
    layer = (32 * 32 + 32) + 2 * (16 * 32 + 16) + 32 * 32 + 3 * 48 * 32 + 64
    assert record.parameters == 32 * 32 + 32 + 2 * layer
    assert record.held == record.parameters / 2  # every dimension is even

    # Weights are float32 masters, with two moments each after the update, and a count of steps per parameter.
    phases = record.phases
    buffers = phases["build"].after - 4 * record.held
    assert 0 <= buffers < 200
    state = phases["away"].before
    assert 12 * record.held <= state - buffers < 12 * record.held + 500
    assert phases["away"].after < 1000  # rows of the forward pass
    assert state - 1000 <= phases["away"].left <= state
    assert phases["back"].arrived == phases["away"].left and phases["back"].after == state
    assert phases["forward"].left == 0 and phases["forward"].arrived < 1000  # indices of tokens
    # A step writes gradients away: they were as large as the shards.
    assert phases["update"].after - phases["update: step"].after < 4 * record.held + 500
    # A checkpoint has weights and moments, and no counts.
    assert abs(phases["disk: save"].left - 12 * record.held) < 500
    assert abs(phases["disk: load"].arrived - 12 * record.held) < 500
