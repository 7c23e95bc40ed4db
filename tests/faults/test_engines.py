"""Engines and algorithms that do not keep what they promise: said where they break it, with the name."""

from __future__ import annotations

import sys

import pytest

from hybridflow.cli.main import main
from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.plugins import Descriptor, registry

ENGINES = '''
import attrs
import numpy as np

from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.values.weights import Box


class Changed(TransformersEngine):
    """Answers otherwise than it should, from the fourth completion on."""

    seen = 0

    def submit(self, requests):
        for completion in super().submit(requests):
            self.seen += 1
            yield from self.changed(completion) if self.seen > 3 else [completion]


class Twice(Changed):
    def changed(self, completion):
        return [completion, completion]


class Missing(Changed):
    def changed(self, completion):
        return []


class Stranger(Changed):
    def changed(self, completion):
        return [attrs.evolve(completion, id=10_000)]


class ShortLogprobs(Changed):
    def changed(self, completion):
        return [attrs.evolve(completion, logprobs=completion.logprobs[:-1])]


class LongVersions(Changed):
    def changed(self, completion):
        return [attrs.evolve(completion, weight_version=np.zeros(99, np.int64))]


class NaN(Changed):
    def changed(self, completion):
        logprobs = completion.logprobs.copy()
        logprobs[1:2] = np.nan
        return [attrs.evolve(completion, logprobs=logprobs)]


class Reason(Changed):
    def changed(self, completion):
        return [attrs.evolve(completion, finish_reason="tired")]


class TooLong(Changed):
    def changed(self, completion):
        ids, logprobs, versions = (
            np.resize(values, 7)
            for values in (completion.response_ids, completion.logprobs, completion.weight_version)
        )
        return [attrs.evolve(completion, response_ids=ids, logprobs=logprobs, weight_version=versions)]


class Half(TransformersEngine):
    """Says that it takes the upper half of every matrix, and of nothing else less."""

    def layout(self):
        whole = super().layout()
        held = {
            rank: {
                name: tuple(Box.part(box.stop, 0, 0, box.stop[0] // 2) if len(box.stop) > 1 else box for box in boxes)
                for name, boxes in parts.items()
            }
            for rank, parts in whole.held.items()
        }
        return attrs.evolve(whole, held=held)


class Loses(TransformersEngine):
    """Forgets the third request that it gets."""

    taken = 0

    def enter(self, request):
        self.taken += 1
        if self.taken != 3:
            super().enter(request)
'''

ALGORITHM = '''
import torch

from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.core.contracts.loss import Term


class Longer(GRPO):
    """Returns advantages with a token more than there are."""

    @staticmethod
    def advantages(scores, group, loss_mask):
        rows, longest = loss_mask.shape
        return {"advantages": torch.ones(rows, longest + 1)}


class Unknown(GRPO):
    @staticmethod
    def advantages(score, loss_mask):
        return {"advantages": loss_mask}


class Read(PolicyLoss):
    def __call__(self, batch, outputs):
        return Term("loss", outputs["logprobs"] * batch["bonus"])


class Need(PolicyLoss):
    def __call__(self, batch, outputs):
        return Term("loss", outputs["values"])


class Tensor(PolicyLoss):
    def __call__(self, batch, outputs):
        return outputs["logprobs"].mean()


class Detached(PolicyLoss):
    def __call__(self, batch, outputs):
        return [Term("loss", outputs["logprobs"].detach())]


class ReadGRPO(GRPO):
    loss = Read


class NeedGRPO(GRPO):
    loss = Need


class TensorGRPO(GRPO):
    loss = Tensor


class DetachedGRPO(GRPO):
    loss = Detached


class Fewer(GRPO):
    @staticmethod
    def advantages(scores, group, loss_mask):
        return {"advantages": torch.ones(len(loss_mask) - 1, loss_mask.shape[1])}
'''


@pytest.fixture
def engine():
    """The class of the engine "faulty"."""
    return "Loses"


