"""Settings of adapters."""

from __future__ import annotations

import pytest

from hybridflow.kit.huggingface.config import LoRAConfig


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("alpha", 0.0), ("alpha", -1.0)])
def test_a_rank_and_a_scale_must_be_positive(field, value):
    with pytest.raises(ValueError, match=field):
        LoRAConfig(**{field: value})
