"""What the tests of workers share."""

from __future__ import annotations

import pytest
from helpers.episodes import speaking


@pytest.fixture(scope="module")
def speaker():
    """An engine and its context; see `speaking`."""
    with speaking() as found:
        yield found
