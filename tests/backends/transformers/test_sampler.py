"""Which token a row draws: its distribution, filters and biases, whatever the other rows are."""

from __future__ import annotations

import numpy as np
import torch

from hybridflow.backends.transformers.sampler import TokenSampler, uniforms

ROW = np.dtype(
    [
        ("seed", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
    ]
)
CPU = torch.device("cpu")


def rows(*entries):
    """(seed, temperature, top_p, top_k) or (..., min_p) each."""
    return np.array([(*entry, 0)[:5] for entry in entries], ROW)


def draw_many(logits, count, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, bias=None):
    """`count` tokens for one distribution, each with its own seed."""
    asked = rows(*[(i, temperature, top_p, top_k, min_p) for i in range(count)])
    sampler = TokenSampler(asked, CPU, [tuple(bias.items())] * count if bias else ())
    uniform = sampler.uniforms(np.zeros(count, np.int64), 1)
    tokens, logprobs = sampler(logits.expand(count, -1), None if uniform is None else uniform[0])
    return tokens.numpy(), logprobs.numpy()


def chi_square(tokens, probs):
    expected = probs * len(tokens)
    return float(((np.bincount(tokens, minlength=len(probs)) - expected) ** 2 / expected).sum())


def test_tokens_follow_the_softmax():
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)) * 2
    for temperature in (1.0, 0.6, 1.7):
        tokens, logprobs = draw_many(logits, 20000, temperature)
        expected = (logits / temperature).log_softmax(-1)[0].numpy()
        assert chi_square(tokens, np.exp(expected)) < 31 + 5 * np.sqrt(2 * 31)
        np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-6)


def test_a_row_draws_the_same_token_alone_and_among_rows_of_every_kind():
    logits = torch.randn(10, 32, generator=torch.Generator().manual_seed(4))
    mixed = rows(
        (1, 1, 1, 0), (2, 0, 1, 0), (3, 0.7, 0.9, 0), (4, 1.3, 1, 4), (5, 1, 0.5, 7), (6, 2, 1, 0),
        (7, 1, 1, 0, 0.3), (8, 0.8, 0.9, 0, 0.1), (9, 1, 1, 5, 0.2), (10, 0, 1, 0, 0.5),
    )  # fmt: skip
    biases = [(), (), ((3, 1.0),), (), (), ((2, 3.0), (4, -9.0)), (), ((1, 2.0),), (), ((5, 8.0),)]

    def draw(which):
        sampler = TokenSampler(mixed[which], CPU, [biases[i] for i in which])
        uniform = sampler.uniforms(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])[which], 1)
        return sampler(logits[which], None if uniform is None else uniform[0])

    tokens, logprobs = draw(list(range(10)))
    for i in range(10):
        token, logprob = draw([i])
        assert token[0] == tokens[i] and torch.allclose(logprob[0], logprobs[i], atol=1e-6)
    assert tokens[1] == logits[1].argmax()
    assert torch.allclose(logprobs[1], logits[1].log_softmax(-1).max())


def test_numbers_made_ahead_are_those_of_single_steps():
    sampler = TokenSampler(rows((5, 1, 1, 0), (6, 1, 1, 0)), torch.device("cpu"))
    lengths = np.array([0, 10])
    single = torch.cat([sampler.uniforms(lengths + i, 1) for i in range(20)])
    assert torch.equal(
        single, uniforms(torch.tensor([5, 6]), torch.arange(20)[:, None] + torch.tensor([0, 10]))
    )


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((1, 16), float("-inf"))
    logits[0, [3, 9]] = 0.0
    assert set(draw_many(logits, 500)[0]) == {3, 9}


FOUR = torch.tensor([[0.1, 0.5, 0.15, 0.25]])


def drawn(uniform, bias=None, **sampling):
    """The token that each uniform number draws from the probabilities FOUR, and the logprobs."""
    s = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | sampling
    row = (0, s["temperature"], s["top_p"], s["top_k"], s["min_p"])
    sampler = TokenSampler(
        rows(*[row] * len(uniform)), CPU, [tuple(bias.items())] * len(uniform) if bias else ()
    )
    tokens, logprobs = sampler(FOUR.log().expand(len(uniform), -1), torch.tensor(uniform))
    return tokens.tolist(), logprobs