@pytest.fixture
def broken(tiny, capsys, monkeypatch, engine):
    """broken(*settings) -> what `run` prints when it ends with status 1."""
    (tiny / "faulty.py").write_text(ENGINES)
    (tiny / "odd.py").write_text(ALGORITHM)
    known = registry()
    monkeypatch.setattr(known, "_registered", dict(known._registered))  # put back at the end
    can = EngineCapabilities(tp=True, process="either")
    known.add(Descriptor("rollout_engine", "faulty", f"faulty:{engine}", capabilities=can))

    def run(*settings: str) -> str:
        assert main(["run", "tiny.toml", "run.steps=2", *settings]) == 1
        return "".join(capsys.readouterr())

    yield run
    for name in ("faulty", "odd"):
        sys.modules.pop(name, None)


# --- F20: an embedded engine that lost a request span for ever ---


@pytest.mark.timeout(60)
def test_f20_a_request_that_the_embedded_engine_lost_is_named(broken):
    printed = broken("rollout.name=faulty")
    assert "the embedded engine has lost requests 2 (1 of " in printed


# --- F21: a column of [B, T + 1] was cut to [B, T] in silence ---


@pytest.mark.parametrize(("name", "said"), [("Longer", "(16, 5)"), ("Fewer", "(15, 4)")])
def test_f21_a_column_of_another_shape_is_named(broken, name, said):
    printed = broken(f"algorithm.name=odd:{name}")
    assert f"advantages: advantages has shape {said}" in printed
    assert "the token columns that it got are [rows, T] = (16, 4)" in printed
    assert "Traceback" not in printed


# --- F24: columns that are not there ended in a KeyError ---


def test_f24_a_column_that_a_computation_lacks_is_named(broken):
    printed = broken("algorithm.name=odd:Unknown")
    assert "advantages: the batch has no column 'score'" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Read", "the loss Read reads 'bonus', and its `reads` has advantages, loss_mask; add it"),
        (
            "Need",
            "the loss Need reads 'values', and its `needs` has logprobs, entropy; add it there",
        ),
        ("Tensor", "the loss Tensor returned Tensor; it returns a Term, or several in a list"),
        ("Detached", "and has no gradient: its terms do not depend on `outputs`"),
    ],
)
def test_f24_a_loss_that_is_none_is_told_why(broken, name, said):
    printed = broken(f"algorithm.name=odd:{name}GRPO", "algorithm.mini_batch_size=16")
    assert said in printed and "Traceback" not in printed


# --- F22: completions that were none surfaced as an error of tensors in the update ---


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("Twice", "the engine completed it twice"),
        ("Missing", "the engine ended without completions of 13 of 16 requests"),
        ("Stranger", "the engine completed request 10000, which is not one"),
        (
            "ShortLogprobs",
            "a wrong answer of the engine: it has 4 tokens and 3 elements of logprobs",
        ),
        (
            "LongVersions",
            "a wrong answer of the engine: it has 4 tokens and 99 elements of weight_v",
        ),
        ("Reason", "a wrong answer of the engine: finish_reason is 'tired', not one of"),
        ("TooLong", "a wrong answer of the engine: it has 7 tokens, and max_tokens is 4"),
    ],
)
def test_f22_a_wrong_answer_of_an_engine_is_named_by_its_request(broken, said):
    printed = broken("rollout.name=faulty")
    assert said in printed and "Traceback" not in printed


# --- F19: an engine that took half of every matrix kept its first values in the other half ---


@pytest.mark.parametrize("engine", ["Half"])
@pytest.mark.parametrize("settings", [(), ("sync.verify=true",)])
def test_f19_an_engine_that_leaves_out_a_part_of_the_weights_is_refused(broken, settings):
    settings = tuple(f"actor.{setting}" for setting in settings)
    printed = broken("rollout.name=faulty", *settings)
    assert "by its layout(), the engine on rank 0 does not hold [" in printed
    assert "so that a sync would leave it as it is" in printed and "Traceback" not in printed


# --- F26: what was wrong was told, and the run went on ---


@pytest.mark.parametrize("engine", ["NaN"])
def test_f26_a_logprob_that_is_no_number_ends_the_run(broken):
    printed = broken("rollout.name=faulty")
    assert "a wrong answer of the engine: the logprob of its token 1 is nan" in printed
    assert "Traceback" not in printed
