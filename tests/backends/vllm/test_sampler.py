"""vLLM's sampler with our meaning: logprobs of the tempered model, numbers that follow from seed and position."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from hybridflow.backends.vllm.sampler import SeededSampler, seed_at

VOCAB = 11
LOGITS = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


class Batch:
    """What vLLM's runner keeps: requests by name, the tokens that they have, and their places in the batch."""

    def __init__(self, **tokens: list[int]):
        self.sampler = Sampler()
        self.input_batch = SimpleNamespace(req_ids=list(tokens))
        self.requests = {
            name: SimpleNamespace(output_token_ids=ids) for name, ids in tokens.items()
        }


def drawn(batch: Batch, origins, logits=LOGITS, temperature=1.0):
    """(tokens, logprobs of these tokens) of one call."""
    sampler = SeededSampler(batch)
    sampler.origins.update(origins)
    rows = len(batch.requests)
    none = torch.zeros(rows)
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), temperature), all_greedy=False, all_random=True, top_p=None, top_k=None,
        generators={row: torch.Generator() for row in range(rows)}, max_num_logprobs=0, no_penalties=True,
        prompt_token_ids=None, frequency_penalties=none, presence_penalties=none, repetition_penalties=none + 1,
        output_token_ids=[[] for _ in range(rows)], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    with torch.no_grad():
        out = sampler(logits[:rows].clone(), metadata)
    return out.sampled_token_ids[:, 0].tolist(), out.logprobs_tensors.logprobs[:, 0]


def test_logprobs_are_those_of_the_logits_over_the_temperature():
    tokens, logprobs = drawn(Batch(a=[], b=[]), {"a": (1, 0), "b": (2, 0)}, temperature=0.5)
    want = (LOGITS[:2] / 0.5).log_softmax(-1)[[0, 1], tokens]
    torch.testing.assert_close(logprobs, want)


def test_a_token_depends_on_seed_and_position_and_on_no_neighbour():
    alone, _ = drawn(Batch(b=[]), {"b": (7, 3)}, LOGITS[1:2])
    beside, _ = drawn(Batch(a=[], b=[]), {"a": (5, 0), "b": (7, 3)})
    assert beside[1] == alone[0]
    # three tokens that it came with, or two and one that vLLM has drawn since: the same place
    cut, _ = drawn(Batch(b=[4]), {"b": (7, 2)}, LOGITS[1:2])
    assert cut == alone


def test_positions_and_seeds_draw_different_tokens():
    by_position = [drawn(Batch(a=[0] * at), {"a": (3, 0)})[0][0] for at in range(40)]
    by_seed = [drawn(Batch(a=[]), {"a": (seed, 0)})[0][0] for seed in range(40)]
    assert len(set(by_position)) > 1 and len(set(by_seed)) > 1


def test_draws_have_the_frequencies_of_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    tokens = [drawn(Batch(a=[]), {"a": (seed, 0)}, logits)[0][0] for seed in range(2000)]
    found = torch.bincount(torch.tensor(tokens), minlength=3) / 2000
    assert (
        found - logits[0].softmax(-1)
    ).abs().max() < 0.04  # three standard deviations and a half


def test_a_request_that_is_not_ours_passes_and_greedy_ones_keep_their_logits():
    sampler = SeededSampler(Batch(warmup=[]))
    drawn(Batch(warmup=[]), {})
    torch.testing.assert_close(sampler.compute_logprobs(LOGITS), LOGITS.log_softmax(-1))
    sampler.temperature = torch.tensor([0.0, 2.0, 0.0, 1.0])
    want = (LOGITS / torch.tensor([1.0, 2.0, 1.0, 1.0])[:, None]).log_softmax(-1)
    torch.testing.assert_close(sampler.compute_logprobs(LOGITS), want)


def test_seeds_of_positions_are_63_bits_and_all_different():
    seeds = [seed_at(seed, position) for seed in range(30) for position in range(30)]
    assert len(set(seeds)) == 900 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # they use the bits
    assert seed_at(1, 23) != seed_at(12, 3)
