"""Tensor parallelism: what several ranks generate is what one does, and each holds the part that it says."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tensor_parallel_jobs import Model, generate, generation_of, make_engine

from hybridflow.backends.transformers import parallel
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.shapes import shape_of
from hybridflow.kit.layouts import engine_layout

MODELS = {
    "llama": ("llama", {}),
    "llama, all biases, one kv head": ("llama", {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen2, tied, odd": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 53}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}
every = pytest.mark.parametrize("name", MODELS)


def model_of(case, **config) -> Model:
    weights = {name: case.model.state_dict()[name] for name in case.engine.layout().params}
    return Model(case.fields, weights, TransformersEngineConfig(**config))


def mixed_requests(prompts) -> list[Request]:
    """Of different lengths, some of equal prompts, some that stop."""
    prompts = [*prompts, prompts[3], prompts[3]]
    return [
        Request(
            i,
            p,
            SamplingParams(
                max_tokens=4 + 5 * i % 13, top_p=0.9, stop_token_ids=(4, 7, 11, 20, 29, 40)
            ),
            seed=40 + i,
        )
        for i, p in enumerate(prompts)
    ]


def assert_equal(a, b, atol):
    """The same completions in the same order."""
    assert [c.id for c in a] == [c.id for c in b]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.response_ids, y.response_ids)
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=atol, rtol=0)
        np.testing.assert_array_equal(x.weight_version, y.weight_version)
        assert x.finish_reason == y.finish_reason


@every
def test_two_ranks_generate_what_one_and_hugging_face_do(ranks, tiny, prompts, requests_of, name):
    case = tiny(MODELS[name][0], hf=MODELS[name][1])
    calls = [requests_of(prompts, max_tokens=12, temperature=0.0), mixed_requests(prompts)]
    first, second = ranks(generate, 2, model_of(case), calls)
    for a, b, requests in zip(first, second, calls, strict=True):
        assert_equal(a, b, atol=0)
        assert_equal(a, list(case.engine.submit(requests)), atol=1e-4)
    assert len({c.finish_reason for c in first[1]}) == 2
    greedy = sorted(first[0], key=lambda c: c.id)
    assert len({tuple(c.response_ids) for c in greedy}) > 1
    for prompt, completion in zip(prompts, greedy, strict=True):
        np.testing.assert_array_equal(completion.response_ids, case.hf_greedy(prompt, 12))
        logprobs = case.hf_logprobs(prompt, completion.response_ids)
        np.testing.assert_allclose(completion.logprobs, logprobs.max(-1), atol=1e-4)


def test_rows_leave_and_enter_alike_on_both_ranks(ranks, tiny, prompts):
    config = dict(max_sequences=3, sync_every=2, prefill_tokens=20)
    case, requests = (
        tiny("qwen2", hf=MODELS["qwen2, tied, odd"][1], **config),
        mixed_requests(prompts),
    )
    first, second = ranks(generate, 2, model_of(case, **config), [requests])
    assert_equal(first[0], second[0], atol=0)
    assert_equal(first[0], list(case.engine.submit(requests)), atol=1e-4)
    assert sorted(c.id for c in first[0]) == [r.id for r in requests] != [c.id for c in first[0]]


def test_bfloat16_is_near(ranks, tiny, prompts, requests_of):
    case = tiny("qwen2", hf={"initializer_range": 0.05})
    requests = requests_of(prompts, max_tokens=8)
    first, second = ranks(generate, 2, model_of(case, dtype="bfloat16"), [requests])
    assert_equal(first[0], second[0], atol=0)
    for completion in first[0]:
        logprobs = case.hf_logprobs(prompts[completion.id], completion.response_ids)
        chosen = np.take_along_axis(logprobs, completion.response_ids[:, None], 1)[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=0.1)


# ---- more ranks than processes --------------------------------------------------------------------------------------


class Meeting:
    """Collective calls between threads, in the place of torch.distributed; `group` is a rank."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, world: int):
        self.given = [None] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def all(self, at: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[at] = tensor.clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor, op=None, group=None):
        tensor.copy_(sum(self.all(group, tensor)))

    def all_gather_into_tensor(self, out, tensor, group=None):
        out.copy_(torch.cat(self.all(group, tensor)))

    def broadcast(self, tensor, group=None, group_src=None):
        tensor.copy_(self.all(group, tensor)[group_src])


def context_of(rank, generation):
    """Of a rank whose process groups are not used, or are a Meeting's."""
    return SimpleNamespace(
        rank=rank,
        layout=generation.train,
        generation=generation,
        device=torch.device("cpu"),
        group=lambda axis: (
            generation.replicas[0][0].index(rank) if rank in generation.replicas[0][0] else None
        ),
    )


def test_four_ranks_share_two_kv_heads_and_a_vocabulary_that_leaves_the_last_without_a_token(
    tiny, monkeypatch
):
    case = tiny("llama", hf={"vocab_size": 5, "attention_bias": True})
    prompts = [np.array(ids) for ids in ([4], [0, 1, 2, 3, 4], [3, 3])]
    requests = [
        Request(i, p, SamplingParams(max_tokens=9, top_p=0.9), seed=i)
        for i, p in enumerate(prompts)
    ]
    monkeypatch.setattr(parallel, "dist", Meeting(4))
    generation, model, done = generation_of(4), model_of(case), {}

    def run(rank):
        done[rank] = list(make_engine(model, context_of(rank, generation)).submit(requests))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = list(case.engine.submit(requests))
    for rank in range(4):
        assert_equal(done[rank], done[0], atol=0)
        assert_equal(done[rank], expected, atol=1e-4)


# ---- weights --------------------------------------------------------------------------------------------------------

