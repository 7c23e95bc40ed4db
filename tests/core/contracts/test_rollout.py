"""What a rollout engine is asked, what it answers, and what every engine has from its contract."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import (
    Completion,
    EngineSettings,
    Request,
    SamplingParams,
    check_requests,
    engine_settings,
)
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.checksum import checksum
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.batches import BatchEngine

CPU = torch.device("cpu")
VOCAB = 10


def request(id=0, prompt=(1, 2), prefix=None, **settings) -> Request:
    given = {
        name: settings.pop(name)
        for name in ("prefix_logprobs", "prefix_versions")
        if name in settings
    }
    ids = None if prefix is None else np.array(prefix, np.int64)
    return Request(
        id, np.array(prompt, np.int64), SamplingParams(**settings), prefix_ids=ids, **given
    )


class Last(BatchEngine):
    """Says the last token again, the last request first."""

    def start(self):
        self.received = []

    def submit(self, requests):
        self.check_ready()
        for asked in reversed(requests):
            ids = asked.context()[-1:]
            version = np.full(1, self.version)
            yield Completion(asked.id, ids, np.zeros(1, np.float32), version, "length")

    def layout(self):
        return WeightLayout({"w": Param((2,), torch.float32)}, {0: {"w": (Box.full((2,)),)}})

    def receive(self, name, box, tensor):
        self.check_updating(f"{name} came")
        self.received.append(name)


@pytest.fixture
def engine() -> Last:
    layout = ParallelLayout()
    context = RankContext("actor", 0, layout, CPU, generation=generation_layout(layout))
    made = Last.build(ModelSpec({"vocab_size": VOCAB}, None, 0), None, context)
    made.start()
    return made


# --- requests ---


def test_biases_are_pairs_in_the_order_of_tokens_however_they_are_given():
    params = SamplingParams(logit_bias={7: -1, 2: 0.5})
    assert params.logit_bias == ((2, 0.5), (7, -1.0))
    assert params == SamplingParams(logit_bias=[(7, -1.0), (np.int64(2), 0.5)])
    assert hash(params) == hash(SamplingParams(logit_bias=((2, 0.5), (7, -1))))
    assert SamplingParams(logit_bias={}).logit_bias == ()
    with pytest.raises(TypeError):
        SamplingParams(logit_bias={1.5: 1.0})


def test_a_temperature_of_zero_is_greedy():
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_generation_goes_on_after_the_prefix():
    assert request().context().tolist() == [1, 2]
    assert request(prefix=[]).context().tolist() == [1, 2]
    assert request(prefix=[3, 4]).context().tolist() == [1, 2, 3, 4]


def test_what_is_not_known_of_a_prefix_is_filled_in():
    ids, logprobs, versions = request(prefix=[3, 4]).prefix()
    assert (ids.tolist(), logprobs.tolist(), versions.tolist()) == ([3, 4], [0.0, 0.0], [-1, -1])
    assert (ids.dtype, logprobs.dtype, versions.dtype) == (np.int64, np.float32, np.int64)
    known = request(
        prefix=[3, 4], prefix_logprobs=np.float32([-0.5, -1]), prefix_versions=np.array([6, 7])
    )
    _, logprobs, versions = known.prefix()
    logprobs[0] = 9
    assert known.prefix_logprobs[0] == -0.5
    assert versions.tolist() == [6, 7]
    assert [len(part) for part in request().prefix()] == [0, 0, 0]


@pytest.mark.parametrize(
    "asked, reason",
    [
        (request(max_tokens=2), None),
        (request(max_tokens=0), "length"),
        (request(prefix=[3], max_tokens=2), None),
        (request(prefix=[3, 4], max_tokens=2), "length"),
        (request(prefix=[3, 4], max_tokens=2, stop_token_ids=(4,)), "stop"),
        (request(prefix=[3, 4], max_tokens=3, stop_token_ids=(3,)), None),
        (request(prefix=[3, 4], max_tokens=3, stop_token_ids=(4,), ignore_stop=True), None),
    ],
)
def test_a_prefix_that_is_a_whole_response_has_a_finish_reason(asked, reason):
    assert asked.ended_before() == reason


@pytest.mark.parametrize(
    "setting, value",
    [
        ("temperature", -1), ("temperature", float("nan")), ("top_p", 0), ("top_k", -1), ("min_p", 1.5),
        ("max_tokens", -1), ("logit_bias", [(1, 1), (1, 2)]), ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: float("nan")}),
    ],
)  # fmt: skip
def test_sampling_that_cannot_be_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=f"{setting}: "):
        SamplingParams(**{setting: value})


def test_requests_that_can_be_served_pass():
    served = [
        request(0, max_tokens=6),
        request(1, prefix=[9], max_tokens=6, logit_bias={9: 1e9, 0: -1e9}),
    ]
    check_requests(served, 8, VOCAB)
    check_requests([request(max_tokens=1000)], None, VOCAB)
    check_requests([], 8, VOCAB)


@pytest.mark.parametrize(
    "bad, why",
    [
        (request(5, prompt=[]), "the prompt is empty"),
        (request(5, max_tokens=7), "max_tokens 7 exceed .* 8"),
        (request(5, prompt=[1, 10], max_tokens=1), "a token id lies outside the vocabulary of 10"),
        (request(5, prefix=[-1], max_tokens=1), "a token id lies outside the vocabulary of 10"),
        (request(5, prefix_versions=np.array([1]), max_tokens=1), "prefix_versions has 1"),
        (request(5, logit_bias={10: 1}, max_tokens=1), r"\[10\], .* vocabulary of 10"),
        (request(4, max_tokens=1), "its id is used twice in one call"),
    ],
)
def test_the_first_request_that_cannot_be_served_is_named(bad, why):
    with pytest.raises(HybridFlowError, match=f"^request {bad.id}: .*{why}"):
        check_requests(
            [request(4, max_tokens=1), bad, request(6, prompt=[VOCAB], max_tokens=1)], 8, VOCAB
        )


# --- engines ---


def test_generated_completions_come_in_the_order_of_the_requests(engine):
    engine.begin_update(3)
    engine.receive("w", Box.full((2,)), torch.zeros(2))
    engine.end_update()
    done = engine.generate([request(8), request(2, prefix=[5]), request(4, prompt=[7])])
    assert [completion.id for completion in done] == [8, 2, 4]
    assert [completion.response_ids.tolist() for completion in done] == [[2], [5], [7]]
    assert {int(completion.weight_version[0]) for completion in done} == {3}


def test_without_weights_or_in_the_middle_of_an_update_it_is_not_ready(engine):
    with pytest.raises(HybridFlowError, match="has no weights yet; sync the actor"):
        engine.generate([request()])
    with pytest.raises(HybridFlowError, match="call begin_update"):
        engine.receive("w", Box.full((2,)), torch.zeros(2))
    engine.begin_update(1)
    with pytest.raises(HybridFlowError, match="version 1 was begun"):
        engine.generate([request()])
    engine.end_update()
    engine.check_ready()
    assert (engine.version, engine.updating, engine.received) == (1, False, [])


def test_storage_without_a_view_cannot_be_read_back(engine):
    with pytest.raises(HybridFlowError, match="Last gives no view of w"):
        engine.read("w", Box.full((2,)))
    stored = torch.arange(2.0)
    engine.view = lambda name, box: stored[box.slices()]
    assert engine.read("w", Box((1,), (2,))).tolist() == [1.0]


def test_a_proof_is_of_what_can_be_read_and_believes_in_the_version(engine):
    wanted = {"w": (torch.float32, (Box((1,), (2,)),)), "v": (torch.float32, ())}
    engine.begin_update(3)
    engine.expect(wanted)
    assert engine.proof() == {"w": (3, None), "v": (3, None)}

    class Reads(type(engine)):
        def read(self, name, box):
            return torch.arange(2.0)[box.slices()]

    engine.__class__ = Reads
    sums = [int(checksum(torch.tensor([1.0]), wanted["w"][1][0])) % 2**64, 0]
    assert engine.proof() == {"w": (3, sums[0]), "v": (3, sums[1])}


def test_what_an_engine_cannot_do_it_says_by_its_name(engine):
    with pytest.raises(NotImplementedError, match=r"^Last lends no storage"):
        engine.lend("w")


# --- settings ---

SHAPE = ModelShape(
    4, 2, 2, 1, 2, 6, 8, layer={"up": (6, 4)}, before={"embed": (8, 4)}, ties={"head": "embed"}
)


def test_an_engine_that_says_nothing_asks_for_everything_on_every_rank():
    generation = generation_layout(ParallelLayout(dp=4), tp=2)
    planned = EngineSettings().planned_layout(SHAPE, generation, torch.bfloat16)
    whole = {
        "embed": (Box.full((8, 4)),),
        "layers.0.up": (Box.full((6, 4)),),
        "layers.1.up": (Box.full((6, 4)),),
    }
    assert {rank: dict(planned.held[rank]) for rank in planned.held} == dict.fromkeys(
        range(4), whole
    )
    assert planned.ties == {"head": "embed"}
    assert planned.nbytes(3) == 2 * (32 + 24 + 24)


def test_a_config_that_is_no_engine_settings_says_what_the_base_says():
    @attrs.frozen
    class Own(EngineSettings):
        own_process: bool = True

    own = Own()
    assert engine_settings(own) is own
    settings = engine_settings({"own_process": True})
    assert not settings.own_process
    generation = generation_layout(ParallelLayout(), 1, 1)
    assert settings.problems(ModelSpec({}, None, 0), generation, "cpu") == []
    assert settings.limits().max_sequences == 256
    assert settings.one_of(4) is settings
