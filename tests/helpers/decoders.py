"""What both decoders are held to: Hugging Face's logits of each whole sequence alone; the request of most tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import Completion, Request, SamplingParams


def logits_of(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Of the token after each sequence, each computed alone: float32 [R, V]."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in sequences])


def check_decoder(decoder: Any, model: Any, steps: int) -> None:
    """Three prompts in six rows; `steps` tokens each; half of the rows leave; three more tokens."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 48, size) for size in (5, 1, 9)]
    decoder.free()
    decoder.reserve(6, 9 + steps + 3)
    logits = decoder.admit(prompts, [1, 3, 2])
    rows = [prompts[i].tolist() for i in (0, 1, 1, 1, 2, 2)]
    close(logits, logits_of(model, rows))

    for _ in range(steps):
        logits = append(decoder, rows, draw)
    close(logits, logits_of(model, rows))

    kept = np.array([4, 1, 3])
    decoder.keep(kept)
    rows = [rows[i] for i in kept]
    assert decoder.longest == 9 + steps
    for _ in range(3):
        logits = append(decoder, rows, draw)
    close(logits, logits_of(model, rows))


def append(decoder: Any, rows: list[list[int]], draw: np.random.Generator) -> torch.Tensor:
    """Another token for every row."""
    tokens = draw.integers(0, 48, len(rows))
    for row, token in zip(rows, tokens.tolist(), strict=True):
        row.append(token)
    return decoder.step(torch.from_numpy(tokens))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


KINDS = ["qwen2", "gpt2"]
"""Our decoder and Hugging Face's code make the same promises."""
PROMPT = np.array([3, 1, 4, 1, 5])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)

both = pytest.mark.parametrize("case", KINDS, indirect=True)


def greedy(case) -> Completion:
    return case.engine.generate([Request(0, PROMPT, GREEDY)])[0]
