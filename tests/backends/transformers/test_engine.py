"""What is generated, against Hugging Face and the same request in other company; aborts, sleep, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny_engines import GREEDY, KINDS, PROMPT, both, fast_only, greedy

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box

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
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_sampled_tokens_are_teacher_forced_ones_at_the_temperature(
    tiny, prompts, requests_of, model_type, temperature
):
    case = tiny(model_type)
    requests = requests_of(prompts, max_tokens=10, temperature=temperature, top_p=0.9)
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        expected = case.hf_logprobs(request.prompt_ids, completion.response_ids, temperature)
        chosen = np.take_along_axis(expected, completion.response_ids[:, None], 1)[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)


@pytest.mark.parametrize("model_type", KINDS)
def test_first_tokens_follow_the_softmax_of_the_model(tiny, model_type):
    case, prompt, count = tiny(model_type), np.array([5, 17, 3]), 4000
    params = SamplingParams(max_tokens=1)
    done = case.engine.generate([Request(i, prompt, params, seed=i) for i in range(count)])
    expected = np.exp(case.hf_logprobs(prompt, np.array([0]))[0]) * count
    seen = np.bincount([c.response_ids[0] for c in done], minlength=len(expected))
    likely = expected >= 5
    seen, expected = (np.append(x[likely], x[~likely].sum() + 1e-3) for x in (seen, expected))
    assert ((seen - expected) ** 2 / expected).sum() < len(seen) + 5 * np.sqrt(2 * len(seen))


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
def test_top_k_keeps_to_the_most_likely_tokens(tiny, prompts, requests_of, model_type):
    case = tiny(model_type)
    requests = requests_of(prompts, max_tokens=10, top_k=3, temperature=2.0)
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        logprobs = case.hf_logprobs(request.prompt_ids, completion.response_ids)
        third = np.sort(logprobs, -1)[:, -3]
        chosen = np.take_along_axis(logprobs, completion.response_ids[:, None], 1)[:, 0]
        assert (chosen >= third - 1e-4).all()


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
def test_going_on_after_a_prefix_equals_uninterrupted_generation(
    tiny, prompts, requests_of, model_type
):
    case = tiny(model_type)
    whole = case.engine.generate(requests_of(prompts, max_tokens=18, stop_token_ids=(7,)))
    parts = []
    for i, (prompt, c) in enumerate(zip(prompts, whole, strict=True)):
        k = min(i, len(c.response_ids) - 1)
        prefix = (c.response_ids[:k], c.logprobs[:k], np.full(k, -5))
        parts.append(
            Request(i, prompt, SamplingParams(max_tokens=18, stop_token_ids=(7,)), 100 + i, *prefix)
        )
    for request, a, b in zip(parts, case.engine.generate(parts), whole, strict=True):
        assert_same(a, b)
        k = len(request.prefix_ids)
        assert (a.weight_version[:k] == -5).all() and (
            a.weight_version[k:] == case.engine.version
        ).all()


def test_a_prefix_that_is_a_whole_response_comes_back_as_it_is(tiny):
    engine, prompt = tiny("qwen2").engine, np.array([1, 2])
    stop, full = SamplingParams(max_tokens=9, stop_token_ids=(3,)), SamplingParams(max_tokens=2)
    requests = [
        Request(0, prompt, stop, prefix_ids=np.array([5, 3])),
        Request(1, prompt, full, prefix_ids=np.array([5, 3])),
        Request(2, prompt, SamplingParams(max_tokens=0)),
    ]
    done = engine.generate(requests)
    assert [c.finish_reason for c in done] == ["stop", "length", "length"]
    assert [c.response_ids.tolist() for c in done] == [[5, 3], [5, 3], []]
    assert done[0].logprobs.tolist() == [0, 0] and done[0].weight_version.tolist() == [
        -1,
        -1,
    ]  # none were given


@pytest.mark.parametrize("model_type", KINDS)
def test_bfloat16_generates_and_its_logprobs_are_near(tiny, prompts, requests_of, model_type):
    case = tiny(model_type, dtype="bfloat16", hf={"initializer_range": 0.05})
    assert all(p.dtype == torch.bfloat16 for p in case.engine.layout().params.values())
    requests = requests_of(prompts, max_tokens=12)
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        logprobs = case.hf_logprobs(request.prompt_ids, completion.response_ids)
        chosen = np.take_along_axis(logprobs, completion.response_ids[:, None], 1)[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=0.1)


def test_no_requests_are_no_completions(tiny):
    assert tiny("qwen2").engine.generate([]) == []


# ---- updates, aborts, sleep, streams --------------------------------------------------------------------------------


@both
def test_weights_that_are_not_finite_are_reported_and_leave_nothing_behind(case):
    expected = greedy(case)
    name = next(n for n in case.engine.layout().params if "norm" in n or "ln_" in n)
    broken = case.random_model(seed=0)
    with torch.no_grad():
        broken.get_parameter(name).fill_(float("nan"))
    case.update(2, model=broken)
    with pytest.raises(
        HybridFlowError, match=r"request 0: .*not finite at response token 0, .*version 2"
    ):
        greedy(case)
    case.update(3)
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)


@fast_only
def test_weights_may_change_while_sequences_run_and_tokens_say_which_made_them(case):
    short, long = (
        SamplingParams(max_tokens=3, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=0.0),
    )
    stream = case.engine.submit([Request(0, PROMPT, short), Request(1, PROMPT, long)])
    assert next(stream).id == 0
    case.update(2, model=case.random_model(seed=1))
    assert next(stream).weight_version.tolist() == [1] * 3 + [2] * 6


@both
def test_aborted_sequences_come_back_with_what_they_have(case):
    requests = [Request(i, PROMPT, SamplingParams(max_tokens=4 + 20 * i), seed=i) for i in range(5)]
    expected = case.engine.generate(requests)
    stream = case.engine.submit(requests)
    assert next(stream).id == 0
    case.engine.abort([2, 4, 99])
    done = {c.id: c for c in stream}
    assert sorted(done) == [1, 2, 3, 4]
    for i, c in done.items():
        assert c.finish_reason == ("abort" if i in (2, 4) else "length")
        assert (
            len(c.response_ids)
            == len(c.logprobs)
            == len(c.weight_version)
            == (4 if i in (2, 4) else 4 + 20 * i)
        )
        np.testing.assert_array_equal(
            c.response_ids, expected[i].response_ids[: len(c.response_ids)]
        )


@both
def test_an_abort_before_the_start_reaches_waiting_requests_and_keeps_their_prefix(case):
    prefix = np.array([9, 8])
    requests = [
        Request(0, PROMPT, GREEDY),
        Request(1, PROMPT, GREEDY, prefix_ids=prefix),
        Request(2, PROMPT, GREEDY),
    ]
    stream = case.engine.submit(requests)
    case.engine.abort([1])
    done = {c.id: c for c in stream}
    assert {i: c.finish_reason for i, c in done.items()} == {0: "length", 1: "abort", 2: "length"}
    assert done[1].response_ids.tolist() == [9, 8]
    stream = case.engine.submit(requests)
    case.engine.abort()
    assert sorted((c.id, c.finish_reason) for c in stream) == [
        (0, "abort"),
        (1, "abort"),
        (2, "abort"),
    ]


@both
def test_an_abort_after_the_end_does_not_reach_the_next_call(case):
    case.engine.abort()
    greedy(case)
    case.engine.abort([0])
    assert greedy(case).finish_reason == "length"


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
def test_a_running_engine_does_not_sleep(case):
    requests = [Request(i, PROMPT, SamplingParams(max_tokens=2 + i)) for i in range(2)]
    stream = case.engine.submit(requests)
    next(stream)
    with pytest.raises(HybridFlowError, match="abort them"):
        case.engine.sleep()
    list(stream)
    unread = case.engine.submit(requests)
    case.engine.sleep()
    case.engine.wake()
    with pytest.raises(HybridFlowError, match="or by sleep"):
        next(unread)


@both
def test_a_stream_that_is_closed_or_fails_leaves_the_engine_free(case):
    requests = [Request(i, PROMPT, SamplingParams(max_tokens=2 + i)) for i in range(2)]
    stream = case.engine.submit(requests)
    next(stream)
    stream.close()
    case.engine.sleep()
    case.engine.wake()
    assert len(case.engine.generate(requests)) == 2


@both
def test_a_later_submit_ends_an_earlier_stream(case):
    requests = [Request(i, PROMPT, SamplingParams(max_tokens=2 + i)) for i in range(2)]
    stream = case.engine.submit(requests)
    next(stream)
    assert len(case.engine.generate(requests)) == 2
    with pytest.raises(HybridFlowError, match="later submit"):
        next(stream)


def test_a_sleeping_engine_shows_no_weights(tiny):
    engine, box = tiny("llama", fresh=True).engine, Box((0, 0), (1, 1))
    engine.sleep()
    for call in (engine.view, engine.read):
        with pytest.raises(HybridFlowError, match="wake it"):
            call("lm_head.weight", box)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(prompt_ids=np.array([], np.int64)), "the prompt is empty"),
        (
            dict(sampling=SamplingParams(max_tokens=252)),
            "exceed the model's max_position_embeddings 256",
        ),
        (dict(prompt_ids=np.array([3, 48])), "outside the vocabulary of 48"),
        (dict(prefix_ids=np.array([-1])), "outside the vocabulary of 48"),
        (
            dict(sampling=SamplingParams(max_tokens=4, logit_bias={3: 1.0, 48: 1.0})),
            r"tokens \[48\], outside .* of 48",
        ),
        (
            dict(prefix_ids=np.array([1]), prefix_logprobs=np.zeros(2)),
            "prefix_logprobs has 2 entries",
        ),
    ],
)
@both
def test_a_request_that_cannot_be_served_is_refused_by_its_id_before_anything_runs(
    case, bad, message
):
    good = Request(0, PROMPT, SamplingParams(max_tokens=4))
    fields = dict(prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=4)) | bad
    with pytest.raises(HybridFlowError, match=f"request 17: .*{message}"):
        case.engine.submit([good, Request(id=17, **fields)])


@fast_only
def test_an_id_used_twice_is_refused(case):
    with pytest.raises(HybridFlowError, match="request 3: its id is used twice"):
        case.engine.submit([Request(3, PROMPT, GREEDY), Request(3, PROMPT, GREEDY)])


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


def test_requests_that_come_one_by_one_beside_running_ones_get_the_same_tokens(tiny, prompts):
    draw = np.random.default_rng(1)
    requests = [
        Request(
            i,
            prompts[i % 12],
            SamplingParams(max_tokens=int(draw.integers(1, 90)), stop_token_ids=(7,)),
            seed=i,
        )
        for i in range(40)
    ]
    expected = tiny("qwen2").engine.generate(requests)
    engine = tiny("qwen2", fresh=True).engine
    done = {}
    for request in requests:
        engine.add(request)
        done.update((completion.id, completion) for completion in engine.step())
    while engine.busy:
        done.update((completion.id, completion) for completion in engine.step())
    for completion in expected:
        assert_same(done[completion.id], completion)
