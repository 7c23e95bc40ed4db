"""A sampler for vLLM with hybridflow's definition of logprobs and seeds."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

GREEDY_BELOW = 1e-5
"""vLLM treats temperatures below this one as greedy sampling."""


class SeededSampler(Sampler):
    """Logprobs are log softmax(logits / temperature), before biases and filters.

    vLLM's own are either without the temperature or after the filters. The sampling itself is left
    to vLLM. Random numbers depend only on a request's seed and the position of the token. No state
    of a generator is kept, so a response may be interrupted and continued.
    """

    def __init__(self, runner: Any):
        """`runner`: vLLM's model runner, whose own sampler this one replaces."""
        super().__init__("raw_logprobs")
        self.topk_topp_sampler = runner.sampler.topk_topp_sampler
        self.runner = runner
        self.origins: dict[str, tuple[int, int]] = {}
        """vLLM's name of a request -> (seed, length in tokens of the prefix it came with)."""
        self.temperature: torch.Tensor | None = None
        """Temperatures [R] while `forward` runs; None otherwise, and where all rows are greedy."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Seed the generator of each row for its next token, then sample as vLLM does."""
        # Greedy rows have no generator.
        for row, generator in sampling_metadata.generators.items():
            name = self.runner.input_batch.req_ids[row]
            origin = self.origins.get(name)
            if origin is not None:  # vLLM's own warm-up has requests too
                seed, prefix_length = origin
                position = prefix_length + len(self.runner.requests[name].output_token_ids)
                generator.manual_seed(seed_at(seed, position))

        self.temperature = sampling_metadata.temperature  # None: all are greedy
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self.temperature = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logprobs, float32 [R, V], at the temperatures; at 1 for greedy rows.

        vLLM's `forward` calls it with the model's logits [R, V], before it changes them.
        """
        if self.temperature is not None:
            is_random = self.temperature >= GREEDY_BELOW
            logits = logits.float() / torch.where(is_random, self.temperature, 1.0)[:, None]
        return logits.log_softmax(-1, dtype=torch.float32)


def seed_at(seed: int, position: int) -> int:
    """Return the generator's seed for one token, of 63 bits: a hash of `seed` and `position`."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
