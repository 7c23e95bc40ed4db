"""vLLM's sampler with our meaning of logprobs and of seeds."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

GREEDY_BELOW = 1e-5
"""vLLM takes smaller temperatures for greedy."""


class SeededSampler(Sampler):
    """Logprobs are log softmax(logits / temperature) before biases and filters, where vLLM gives them either without the
    temperature or after the filters; what is drawn is left to vLLM. Random numbers follow from a request's seed and the
    position alone: no generator's state is kept, so that a response may be cut and gone on with.
    """

    def __init__(self, runner: Any):
        super().__init__("raw_logprobs")
        self.topk_topp_sampler = runner.sampler.topk_topp_sampler
        self.runner = runner
        self.origins: dict[str, tuple[int, int]] = {}
        """Request -> (seed, response tokens that it came with)."""
        self.temperature: torch.Tensor | None = None
        """[R], while `forward` runs."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for row, generator in sampling_metadata.generators.items():
            name = self.runner.input_batch.req_ids[row]
            origin = self.origins.get(name)
            if origin is not None:  # vLLM's own warm-up has requests too
                seed, before = origin
                generator.manual_seed(
                    seed_at(seed, before + len(self.runner.requests[name].output_token_ids))
                )
        self.temperature = sampling_metadata.temperature  # None: all are greedy
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self.temperature = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """`forward` calls it with the model's logits [R, V], before it works on them."""
        if self.temperature is not None:
            random = self.temperature >= GREEDY_BELOW
            logits = logits.float() / torch.where(random, self.temperature, 1.0)[:, None]
        return logits.log_softmax(-1, dtype=torch.float32)


def seed_at(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
