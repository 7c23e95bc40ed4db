"""What a backend and an engine state of themselves: counts are whole numbers of at least 1."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.footprint import EngineLimits, Execution


@pytest.mark.parametrize("name", ["weight_bytes", "compute_bytes", "logits_at_once"])
def test_an_execution_needs_at_least_one_of_what_it_counts(name):
    with pytest.raises(ValueError, match=name):
        Execution(**{name: 0})
    assert getattr(Execution(**{name: 1}), name) == 1


def test_an_engine_decodes_at_least_one_sequence():
    with pytest.raises(ValueError, match="max_sequences"):
        EngineLimits(max_sequences=0)