LAYOUTS = [
    generation_of(2),
    generation_of(4),
    generation_layout(ParallelLayout(tp=4), tp=2),
    generation_layout(ParallelLayout(tp=2, dp=2), tp=4),
    generation_layout(ParallelLayout(dp=4), tp=2),
]


@every
@pytest.mark.parametrize("generation", LAYOUTS, ids=lambda g: f"{g.train}-{g.tp}")
def test_every_rank_holds_its_box_and_gives_back_what_it_got(tiny, name, generation):
    case = tiny(MODELS[name][0], hf=MODELS[name][1])
    model, shape = model_of(case), shape_of(case.model.config.to_dict())
    expected = engine_layout(shape, generation, shape.params(torch.float32))
    for rank in range(generation.train.world):
        engine = make_engine(model, context_of(rank, generation))
        layout = engine.layout()
        assert layout.params == expected.params and layout.ties == expected.ties
        assert layout.held == expected.held and layout.ranks == list(range(generation.train.world))
        for parameter, (box,) in layout.held[rank].items():
            values = model.weights[parameter][box.slices()]
            assert torch.equal(engine.read(parameter, box), values)
            part = Box(
                tuple((a + b) // 2 for a, b in zip(box.start, box.stop, strict=True)), box.stop
            )
            assert torch.equal(
                engine.read(parameter, part), model.weights[parameter][part.slices()]
            )
            view = engine.view(parameter, part)
            assert (view is None) == (parameter in layout.opaque)
            if view is not None:
                view.fill_(3.0)
                inside = part.within(box)
                changed = values.clone()
                changed[inside] = 3.0
                assert torch.equal(engine.read(parameter, box), changed)


def test_one_rank_and_tp_1_hold_everything_on_every_rank(tiny):
    case = tiny("qwen3", hf={"head_dim": 16})
    generation = generation_layout(ParallelLayout(tp=2, dp=2))
    engine = make_engine(model_of(case), context_of(3, generation))
    whole = {name: (Box.full(param.shape),) for name, param in engine.layout().params.items()}
    assert engine.layout().held == {rank: whole for rank in range(4)}
    names = {name.split(".", 3)[-1].rsplit(".", 1)[0] for name in engine.layout().opaque}
    assert names == {f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")}
    embedding = "model.embed_tokens.weight"
    engine.view(embedding, whole[embedding][0]).zero_()
    assert not engine.read(embedding, whole[embedding][0]).any()


def bare(case, rank, generation, **config):
    spec = ModelSpec(case.fields, None, 0)
    engine = TransformersEngine(
        spec, TransformersEngineConfig(**config), context_of(rank, generation)
    )
    engine.start()
    return engine


def test_a_box_of_another_rank_is_refused(tiny):
    case = tiny("llama")
    engine, name = bare(case, 1, generation_of(2)), "model.layers.0.mlp.down_proj.weight"
    engine.begin_update(1)
    box = Box((0, 40), (64, 96))
    told = rf"{name}: the box \(0, 40\) .* rank 1 of 2 holds: \(0, 48\) to \(64, 96\)"
    with pytest.raises(HybridFlowError, match=told):
        engine.receive(name, box, torch.zeros(box.shape))
    for call in (engine.view, engine.read):
        with pytest.raises(HybridFlowError, match=told):
            call(name, box)
    with pytest.raises(HybridFlowError, match="does not lie in the shape"):
        engine.read(name, Box((0, 48), (64, 97)))


def test_a_first_update_must_bring_the_rank_its_own_part_and_no_more(tiny):
    case = tiny("llama", hf={"vocab_size": 5, "attention_bias": True})
    engine, weights = bare(case, 3, generation_of(4)), case.model.state_dict()
    held = engine.layout().held[3]
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"] == ()
    left, (first,) = "model.layers.1.mlp.up_proj.weight", held["model.layers.1.mlp.up_proj.weight"]
    engine.begin_update(1)
    for name, boxes in held.items():
        for box in boxes if name != left else [Box(first.start, (first.start[0] + 1, 64))]:
            engine.receive(name, box, weights[name][box.slices()])
    with pytest.raises(
        HybridFlowError, match=rf"lacks 1 of .* parameters: {left} \(64 of 1536 elements came\)$"
    ):
        engine.end_update()
    rest = Box((first.start[0] + 1, 0), first.stop)
    view = engine.view(left, rest)
    view.copy_(weights[left][rest.slices()])
    engine.receive(left, rest, view)
    engine.end_update()
    assert torch.equal(engine.read(left, first), weights[left][first.slices()])


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "tp", "message"),
    [
        ({}, 3, "tp 3 does not divide the attention heads 4"),
        ({"intermediate_size": 97}, 2, "tp 2 does not divide the intermediate size 97"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48},
            4,
            "tp 4 neither divides nor is divided by the 6 key/value heads",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_numbers(tiny, fields, tp, message):
    case = tiny("llama", hf=fields)
    with pytest.raises(ModelError, match=message):
        bare(case, 0, generation_of(tp))


def test_pipeline_parallelism_and_other_decoders_are_refused(tiny):
    staged = generation_layout(ParallelLayout(pp=2, tp=2), pp=2, tp=2)
    with pytest.raises(ModelError, match="no pipeline parallelism; the generation layout has pp 2"):
        bare(tiny("llama"), 0, staged)
    with pytest.raises(ModelError, match=r"'gpt2'.* tp 2"):
        bare(tiny("gpt2"), 0, generation_of(2))
    with pytest.raises(ModelError, match="fast = false"):
        bare(tiny("llama"), 0, generation_of(2), fast=False)
    swapped = generation_of(2)
    swapped.__dict__["replicas"] = (((1, 0),),)
    with pytest.raises(ModelError, match=r"must ascend with the tp rank; they are \(1, 0\)"):
        bare(tiny("llama"), 0, swapped)
