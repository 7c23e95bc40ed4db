"""Tiny engines of both decoders, and the request that most of their tests make."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.contracts.rollout import Completion, Request, SamplingParams

KINDS = ["qwen2", "gpt2"]
"""Our decoder and Hugging Face's code make the same promises."""
PROMPT = np.array([3, 1, 4, 1, 5])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)

both = pytest.mark.parametrize("case", KINDS, indirect=True)
fast_only = pytest.mark.parametrize("case", ["qwen2"], indirect=True)


def greedy(case) -> Completion:
    return case.engine.generate([Request(0, PROMPT, GREEDY)])[0]
