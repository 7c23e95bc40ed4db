"""Jobs as a scheduler of SGLang's does them: their answers in files, and weights from a bucket in their places."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridflow.backends.sglang.places import Ask, Begin, End, Prove, Take, load
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.checksum import checksum
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

    bucket = Bucket(torch.device("cpu"), 64)
    for update in (1, 2):
        values = torch.full((2, 2), float(update))
        assert done(model, Begin(update), path) == (True, None)
        list(bucket.write("w", Box((2, 0), (4, 2)), values, torch.float32))
        assert done(model, Take(bucket.handle(), bucket.taken()), path) == (True, None)
        assert torch.equal(model.own.data[:2], values)
        assert model.own.data[2].tolist() == [0.5, 0.5]
    bucket.close()


def test_weights_go_into_the_tensors_that_the_model_has_when_an_update_begins(tmp_path):
    """SGLang may put new ones into it between two updates: what it has packed, unpacked again."""
    model, path = Rank(), tmp_path / "answer"
    done(model, Ask(PARAMS, {}), path)
    done(model, Begin(1), path)
    old = model.own
    model.own = nn.Parameter(torch.zeros(3, 2))
    assert done(model, Begin(2), path) == (True, None)
    bucket = Bucket(torch.device("cpu"), 96)
    list(bucket.write("w", Box((2, 0), (4, 2)), torch.full((2, 2), 7.0), torch.float32))
    done(model, Take(bucket.handle(), bucket.taken()), path)
    bucket.close()
    assert model.own.tolist() == [[7.0, 7.0], [7.0, 7.0], [0.5, 0.5]]
    assert not (old == 7.0).any()

    model.own = nn.Parameter(torch.zeros(2, 3))
    succeeded, error = done(model, Begin(3), path)
    assert not succeeded and "own is ((2, 3), (3, 1), torch.float32) now, and was ((3, 2)" in str(error)  # fmt: skip


def test_a_scheduler_proves_what_is_in_its_places_and_which_update_brought_it(tmp_path):
    model, path = Rank(), tmp_path / "answer"
    done(model, Ask(PARAMS, {}), path)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = Box((2, 0), (4, 2))
    last = Box((3, 0), (4, 2))
    wanted = {"w": (torch.float32, (last,))}
    bucket = Bucket(torch.device("cpu"), 128)  # not the size of another one with this number
    done(model, Begin(1), path)
    list(bucket.write("w", rows, values, torch.float32))
    done(model, Take(bucket.handle(), bucket.taken()), path)
    right = int(checksum(values[1:], last)) % 2**64
    assert done(model, Prove(wanted), path) == (True, {"w": (1, right)})

    # Another element, and one of a row that is not looked at
    model.own.data[1, 0] = 0.0
    assert done(model, Prove(wanted), path)[1]["w"][1] != right
    model.own.data[:2] = values
    model.own.data[0, 0] = 0.0
    assert done(model, Prove(wanted), path)[1] == {"w": (1, right)}
    # The next update has brought half of it.
    done(model, Begin(2), path)
    list(bucket.write("w", last, values[1:], torch.float32))
    done(model, Take(bucket.handle(), bucket.taken()), path)
    assert done(model, Prove(wanted), path) == (True, {"w": (None, right)})
    bucket.close()


def test_errors_are_answers_for_one_in_a_scheduler_would_end_it(tmp_path):
    more = {**PARAMS, "v": Param((1,), torch.float32)}
    succeeded, error = done(Rank(), Ask(more, {}), tmp_path / "answer")
    assert not succeeded and isinstance(error, ModelError)
    assert "Rank of SGLang does not take v: KeyError" in str(error)

    succeeded, error = done(Rank(), Begin(1), tmp_path / "answer")
    assert not succeeded and isinstance(error, HybridFlowError)
    assert "SGLang's scheduler: KeyError" in str(error)


def test_an_update_ends_where_all_has_come_and_sglang_derives_what_it_keeps(tmp_path):
    pytest.importorskip("sglang")
    path = tmp_path / "answer"

    class Absorbing(Rank):
        """It computes w while it loads, and derives something of it."""

        derived = 0

        def load_weights(self, weights) -> None:
            super().load_weights([(name, values * 2) for name, values in weights])

        def post_load_weights(self) -> None:
            self.derived += 1

    model = Absorbing()
    succeeded, taken = done(model, Ask(PARAMS, {}), path)
    full = Box.full((4, 2))
    assert succeeded and taken.boxes == {"w": (full,)} and "w" in taken.opaque

    bucket = Bucket(torch.device("cpu"), 16)
    done(model, Begin(1), path)
    values = torch.arange(8.0).view(4, 2)
    list(bucket.write("w", Box((0, 0), (2, 2)), values[:2], torch.float32))
    assert done(model, Take(bucket.handle(), bucket.taken()), path) == (True, None)
    succeeded, error = done(model, End(), path)
    assert not succeeded and "lacks 1 of 1 parameters: w (4 of 8 elements came)" in str(error)
    assert not model.derived

    done(model, Begin(1), path)
    for rows in (0, 2):
        half = Box((rows, 0), (rows + 2, 2))
        list(bucket.write("w", half, values[rows : rows + 2], torch.float32))
        assert done(model, Take(bucket.handle(), bucket.taken()), path) == (True, None)
    sent = int(checksum(values, full)) % 2**64
    wanted = {"w": (torch.float32, (full,))}
    assert done(model, Prove(wanted), path) == (True, {"w": (1, sent)})
    assert done(model, End(), path) == (True, None)
    assert model.derived == 1 and torch.equal(model.own.data[:2], values[2:] * 2)
    assert done(model, Prove(wanted), path) == (True, {"w": (1, None)})
    bucket.close()


class RadixAttention(nn.Module):
    """What SGLang's layers of this name say of themselves."""

    def __init__(self, window: int = -1, cap: float = 0.0):
        super().__init__()
        self.sliding_window_size, self.logit_cap = window, cap


class PhiForCausalLM(Rank):
    pass


@pytest.mark.parametrize(
    ("layer", "windows", "problem"),
    [
        (RadixAttention(), 0, None),
        (RadixAttention(window=3), 1, None),
        (RadixAttention(), 1, "has sliding windows in 0 of its 1 layers, and the model has them in 1"),
        (RadixAttention(window=3), 0, "has sliding windows in 1 of its 1 layers, and the model has"),
        (RadixAttention(cap=50.0), 0, "on a CPU leaves out the cap of attention scores"),
    ],
)  # fmt: skip
def test_a_model_that_would_attend_otherwise_is_refused(tmp_path, layer, windows, problem):
    model = Rank()
    model.layer = layer
    succeeded, said = done(model, Ask(PARAMS, {}, windows), tmp_path / "answer")
    assert succeeded == (problem is None)
    assert problem is None or (isinstance(said, ModelError) and problem in str(said))


def test_a_class_that_computes_other_values_is_refused(tmp_path):
    succeeded, said = done(PhiForCausalLM(), Ask(PARAMS, {}), tmp_path / "answer")
    assert not succeeded and "leaves out the bias of its head" in str(said)
