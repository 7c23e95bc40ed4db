"""Weights in, aborts, sleep, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box

KINDS = ["qwen2", "gpt2"]
PROMPT = np.array([3, 1, 4, 1, 5])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture
def case(tiny, request):
    return tiny(request.param, fresh=True)


both = pytest.mark.parametrize("case", KINDS, indirect=True)
fast_only = pytest.mark.parametrize("case", ["qwen2"], indirect=True)


def greedy(case, prompt=PROMPT):
    return case.engine.generate([Request(0, prompt, GREEDY)])[0]


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_layout_has_the_names_and_shapes_that_hugging_face_saves(tiny, tmp_path, model_type, tied):
    from safetensors import safe_open

    case = tiny(model_type, hf={"tie_word_embeddings": tied})
    case.model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    layout = case.engine.layout()
    assert {name: param.shape for name, param in layout.params.items()} == shapes
    assert layout.held == {0: {name: (Box.full(shape),) for name, shape in shapes.items()}}
    assert list(layout.ties) == (["lm_head.weight"] if tied else [])
    assert all(source in layout.params for source in layout.ties.values())


@both
def test_outputs_follow_a_second_update(case):
    before = greedy(case)
    other = case.random_model(seed=1)
    case.update(2, model=other)
    after = greedy(case)
    assert not np.array_equal(before.response_ids, after.response_ids)
    assert set(before.weight_version) == {1} and set(after.weight_version) == {2}
    expected = case.hf_logprobs(PROMPT, after.response_ids, model=other)
    np.testing.assert_array_equal(after.response_ids, expected.argmax(-1))


@both
def test_boxes_of_any_cut_make_up_the_weights(case):
    expected, weights, engine = greedy(case), case.model.state_dict(), case.bare_engine()
    draw = np.random.default_rng(0)
    engine.begin_update(7)
    for name, param in engine.layout().params.items():
        cuts = [sorted({0, n, *map(int, draw.integers(0, n + 1, size=2))}) for n in param.shape]
        for starts in np.ndindex(*[len(c) - 1 for c in cuts]):
            box = Box(
                tuple(c[i] for c, i in zip(cuts, starts, strict=True)),
                tuple(c[i + 1] for c, i in zip(cuts, starts, strict=True)),
            )
            engine.receive(name, box, weights[name][box.slices()].double())
    engine.end_update()
    case.engine = engine
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)
    assert set(greedy(case).weight_version) == {7}


@both
def test_generation_is_refused_without_weights_and_inside_an_update(case):
    engine = case.bare_engine()
    with pytest.raises(HybridFlowError, match="no weights yet"):
        engine.submit([Request(0, PROMPT, GREEDY)])
    case.engine.begin_update(2)
    with pytest.raises(HybridFlowError, match="version 2 was begun and not ended"):
        greedy(case)


@both
def test_a_first_update_that_lacks_weights_lists_them_and_leaves_generation_refused(case):
    engine, weights = case.bare_engine(), case.model.state_dict()
    names = list(engine.layout().params)
    engine.begin_update(1)
    for name in names[2:]:
        engine.receive(name, Box.full(weights[name].shape), weights[name])
    half = Box((0, 0), (1, weights[names[0]].shape[1]))
    engine.receive(names[0], half, weights[names[0]][:1])
    with pytest.raises(HybridFlowError) as error:
        engine.end_update()
    of = f"{half.numel} of {weights[names[0]].numel()} elements"
    assert f"lacks 2 of {len(names)} parameters: {names[0]} ({of}), {names[1]}" in str(error.value)
    with pytest.raises(HybridFlowError, match="not ended"):
        engine.submit([Request(0, PROMPT, GREEDY)])


@both
def test_a_later_update_may_bring_some_parameters_only(case):
    other = case.random_model(seed=1)
    name = next(n for n in case.engine.layout().params if "norm" in n or "ln_" in n)
    case.update(2, model=other, names=[name])
    with torch.no_grad():
        case.model.get_parameter(name).copy_(other.get_parameter(name))
    np.testing.assert_array_equal(greedy(case).response_ids, case.hf_greedy(PROMPT, 8))


@both
def test_what_is_no_parameter_or_has_another_shape_is_refused_by_name(case):
    engine = case.engine
    name, param = next(iter(engine.layout().params.items()))
    with pytest.raises(HybridFlowError, match="outside an update"):
        engine.receive(name, Box.full(param.shape), torch.zeros(param.shape))
    engine.begin_update(2)
    with pytest.raises(HybridFlowError, match=r"no parameter 'model\.nothing'"):
        engine.receive("model.nothing", Box.full((1,)), torch.zeros(1))
    with pytest.raises(HybridFlowError, match=rf"no parameter .*the nearest is '{name}'"):
        engine.receive(name + "s", Box.full(param.shape), torch.zeros(param.shape))
    with pytest.raises(HybridFlowError, match=rf"{name}: got a tensor of shape \(3,\)"):
        engine.receive(name, Box.full(param.shape), torch.zeros(3))
    big = (param.shape[0] + 1, *param.shape[1:])
    with pytest.raises(HybridFlowError, match=rf"{name}: the box .* does not lie in the shape"):
        engine.receive(name, Box.full(big), torch.zeros(big))


def test_a_tied_name_is_refused_with_the_name_to_send(tiny):
    engine = tiny("qwen2", hf={"tie_word_embeddings": True}, fresh=True).engine
    engine.begin_update(2)
    with pytest.raises(HybridFlowError, match=r"tied to model\.embed_tokens\.weight"):
        engine.receive("lm_head.weight", Box.full((48, 64)), torch.zeros(48, 64))


@both
def test_weights_that_are_not_finite_are_reported_and_leave_nothing_behind(case):
    expected = greedy(case)
    name = next(n for n in case.engine.layout().params if "norm" in n or "ln_" in n)
    broken = case.random_model(seed=0)
    with torch.no_grad():
        broken.get_parameter(name).fill_(float("nan"))
    case.update(2, model=broken, names=[name])
    with pytest.raises(HybridFlowError, match=r"request 0: .*not finite at response token 0, .*version 2"):
        greedy(case)
    case.update(3, names=[name])
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)


@fast_only
def test_weights_may_change_while_sequences_run_and_tokens_say_which_made_them(case):
    short, long = SamplingParams(max_tokens=3, temperature=0.0), SamplingParams(max_tokens=9, temperature=0.0)
    stream = case.engine.submit([Request(0, PROMPT, short), Request(1, PROMPT, long)])
    assert next(stream).id == 0
    case.update(2, model=case.random_model(seed=1))
    assert next(stream).weight_version.tolist() == [1] * 3 + [2] * 6


# ---- abort, sleep, streams ------------------------------------------------------------------------------------------


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
        assert len(c.response_ids) == len(c.logprobs) == len(c.weight_version) == (4 if i in (2, 4) else 4 + 20 * i)
        np.testing.assert_array_equal(c.response_ids, expected[i].response_ids[: len(c.response_ids)])


@both
def test_an_abort_before_the_start_reaches_waiting_requests_and_keeps_their_prefix(case):
    prefix = np.array([9, 8])
    requests = [Request(0, PROMPT, GREEDY), Request(1, PROMPT, GREEDY, prefix_ids=prefix), Request(2, PROMPT, GREEDY)]
    stream = case.engine.submit(requests)
    case.engine.abort([1])
    done = {c.id: c for c in stream}
    assert {i: c.finish_reason for i, c in done.items()} == {0: "length", 1: "abort", 2: "length"}
    assert done[1].response_ids.tolist() == [9, 8]
    stream = case.engine.submit(requests)
    case.engine.abort()
    assert sorted((c.id, c.finish_reason) for c in stream) == [(0, "abort"), (1, "abort"), (2, "abort")]


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
def test_dropped_weights_must_all_come_again(case):
    expected = greedy(case)
    case.engine.store.drop()  # what sleep does on a GPU
    assert all(place.storage.untyped_storage().nbytes() == 0 for place in case.engine.store.places.values())
    case.engine.store.restore()
    with pytest.raises(HybridFlowError, match="lacks"):
        case.update(2, names=[])
    case.update(2)
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


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(prompt_ids=np.array([], np.int64)), "the prompt is empty"),
        (dict(sampling=SamplingParams(max_tokens=252)), "exceed the model's max_position_embeddings 256"),
        (dict(prompt_ids=np.array([3, 48])), "outside the vocabulary of 48"),
        (dict(prefix_ids=np.array([-1])), "outside the vocabulary of 48"),
        (dict(sampling=SamplingParams(max_tokens=4, temperature=-1.0)), "temperature -1.0"),
        (dict(sampling=SamplingParams(max_tokens=4, top_p=0.0)), "top_p 0.0"),
        (dict(sampling=SamplingParams(max_tokens=4, min_p=1.5)), "min_p 1.5, .* 0 <= min_p <= 1"),
        (dict(sampling=SamplingParams(max_tokens=4, min_p=float("nan"))), "min_p nan"),
        (
            dict(sampling=SamplingParams(max_tokens=4, logit_bias={3: 1.0, 48: 1.0})),
            r"tokens \[48\], which lie outside .* of 48",
        ),
        (dict(sampling=SamplingParams(max_tokens=4, logit_bias={-1: 1.0})), r"tokens \[-1\], which lie outside"),
        (
            dict(sampling=SamplingParams(max_tokens=4, logit_bias={3: float("nan")})),
            "token 3 is nan; give a number from -1e",
        ),
        (dict(sampling=SamplingParams(max_tokens=4, logit_bias={3: float("-inf")})), "token 3 is -inf"),
        (dict(sampling=SamplingParams(max_tokens=4, logit_bias=[(3, 1.0), (3, 2.0)])), r"tokens \[3\] twice"),
        (dict(prefix_ids=np.array([1]), prefix_logprobs=np.zeros(2)), "prefix_logprobs has 2 entries"),
    ],
)
@both
def test_a_request_that_cannot_be_served_is_refused_by_its_id_before_anything_runs(case, bad, message):
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
    engine = TransformersEngine(ModelSpec(fields, None, 0, kind), TransformersEngineConfig(**config), context)
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
    engine = TransformersEngine(spec, TransformersEngineConfig(), SimpleNamespace(device=torch.device("cpu")))
    engine.start()
    assert engine.layout().params == case.engine.layout().params


def test_the_cache_limit_bounds_the_slots_and_answers_stay_the_same(tiny, prompts, requests_of):
    requests = requests_of(prompts, max_tokens=16)
    engine = tiny("qwen2", kv_memory_gb=1e-4).engine
    assert engine._slots(64) == 3  # 2 layers x keys and values x 2 heads x 64 columns x 16 floats
    for a, b in zip(engine.generate(requests), tiny("qwen2").engine.generate(requests), strict=True):
        np.testing.assert_array_equal(a.response_ids, b.response_ids)


def test_settings_out_of_range_are_refused():
    for bad in (dict(dtype="float16"), dict(max_sequences=-1), dict(prefill_tokens=0), dict(kv_memory_gb=-1.0)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TransformersEngineConfig(**bad)
