"""The suite of rollout engines; the same request in other company, sleep, and what only our engine does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.decoders import GREEDY, KINDS, PROMPT, both, greedy

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing import RolloutEngineConformance, one_rank

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALL_MODELS = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 24}),
    ("llama", {"rope_parameters": YARN}),
    ("qwen3", {"head_dim": 16}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    ("gpt2", {}),
    ("mistral", {"sliding_window": 8}),  # runs on Hugging Face's code
]


class TestTransformers(RolloutEngineConformance):
    config = TransformersEngineConfig()

    @pytest.fixture
    def start(self):
        def make(spec):
            engine = TransformersEngine(spec, self.config, context)
            engine.start()
            return engine

        with one_rank() as context:
            yield make


class TestTransformersWithExperts(TestTransformers):
    architectures = ("qwen3_moe",)


class TestItsGenericDecoder(TestTransformers):
    architectures = ("qwen2",)
    config = TransformersEngineConfig(fast=False)


def assert_same(a, b):
    """Equal completions, up to float noise in the log-probabilities."""
    np.testing.assert_array_equal(a.response_ids, b.response_ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert a.finish_reason == b.finish_reason


@pytest.mark.parametrize(("model_type", "hf"), ALL_MODELS)
def test_greedy_tokens_and_logprobs_are_those_of_hugging_face(
    tiny, prompts, requests_of, model_type, hf
):
    case = tiny(model_type, hf=hf)
    done = case.engine.generate(requests_of(prompts, max_tokens=12, temperature=0.0))
    assert len({tuple(c.response_ids) for c in done}) > 1
    for prompt, completion in zip(prompts, done, strict=True):
        np.testing.assert_array_equal(completion.response_ids, case.hf_greedy(prompt, 12))
        logprobs = case.hf_logprobs(prompt, completion.response_ids)
        np.testing.assert_allclose(completion.logprobs, logprobs.max(-1), atol=1e-4)
        assert completion.finish_reason == "length"
        assert completion.response_ids.dtype == completion.weight_version.dtype == np.int64
        assert completion.logprobs.dtype == np.float32
        assert (completion.weight_version == case.engine.version).all()


@pytest.mark.parametrize("model_type", KINDS)
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(
    tiny, prompts, requests_of, model_type
):
    engine = tiny(model_type).engine
    requests = requests_of(prompts, max_tokens=20, stop_token_ids=(7, 30))
    done = engine.generate(requests)
    assert len({len(c.response_ids) for c in done}) > 3
    for alone, completion in zip(requests[:5], done, strict=False):
        assert_same(engine.generate([alone])[0], completion)
    few = tiny(model_type, max_sequences=3, prefill_tokens=16).engine.generate(requests[::-1])[::-1]
    for a, b in zip(few, done, strict=True):
        assert a.id == b.id
        assert_same(a, b)


def test_rows_that_finish_at_many_lengths_leave_room_for_the_waiting(tiny, prompts):
    draw = np.random.default_rng(0)
    requests = [
        Request(i, prompts[i % 12], SamplingParams(max_tokens=int(draw.integers(1, 40))), seed=i)
        for i in range(60)
    ]
    everything = tiny("qwen2").engine.generate(requests)
    engine = tiny("qwen2", max_sequences=7).engine
    streamed = list(engine.submit(requests))
    assert sorted(c.id for c in streamed) == list(range(60))
    assert [c.id for c in streamed] != list(range(60))
    for completion in streamed:
        assert len(completion.response_ids) == requests[completion.id].sampling.max_tokens
        assert_same(completion, everything[completion.id])


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("model_type", KINDS)
def test_looking_rarely_at_what_has_finished_changes_nothing(
    tiny, prompts, requests_of, model_type, steps
):
    requests = requests_of(prompts, max_tokens=23, stop_token_ids=(7, 30))
    expected = tiny(model_type).engine.generate(requests)
    engine = tiny(model_type, sync_every=steps, max_sequences=5).engine
    for a, b in zip(engine.generate(requests), expected, strict=True):
        assert_same(a, b)


def test_the_samples_of_a_group_differ_and_are_those_of_single_requests(tiny, requests_of, prompts):
    case = tiny("qwen2")
    requests = requests_of([prompts[1]] * 4 + [prompts[3]] * 4, max_tokens=12)
    calls, prefill = [], case.engine.decoder._prefill
    case.engine.decoder._prefill = lambda ids, *rest: calls.append(ids.shape) or prefill(ids, *rest)
    try:
        done = case.engine.generate(requests)
    finally:
        case.engine.decoder._prefill = prefill
    assert calls == [(2, len(prompts[3]))]  # each prompt once
    assert len({tuple(c.response_ids) for c in done}) == 8
    for request, completion in zip(requests, done, strict=True):
        assert_same(case.engine.generate([request])[0], completion)


@pytest.mark.parametrize("model_type", KINDS)
def test_different_seeds_differ_and_any_integer_is_a_seed(tiny, prompts, requests_of, model_type):
    seeds = [0, 1, 2, -1, 2**63, 2**64 - 2, 2**40]
    done = tiny(model_type).engine.generate(
        requests_of([prompts[4]] * 7, seeds=seeds, max_tokens=16)
    )
    assert len({tuple(c.response_ids) for c in done}) == 7


@pytest.mark.parametrize("model_type", KINDS)
def test_requests_of_every_kind_of_sampling_mix_in_one_batch(tiny, prompts, model_type):
    engine = tiny(model_type).engine
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.5, "top_k": 9, "top_p": 0.9},
             {"min_p": 0.2}, {"min_p": 0.1, "top_p": 0.8, "logit_bias": {3: 2.0, 7: -5.0}},
             {"temperature": 0.0, "logit_bias": {5: 9.0}}]  # fmt: skip
    requests = [
        Request(i, prompts[5], SamplingParams(max_tokens=14, **k), seed=9)
        for i, k in enumerate(kinds)
    ]
    together = engine.generate(requests)
    for request, completion in zip(requests, together, strict=True):
        assert_same(engine.generate([request])[0], completion)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_stop_token_ends_the_response_and_is_part_of_it(tiny, prompts, requests_of, model_type):
    engine = tiny(model_type).engine
    free = engine.generate(requests_of(prompts, max_tokens=30))
    stopped = engine.generate(requests_of(prompts, max_tokens=30, stop_token_ids=(4, 11, 40)))
    ignored = engine.generate(
        requests_of(prompts, max_tokens=30, stop_token_ids=(4, 11, 40), ignore_stop=True)
    )
    reasons = set()
    for a, b, c in zip(free, stopped, ignored, strict=True):
        hits = np.flatnonzero(np.isin(a.response_ids, (4, 11, 40)))
        end = hits[0] + 1 if len(hits) else 30
        np.testing.assert_array_equal(b.response_ids, a.response_ids[:end])
        assert b.finish_reason == ("stop" if len(hits) else "length")
        reasons.add(b.finish_reason)
        assert_same(a, c)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("model_type", KINDS)
def test_bfloat16_generates_and_its_logprobs_are_near(tiny, prompts, requests_of, model_type):
    case = tiny(model_type, dtype="bfloat16", hf={"initializer_range": 0.05})
    assert all(p.dtype == torch.bfloat16 for p in case.engine.layout().params.values())
    requests = requests_of(prompts, max_tokens=12)
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        logprobs = case.hf_logprobs(request.prompt_ids, completion.response_ids)
        chosen = np.take_along_axis(logprobs, completion.response_ids[:, None], 1)[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=0.1)


# ---- updates, aborts, sleep, streams --------------------------------------------------------------------------------


@both
def test_weights_that_are_not_finite_are_reported_and_leave_nothing_behind(case):
    expected = greedy(case)
    name = next(n for n in case.engine.layout().params if "norm" in n or "ln_" in n)
    broken = case.random_model(seed=0)
    with torch.no_grad():
        broken.get_parameter(name).fill_(float("nan"))
    case.update(2, model=broken)
    with pytest.raises(HybridFlowError, match=r"request 0: .*version 2"):
        greedy(case)
    case.update(3)
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)


@both
def test_sleep_gives_up_the_cache_and_wake_goes_on(case):
    expected = greedy(case)
    case.engine.sleep()
    assert case.engine.decoder.cache is None
    with pytest.raises(HybridFlowError, match="wake it"):
        case.engine.submit([Request(0, PROMPT, GREEDY)])
    with pytest.raises(HybridFlowError, match="wake it"):
        case.engine.begin_update(2)
    case.engine.sleep()
    case.engine.wake()
    case.engine.wake()
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)


@both
def test_a_stream_that_is_closed_or_fails_leaves_the_engine_free(case):
    requests = [Request(i, PROMPT, SamplingParams(max_tokens=2 + i)) for i in range(2)]
    stream = case.engine.submit(requests)
    next(stream)
    stream.close()
    case.engine.sleep()
    case.engine.wake()
    assert len(case.engine.generate(requests)) == 2


def test_a_sleeping_engine_shows_no_weights(tiny):
    engine, box = tiny("llama", fresh=True).engine, Box((0, 0), (1, 1))
    engine.sleep()
    for call in (engine.view, engine.read):
        with pytest.raises(HybridFlowError, match="wake it"):
            call("lm_head.weight", box)


def start(fields, kind="policy", **config):
    context = SimpleNamespace(device=torch.device("cpu"))
    engine = TransformersEngine(
        ModelSpec(fields, None, 0, kind), TransformersEngineConfig(**config), context
    )
    engine.start()
    return engine


def test_fast_is_an_error_where_the_model_does_not_fit(tiny):
    with pytest.raises(ModelError, match="model_type is 'gpt2'"):
        start(tiny("gpt2").fields, fast=True)
    with pytest.raises(ModelError, match="sliding-window"):
        start(tiny("mistral", hf={"sliding_window": 8}).fields, fast=True)
    with pytest.raises(ModelError, match="'value' model"):
        start(tiny("qwen2").fields, kind="value")


def test_both_decoders_give_the_same_tokens_for_the_same_seeds(tiny, prompts, requests_of):
    requests = requests_of(prompts, max_tokens=16, stop_token_ids=(7,), top_p=0.95)
    fast, slow = tiny("qwen2"), tiny("qwen2", fast=False)
    assert type(fast.engine.decoder) is not type(slow.engine.decoder)
    for a, b in zip(fast.engine.generate(requests), slow.engine.generate(requests), strict=True):
        np.testing.assert_array_equal(a.response_ids, b.response_ids)


def test_a_model_folder_gives_its_own_config(tiny, tmp_path):
    case = tiny("qwen2")
    case.model.save_pretrained(tmp_path)
    spec = ModelSpec({"model_type": "qwen2"}, str(tmp_path), 0)
    engine = TransformersEngine(
        spec, TransformersEngineConfig(), SimpleNamespace(device=torch.device("cpu"))
    )
    engine.start()
    assert engine.layout().params == case.engine.layout().params


def test_the_cache_limit_bounds_the_rows_and_answers_stay_the_same(tiny, prompts, requests_of):
    requests = requests_of(prompts, max_tokens=16)
    engine = tiny("qwen2", kv_memory_gb=1e-4).engine
    for a, b in zip(
        engine.generate(requests), tiny("qwen2").engine.generate(requests), strict=True
    ):
        np.testing.assert_array_equal(a.response_ids, b.response_ids)
    assert engine.decoder.rows == 3  # 2 layers x keys, values x 2 heads x 64 columns x 16 floats
    assert engine.decoder.reserved_bytes == 3 * 32768
