import numpy as np
import torch

from hybridflow.backends.transformers.sampler import Sampler, uniforms

ROW = np.dtype([("seed", np.int64), ("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64)])


def rows(*entries):
    return np.array(list(entries), ROW)


def draw_many(logits, count, temperature=1.0, top_p=1.0, top_k=0):
    """`count` tokens for one distribution, each with its own seed."""
    sampler = Sampler(rows(*[(i, temperature, top_p, top_k) for i in range(count)]), torch.device("cpu"))
    uniform = sampler.uniforms(np.zeros(count, np.int64), 1)
    tokens, logprobs = sampler(logits.expand(count, -1), None if uniform is None else uniform[0])
    return tokens.numpy(), logprobs.numpy()


def chi_square(tokens, probs):
    expected = probs * len(tokens)
    return float(((np.bincount(tokens, minlength=len(probs)) - expected) ** 2 / expected).sum())


def test_uniform_numbers_are_even_over_seeds_and_over_positions():
    for seeds, positions in (
        (torch.arange(40000), torch.zeros(1, dtype=torch.int64)),
        (torch.tensor([7]), torch.arange(40000)),
    ):
        values = uniforms(seeds, positions)
        assert values.dtype == torch.float32 and float(values.min()) >= 0 and float(values.max()) < 1
        counts = np.bincount((values * 50).long().numpy(), minlength=50)
        assert ((counts - 800) ** 2 / 800).sum() < 110  # 49 degrees of freedom: mean 49, deviation 10


def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_uncorrelated():
    values = uniforms(torch.arange(300)[:, None], torch.arange(300)).numpy()
    for a, b in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values[1:, :-1], values[:-1, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_uniform_numbers_are_those_of_splitmix64_in_plain_integers():
    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    golden, pairs = 0x9E3779B97F4A7C15, [(0, 0), (1, 5), (-1, 123456), (2**62, 3)]
    expected = [(mix((mix((seed + golden) % 2**64) + t * golden) % 2**64) >> 40) / 2**24 for seed, t in pairs]
    seeds, positions = torch.tensor(pairs).unbind(1)
    assert uniforms(seeds, positions).tolist() == expected


def test_tokens_follow_the_softmax():
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)) * 2
    for temperature in (1.0, 0.6, 1.7):
        tokens, logprobs = draw_many(logits, 20000, temperature)
        expected = (logits / temperature).log_softmax(-1)[0].numpy()
        assert chi_square(tokens, np.exp(expected)) < 31 + 5 * np.sqrt(2 * 31)
        np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-6)


def test_top_k_and_top_p_keep_their_support_and_its_proportions():
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) * 2
    probs = logits.softmax(-1)[0].numpy()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    top_k, top_p = set(order[:5]), set(order[before < 0.8])
    both_p = probs[order[:5]] / probs[order[:5]].sum()
    both = set(order[:5][np.cumsum(both_p) - both_p < 0.8])
    for options, support in (({"top_k": 5}, top_k), ({"top_p": 0.8}, top_p), ({"top_k": 5, "top_p": 0.8}, both)):
        tokens, logprobs = draw_many(logits, 8000, **options)
        assert set(tokens) == support, options
        kept = sorted(support)
        share = probs[kept] / probs[kept].sum()
        assert chi_square(np.searchsorted(kept, tokens), share) < len(kept) + 5 * np.sqrt(2 * len(kept))
        np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=1e-5)  # before top-k and top-p


def test_a_tiny_top_p_and_a_top_k_of_one_are_greedy():
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    for options in ({"top_p": 1e-6}, {"top_k": 1}):
        assert set(draw_many(logits, 200, **options)[0]) == {int(logits.argmax())}


def test_a_row_draws_the_same_token_alone_and_among_rows_of_every_kind():
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    mixed = rows((1, 1, 1, 0), (2, 0, 1, 0), (3, 0.7, 0.9, 0), (4, 1.3, 1, 4), (5, 1, 0.5, 7), (6, 2, 1, 0))

    def draw(which):
        sampler = Sampler(mixed[which], torch.device("cpu"))
        uniform = sampler.uniforms(np.array([3, 1, 4, 1, 5, 9])[which], 1)
        return sampler(logits[which], None if uniform is None else uniform[0])

    tokens, logprobs = draw([0, 1, 2, 3, 4, 5])
    for i in range(6):
        token, logprob = draw([i])
        assert token[0] == tokens[i] and torch.allclose(logprob[0], logprobs[i], atol=1e-6)
    assert tokens[1] == logits[1].argmax()
    assert torch.allclose(logprobs[1], logits[1].log_softmax(-1).max())


def test_numbers_made_ahead_are_those_of_single_steps():
    sampler = Sampler(rows((5, 1, 1, 0), (6, 1, 1, 0)), torch.device("cpu"))
    lengths = np.array([0, 10])
    single = torch.cat([sampler.uniforms(lengths + i, 1) for i in range(20)])
    assert torch.equal(single, uniforms(torch.tensor([5, 6]), torch.arange(20)[:, None] + torch.tensor([0, 10])))


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((1, 16), float("-inf"))
    logits[0, [3, 9]] = 0.0
    assert set(draw_many(logits, 500)[0]) == {3, 9}
