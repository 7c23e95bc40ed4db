"""What a model's config says of itself."""

from __future__ import annotations

import pytest

from hybridflow.core.values.model import ModelSpec


def test_sizes_are_those_of_the_config():
    spec = ModelSpec({"vocab_size": "50", "max_position_embeddings": 64}, None, 0)
    assert (spec.vocab_size, spec.max_positions) == (50, 64)


def test_a_config_may_leave_the_positions_open_but_not_the_vocabulary():
    spec = ModelSpec({"model_type": "rwkv"}, "somewhere", 0)
    assert spec.max_positions is None
    with pytest.raises(KeyError, match="vocab_size"):
        _ = spec.vocab_size
