"""What the tests of workers share."""

from __future__ import annotations

import pytest

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.kit.testing import give_weights, one_rank, reference


@pytest.fixture(scope="module")
def speaker():
    """An engine with the weights of `reference` as version 5, and its context."""
    with one_rank() as context:
        engine = TransformersEngine(reference().spec, TransformersEngineConfig(), context)
        engine.start()
        give_weights(engine, reference().parameters, 5)
        yield engine, context
