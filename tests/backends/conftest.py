"""What the tests of several backends share."""

from __future__ import annotations

import pytest

from hybridflow.kit.testing import one_rank


@pytest.fixture(scope="module")
def alone():
    """The context of a single rank, for a whole module: libraries keep the process groups that they have once seen."""
    with one_rank() as context:
        yield context
