"""What vLLM's ranks take, faults planted in the map, and both roads of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from helpers import engine_jobs as jobs
from helpers.installed import needs
from helpers.paths import matrix
from helpers.vllm_boxes import HIDDEN, SMALL, check_boxes

from hybridflow.backends.vllm import engine as engine_module
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing import tiny_config
from hybridflow.kit.testing.engine_base import give_weights
from hybridflow.kit.testing.engine_tokens import EngineTokens
from hybridflow.kit.testing.models import reference
from hybridflow.kit.tracing import placed, tracer

ALONE = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))


@needs("vllm")
def test_each_rank_takes_its_boxes_and_no_others(ranks):
    check_boxes(ranks, "qwen2", {"lm_head.weight": "model.embed_tokens.weight"})


def start(architecture: str = "qwen2", **fields: Any) -> VLLMEngine:
    ref = reference(architecture, width=HIDDEN)
    engine = VLLMEngine(attrs.evolve(ref.spec, path=None), SMALL, ALONE)
    engine.start()
    return engine


def speaks(engine: VLLMEngine, seed: int) -> None:
    """Require that the engine says what the reference says, after an update with its weights."""
    ref = reference("qwen2", seed=seed, width=HIDDEN)
    give_weights(engine, ref.parameters, seed, pieces=3)
    sampling = jobs.SamplingParams(max_tokens=jobs.TOKENS, temperature=0.0)
    done = engine.generate(jobs.requests(jobs.PROMPTS, sampling))
    spoken = [
        (c.response_ids.tolist(), c.logprobs.tolist(), set(c.weight_version.tolist())) for c in done
    ]
    jobs.check_spoken(spoken, ref, seed)


def renamed(old: str, new: str) -> Callable[..., Any]:
    """saved_parameters with another name in it."""
    original = engine_module.saved_parameters

    def call(hf_config):
        shapes, ties = original(hf_config)
        return {new if name == old else name: shape for name, shape in shapes.items()}, ties

    return call


@needs("vllm")
@matrix
def test_a_name_that_vllm_does_not_know_ends_the_start(monkeypatch):
    planted = renamed("model.norm.weight", "model.norm.wait")
    monkeypatch.setattr(engine_module, "saved_parameters", planted)
    with pytest.raises(ModelError, match=r"vLLM.*model\.norm\.wait"):
        start()


@needs("vllm")
@matrix
def test_a_name_that_vllm_leaves_out_ends_the_start(monkeypatch):
    # vLLM's loaders pass such names over without a word.
    planted = renamed("model.layers.1.self_attn.q_proj.bias", "model.layers.1.rotary_emb.inv_freq")
    monkeypatch.setattr(engine_module, "saved_parameters", planted)
    with pytest.raises(ModelError, match=r"vLLM.*(rotary_emb\.inv_freq|gives .*qkv_proj.bias)"):
        start()


def shifted(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """`trace` that reports other pieces for a parameter."""
    original = tracer.trace

    def call(load, tensors, params):
        found = original(load, tensors, params)
        pieces = [new for piece in found.pieces[name] for new in change(piece)]
        return attrs.evolve(found, pieces={**found.pieces, name: tuple(pieces)})

    return call


GATE = "model.layers.0.mlp.gate_proj.weight"


def halves_of(piece):
    box, window = piece
    rows = box.shape[0] // 2
    size = (rows, *window.size[1:])
    middle = (box.start[0] + rows, *box.start[1:])
    further = window.offset + rows * window.stride[0]
    return [
        (Box(box.start, (middle[0], *box.stop[1:])), attrs.evolve(window, size=size)),
        (Box(middle, box.stop), attrs.evolve(window, size=size, offset=further)),
    ]


def one_row_further(piece):
    box, window = piece
    return [(box, attrs.evolve(window, offset=window.offset + window.stride[0]))]


def half(piece):
    return halves_of(piece)[:1]


def halves_exchanged(piece):
    """Every element has one source, the wrong one: only real values can tell."""
    (first, to_first), (second, to_second) = halves_of(piece)
    return [(first, to_second), (second, to_first)]


@needs("vllm")
@pytest.mark.parametrize(
    "change, said",
    [
        pytest.param(one_row_further, "brings other values of", marks=matrix),
        pytest.param(half, r"takes only \d+ of \d+ elements of .*gate_proj", marks=matrix),
        (halves_exchanged, "brings other values of"),
    ],
)
def test_a_map_that_is_wrong_ends_the_start(monkeypatch, change, said):
    monkeypatch.setattr(placed, "trace", shifted(GATE, change))
    with pytest.raises(ModelError, match=said):
        start()


@needs("vllm")
def test_parameters_that_no_box_describes_take_vllms_own_road(monkeypatch, capfd):
    whole = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight")
    original = tracer.trace

    def call(load, tensors, params):
        found = original(load, tensors, params)
        pieces = {name: found.pieces[name] for name in found.pieces if name not in whole}
        return attrs.evolve(found, pieces=pieces, opaque=dict.fromkeys(whole, "a test"))

    monkeypatch.setattr(placed, "trace", call)
    engine = start()
    try:
        assert "2 of 26 parameters come whole" in capfd.readouterr().out
        for seed in (0, 1, 0):
            speaks(engine, seed)
        kit = type("Kit", (EngineTokens,), {"width": HIDDEN})()
        kit.test_a_proof_tells_what_an_update_has_brought(lambda spec: engine)
        kit.test_every_later_update_brings_each_element_once(lambda spec: engine)
    finally:
        engine.close()


@needs("vllm")
def test_an_update_that_was_not_ended_is_brought_again(monkeypatch):
    engine = start()
    try:
        speaks(engine, 0)
        other = reference("qwen2", seed=1, width=HIDDEN).parameters
        engine.begin_update(7)
        for name in list(other)[: len(other) // 2]:
            engine.receive(name, Box.full(other[name].shape), other[name])
        with pytest.raises(HybridFlowError, match="mixed weights"):
            engine.generate([])
        speaks(engine, 2)

        # A parameter of which only a part comes is refused, at the end of the update.
        engine.begin_update(8)
        for name, values in other.items():
            box = Box((0, 0), (3, HIDDEN)) if name == GATE else Box.full(values.shape)
            engine.receive(name, box, values[box.slices()])
        with pytest.raises(HybridFlowError, match=rf"{GATE} \({3 * HIDDEN} of .* elements came\)"):
            engine.end_update()
        speaks(engine, 1)

        # Keys and values that sequences still hold would answer for the new weights.
        monkeypatch.setattr(engine.engine, "reset_prefix_cache", lambda **_: False)
        with pytest.raises(HybridFlowError, match="did not drop the keys and values"):
            speaks(engine, 0)
        with pytest.raises(HybridFlowError, match="mixed weights"):
            engine.generate([])
        monkeypatch.undo()
        speaks(engine, 0)
    finally:
        engine.close()


@matrix
@needs("vllm")
def test_a_second_run_in_a_process_has_groups_of_its_own():
    if dist.is_initialized():
        dist.destroy_process_group()
    for seed in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        engine = start()
        try:
            speaks(engine, seed)
        finally:
            engine.close()
            dist.destroy_process_group()


@pytest.mark.parametrize("tp, rows", [(1, [(0, 97)]), (2, [(0, 64), (64, 97)])])
def test_the_planned_layout_pads_the_vocabulary_to_64_rows(tp, rows):
    from hybridflow.kit.huggingface.shapes import shape_of

    shape = shape_of({**tiny_config(), "vocab_size": 97})
    generation = generation_layout(ParallelLayout(dp=tp), tp=tp)
    planned = SMALL.planned_layout(shape, generation, torch.float32)
    for rank, (start, stop) in enumerate(rows):
        (box,) = planned.held[rank]["model.embed_tokens.weight"]
        assert (box.start[0], box.stop[0]) == (start, stop)
