"""What suites of rollout engines share: weights, requests, and logprobs beside the reference's."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.faulty_engines import starter

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.values.weights import Param, WeightLayout
from hybridflow.kit.batches import BatchEngine
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, give_weights, requests
from hybridflow.kit.testing.models import reference

PARAMETERS = {
    "matrix": torch.arange(10.0).view(5, 2),
    "vector": torch.arange(2.0),
    "unknown": torch.zeros(1),
}


class Keeps(BatchEngine):
    """Puts the boxes that it receives where they belong."""

    def __init__(self):
        super().__init__(None, None, None)
        self.held = {"matrix": torch.full((5, 2), torch.nan), "vector": torch.full((2,), torch.nan)}
        self.boxes = []

    def start(self):
        raise NotImplementedError

    def submit(self, requests):
        raise NotImplementedError

    def layout(self):
        params = {name: Param(tuple(p.shape), p.dtype) for name, p in self.held.items()}
        return WeightLayout(params, {0: {}})

    def receive(self, name, box, tensor):
        self.check_updating(name)
        self.boxes.append((name, box.start[0], box.stop[0]))
        self.held[name][box.slices()] = tensor


def test_an_update_gives_the_parameters_that_the_engine_has():
    engine = Keeps()
    give_weights(engine, PARAMETERS, version=7)
    assert engine.boxes == [("matrix", 0, 5), ("vector", 0, 2)]
    assert all(torch.equal(engine.held[name], PARAMETERS[name]) for name in engine.held)
    assert (engine.version, engine.updating) == (7, False)


def test_pieces_make_up_the_whole_and_short_parameters_have_fewer():
    engine = Keeps()
    give_weights(engine, PARAMETERS, version=1, pieces=3)
    cuts = [(start, stop) for name, start, stop in engine.boxes if name == "matrix"]
    assert [name for name, _, _ in engine.boxes] == ["matrix"] * 3 + ["vector"] * 2
    assert cuts[0][0] == 0 and cuts[-1][1] == 5
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert all(torch.equal(engine.held[name], PARAMETERS[name]) for name in engine.held)


def test_an_update_may_be_left_open():
    engine = Keeps()
    give_weights(engine, PARAMETERS, version=2, end=False)
    assert (engine.version, engine.updating) == (None, True)


def test_requests_have_ids_in_no_order_and_a_seed_each():
    made = requests([[at, 1] for at in range(37)], SamplingParams(max_tokens=3), first_seed=5)
    ids = [request.id for request in made]
    assert len(set(ids)) == 37 and ids != sorted(ids)
    assert [request.seed for request in made] == list(range(5, 42))
    assert [request.prompt_ids.tolist() for request in made] == [[at, 1] for at in range(37)]
    assert made[0].prompt_ids.dtype == np.int64 and made[0].sampling.max_tokens == 3


def test_models_are_of_the_flags_architectures_and_width():
    class Wide(EngineBase):
        architectures = ("llama",)
        width = 64

    [ref] = Wide().references()
    assert ref is reference("llama", width=64)


@pytest.fixture
def spoken():
    """The reference, and our engine's sampled completions of the prompts at temperature 0.7."""
    ref = reference("llama")
    with starter() as start:
        engine = EngineBase().speaking(start, ref, version=9)
        done = EngineBase()._run(engine, PROMPTS, max_tokens=4, temperature=0.7)
    assert engine.version == 9
    return ref, done


def test_an_engine_speaks_after_each_prompt_with_the_weights_that_it_was_given(spoken):
    ref, done = spoken
    assert [len(ids) for ids in EngineBase()._ids(done)] == [4] * len(PROMPTS)
    for prompt, completion in zip(PROMPTS, done, strict=True):
        EngineBase()._logprobs(ref, prompt, completion, 0.7)


def test_logprobs_of_another_temperature_are_told_with_the_prompt(spoken):
    ref, done = spoken
    with pytest.raises(AssertionError, match=r"logprobs after \[5\] at temperature 1.0"):
        EngineBase()._logprobs(ref, PROMPTS[0], done[0], 1.0)


def test_the_tolerance_of_logprobs_is_a_flag_and_a_likely_cause_can_be_given(spoken):
    ref, done = spoken

    class Rough(EngineBase):
        tolerance = 0.6

    off = attrs.evolve(done[1], logprobs=done[1].logprobs - np.float32(0.5))
    Rough()._logprobs(ref, PROMPTS[1], off, 0.7)
    with pytest.raises(AssertionError, match="likely cause: half precision"):
        EngineBase()._logprobs(ref, PROMPTS[1], off, 0.7, "half precision")