def test_min_p_keeps_tokens_relative_to_the_most_likely_one():
    # at least 0.4 * 0.5 = 0.2: tokens 1 and 3, with 2/3 and 1/3
    assert drawn([0.0, 0.66, 0.67, 0.99], min_p=0.4)[0] == [1, 1, 3, 3]
    # at least 0.28 * 0.5 = 0.14: tokens 1, 2, 3 of 0.9 in all, in the order of the vocabulary
    assert drawn([0.0, 0.55, 0.56, 0.72, 0.73, 0.99], min_p=0.28)[0] == [1, 1, 2, 2, 3, 3]
    assert drawn([0.0, 0.99], min_p=1.0)[0] == [1, 1]


def test_min_p_is_of_the_distribution_after_the_temperature():
    # sqrt: 0.316, 0.707, 0.387, 0.5; at least 0.6 * 0.707 = 0.424
    assert set(
        drawn(np.linspace(0, 0.999, 50, dtype=np.float32).tolist(), min_p=0.6, temperature=2.0)[0]
    ) == {1, 3}
    assert set(drawn([0.0, 0.5, 0.999], min_p=0.6)[0]) == {1}


def test_the_nucleus_is_of_what_min_p_and_top_k_leave():
    # 1 and 3 are left, with 2/3 and 1/3; of all tokens the nucleus of 0.6 would be 1 and 3
    assert drawn([0.0, 0.5, 0.999], min_p=0.4, top_p=0.6)[0] == [1, 1, 1]
    assert drawn([0.0, 0.66, 0.67, 0.999], min_p=0.4, top_p=0.7)[0] == [1, 1, 3, 3]
    # min_p leaves 1, 3, 2; the two most likely of them, with 2/3 and 1/3
    assert drawn([0.66, 0.67, 0.999], min_p=0.28, top_k=2)[0] == [1, 3, 3]
    assert drawn([0.0, 0.999], min_p=0.4, top_k=3)[0] == [1, 3]


def test_logprobs_are_those_before_min_p_and_biases():
    tokens, logprobs = drawn([0.0, 0.9], min_p=0.4, bias={3: 2.0})
    torch.testing.assert_close(logprobs.exp(), FOUR[0, tokens])
    tokens, logprobs = drawn([0.3], temperature=0.0, bias={0: 3.0})
    assert tokens == [0]
    torch.testing.assert_close(logprobs.exp(), FOUR[0, :1])


def test_a_bias_is_added_to_the_logit_before_the_temperature_and_the_filters():
    double = float(np.log(2))
    # 0.1, 0.5, 0.15, 0.5 of 1.25
    assert drawn([0.07, 0.09, 0.47, 0.49, 0.59, 0.61], bias={3: double})[0] == [0, 1, 1, 2, 2, 3]
    # at temperature 0.5 squares: 0.01, 0.25, 0.0225, 0.25 of 0.5325
    assert drawn([0.018, 0.02, 0.488, 0.489, 0.53, 0.531], bias={3: double}, temperature=0.5)[
        0
    ] == [0, 1, 1, 2, 2, 3]
    # 0.1, 0.5, 1.2, 0: the two most likely are 2 (12/17) and 1; at least half of 1.2 is 2 alone
    bias = {2: float(np.log(8)), 3: -1e9}
    assert drawn([0.7, 0.71], bias=bias, top_k=2)[0] == [2, 1]
    assert drawn([0.0, 0.999], bias=bias, min_p=0.5)[0] == [2, 2]


def test_a_large_bias_either_way_is_a_rule():
    assert drawn([0.0, 0.5, 0.999], bias={0: 1e9})[0] == [0, 0, 0]
    assert set(draw_many(FOUR.log(), 500, bias={1: -1e9, 3: -1e9})[0]) == {0, 2}
    assert drawn([0.0], bias={1: -1e9}, temperature=0.0)[0] == [3]
