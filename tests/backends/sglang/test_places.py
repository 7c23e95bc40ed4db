"""Jobs as a scheduler of SGLang's does them: their answers in files, and weights from a bucket in their places."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridflow.backends.sglang.places import Ask, Derive, Fill, Take, load
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.hosting.bucket import Bucket

PARAMS = {"w": Param((4, 2), torch.float32)}


class Rank(nn.Module):
    """It takes rows 2 and 3, and has a row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3, 2))

    def load_weights(self, weights) -> None:
        for name, values in weights:
            if name != "w":
                raise KeyError(name)
            self.own.data[:2].copy_(values[2:])
            self.own.data[2].fill_(0.5)


def done(model: nn.Module, job: Any, path: Path) -> tuple[bool, Any]:
    """What a scheduler answers, by the road that SGLang takes."""
    packed = torch.frombuffer(bytearray(pickle.dumps(job)), dtype=torch.uint8)
    load(model, [(str(path), packed)])
    answer = pickle.loads(path.read_bytes())
    path.unlink()
    assert not list(path.parent.iterdir())
    return answer


def test_a_scheduler_says_what_it_takes_and_takes_it_from_the_bucket(tmp_path):
    model, path = Rank(), tmp_path / "answer"
    succeeded, taken = done(model, Ask(PARAMS, {}), path)
    assert succeeded and taken.opaque == {}
    assert taken.boxes == {"w": (Box((2, 0), (4, 2)),)}

    assert done(model, Fill(), path) == (True, None)
    assert model.own.data[2].tolist() == [0.5, 0.5]

    bucket = Bucket(torch.device("cpu"), 64)
    for values in (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])):
        list(bucket.write("w", Box((2, 0), (4, 2)), values, torch.float32))
        assert done(model, Take(bucket.handle(), bucket.taken()), path) == (True, None)
        assert torch.equal(model.own.data[:2], values)
    bucket.close()


def test_errors_are_answers_for_one_in_a_scheduler_would_end_it(tmp_path):
    more = {**PARAMS, "v": Param((1,), torch.float32)}
    succeeded, error = done(Rank(), Ask(more, {}), tmp_path / "answer")
    assert not succeeded and isinstance(error, ModelError)
    assert "Rank of SGLang does not take v: KeyError" in str(error)

    succeeded, error = done(Rank(), Fill(), tmp_path / "answer")
    assert not succeeded and isinstance(error, HybridFlowError)
    assert "SGLang's scheduler: KeyError" in str(error)


def test_sglang_derives_what_its_models_keep_beside_their_weights(tmp_path):
    pytest.importorskip("sglang")

    class Absorbing(Rank):
        derived = 0

        def post_load_weights(self) -> None:
            self.derived += 1

    model = Absorbing()
    assert done(model, Derive(), tmp_path / "answer") == (True, None)
    assert model.derived == 1 and done(Rank(), Derive(), tmp_path / "answer") == (True, None)
