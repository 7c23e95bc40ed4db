"""The reference says what Hugging Face's model says of each prefix, one after another."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch

from hybridflow.kit.testing.models import VOCAB, Sequences, reference, tiny_config

PROMPT = torch.tensor([5, 17, 11])
RESPONSE = torch.tensor([2, 9, 30, 1])


def last_output(ref, length):
    """What the model itself gives for the first tokens of prompt and response, at the last one."""
    ids = torch.cat([PROMPT, RESPONSE])[None, :length]
    logits = ref.model(input_ids=ids).logits
    return logits[0, -1] if ref.spec.kind == "policy" else logits[0, 0]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_outputs_of_a_policy_are_those_of_one_forward_a_token(architecture, temperature):
    ref = reference(architecture)
    topk_ids = torch.tensor([[0, 1], [2, 3], [4, 5], [31, 30]])
    found = ref.outputs(PROMPT, RESPONSE, temperature, topk_ids)
    for at, token in enumerate(RESPONSE):
        logits = last_output(ref, len(PROMPT) + at) / temperature
        expected = torch.distributions.Categorical(logits=logits)
        assert found["logprobs"][at] == pytest.approx(float(expected.log_prob(token)), abs=1e-4)
        assert found["entropy"][at] == pytest.approx(float(expected.entropy()), abs=1e-4)
        topk = expected.log_prob(topk_ids[at])
        assert torch.allclose(found["topk_logprobs"][at], topk, atol=1e-4)
    assert "topk_logprobs" not in ref.outputs(PROMPT, RESPONSE)


@torch.no_grad()
def test_values_are_before_each_response_token_and_the_score_behind_the_last():
    ref = reference("qwen2", "score")
    found = ref.outputs(PROMPT, RESPONSE)
    values = [float(last_output(ref, len(PROMPT) + at)) for at in range(len(RESPONSE))]
    assert found["values"].tolist() == pytest.approx(values, abs=1e-4)
    whole = last_output(ref, len(PROMPT) + len(RESPONSE))
    assert float(found["scores"]) == pytest.approx(float(whole), abs=1e-4)


@torch.no_grad()
def test_greedy_is_the_largest_logit_after_each_token():
    ref = reference("llama")
    ids = PROMPT.tolist()
    for _ in range(6):
        ids.append(int(ref.logits(torch.tensor(ids))[-1].argmax()))
    assert ref.greedy(PROMPT.numpy(), 6) == ids[len(PROMPT) :]


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("llama", False)])
def test_the_folder_holds_the_model_and_names_its_parameters(architecture, tied):
    from transformers import AutoModelForCausalLM

    ref = reference(architecture)
    loaded = AutoModelForCausalLM.from_pretrained(ref.spec.path)
    ids = torch.cat([PROMPT, RESPONSE])
    with torch.no_grad():
        again = loaded(input_ids=ids[None]).logits[0]
        assert torch.allclose(ref.logits(ids), again, atol=1e-4)
    named = dict(loaded.named_parameters())
    assert set(ref.parameters) == set(named)
    assert all(torch.equal(ref.parameters[name], named[name]) for name in named)
    assert ("lm_head.weight" in named) is not tied


def test_a_reference_is_made_once_and_another_seed_or_width_is_another_one():
    assert reference("qwen2") is reference("qwen2")
    assert reference("qwen2", seed=0).spec.path != reference("qwen2", seed=1).spec.path
    name = "model.norm.weight"
    first, other = (reference("qwen2", seed=seed).parameters[name] for seed in (0, 1))
    assert not torch.equal(first, other)
    assert reference("qwen2", width=64).parameters[name].shape == (64,)


@torch.no_grad()
def test_its_distributions_are_far_from_uniform_and_every_position_matters():
    ref = reference("qwen2")
    rows = Sequences.random([(4, 30)], seed=1)
    entropy = ref.outputs(rows.prompts[0], rows.responses[0])["entropy"]
    assert entropy.mean() < 0.8 * log(VOCAB)
    turned = ref.logits(PROMPT[[1, 0, 2]])[-1] - ref.logits(PROMPT)[-1]
    assert turned.abs().max() > 0.1


def test_sequences_have_the_lengths_and_follow_from_the_seed():
    lengths = [(3, 5), (1, 1), (4, 0)]
    rows, again, other = (Sequences.random(lengths, seed) for seed in (2, 2, 3))
    assert len(rows) == 3
    found = [(len(p), len(r)) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    assert found == lengths
    assert torch.equal(rows.responses[0], again.responses[0])
    assert not torch.equal(rows.responses[0], other.responses[0])
    many = Sequences.random([(500, 500)]).prompts[0]
    assert np.unique(many).tolist() == list(range(VOCAB))


def test_a_tiny_config_is_the_callers_own():
    mine = tiny_config("llama", width=64)
    assert (mine["model_type"], mine["hidden_size"]) == ("llama", 64)
    mine["vocab_size"] = 1
    assert tiny_config("llama")["vocab_size"] == VOCAB
