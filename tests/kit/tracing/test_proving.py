"""What a proof gives a loader, and what it notices of one that does otherwise than it was traced."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.proving import pattern, problems_of, take_pattern, write_pattern
from hybridflow.kit.tracing.tracer import LoaderMap
from hybridflow.kit.tracing.windows import Window

CPU = torch.device("cpu")
W = Param((6, 4), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (5, 8), (3, 4, 5)], ids=str)
def test_a_part_has_the_values_of_the_whole_and_every_dtype_has_them(dtype, shape):
    param, full = Param(shape, dtype), Box.full(shape)
    whole = pattern("w", param, full, CPU)
    assert whole.dtype == dtype and whole.shape == shape
    assert torch.equal(whole, pattern("w", Param(shape, torch.float64), full, CPU).to(dtype))
    part = Box(tuple(n // 3 for n in shape), shape)
    assert torch.equal(pattern("w", param, part, CPU), whole[part.slices()])


def test_values_tell_names_and_places_apart():
    param = Param((64, 64), torch.bfloat16)
    values = pattern("a", param, Box.full(param.shape), CPU)
    assert values.min() == -128 and values.max() == 127
    # A row, a column and a diagonal further, transposed, and of another name: 1 of 256 agrees by chance.
    others = [values.roll(1, 0), values.roll(1, 1), values.roll((1, -1), (0, 1)), values.t()]
    others += [
        values.roll(32, 0),
        values.roll(16, 1),
        pattern("b", param, Box.full(param.shape), CPU),
    ]
    for other in others:
        assert (other == values).float().mean() < 0.02


@pytest.mark.parametrize("shape", [(), (7,), (5, 8)], ids=str)
def test_what_is_written_can_be_taken_once_and_leaves_the_pattern_as_it_was(shape):
    param, full = Param(shape, torch.bfloat16), Box.full(shape)
    values = torch.empty(shape, dtype=torch.bfloat16)
    for _ in range(2):
        write_pattern("w", values)
        assert torch.equal(values, pattern("w", param, full, CPU))
        assert take_pattern("w", param, full, values) and bool(values.isnan().all())
    assert not take_pattern("w", param, full, values)


class Padded(nn.Module):
    """It takes rows 2 to 5 of w, and has a row of padding; b is computed into a tensor of c's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5, 4))
        self.bc = nn.Parameter(torch.zeros(4))

    def load(self, weights) -> None:
        for name, values in weights:
            if name == "w":
                self.w.data[:4] = values[2:]
                self.w.data[4] = 0.5
            elif name == "b":
                self.bc.data[:2] = values * 2
            elif name == "c":
                self.bc.data[2:] = values


MAP = LoaderMap(
    pieces={
        "w": ((Box((2, 0), (6, 4)), Window("w", 0, (4, 4), (4, 1))),),
        "c": ((Box((0,), (2,)), Window("bc", 2, (2,), (1,))),),
    },
    fills=((Window("w", 16, (4,), (1,)), 0.5),),
    opaque={"b": "computed"},
    touched={"w": frozenset({"w"}), "b": frozenset({"bc"}), "c": frozenset({"bc"})},
)
PARAMS = {"w": W, "b": Param((2,), torch.float32), "c": Param((2,), torch.float32)}


def found(load=None) -> list[str]:
    model = Padded()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        return list(problems_of(load or model.load, MAP, PARAMS, tensors, list(PARAMS), {}))


def planted(change):
    """Load as Padded does, and then change what is there."""

    def make():
        model = Padded()

        def load(weights):
            model.load(weights)
            change(model, weights[0][0])

        tensors = dict(model.named_parameters())
        with torch.no_grad():
            return list(problems_of(load, MAP, PARAMS, tensors, list(PARAMS), {}))

    return make


def rolled(model, name):
    if name == "w":
        model.w.data[:4] = model.w.data[:4].roll(1, 0)


def other_padding(model, name):
    model.w.data[4] = 0.25


def beside_an_opaque_one(model, name):
    """One opaque parameter excuses its own elements, not those of its neighbours."""
    if name == "c":
        model.bc.data[2:] = model.bc.data[2:].flip(0)


def test_a_loader_that_does_as_it_was_traced_has_no_problems():
    assert found() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rolled, "its loader brings other values of w to w than was traced"),
        (other_padding, "its loader writes more of w than was traced"),
        (beside_an_opaque_one, "its loader brings other values of c to bc than was traced"),
    ],
)
def test_another_element_is_noticed(change, said):
    assert planted(change)() == [said]


def test_an_element_without_a_source_is_told_also_where_the_map_agrees():
    class Long(Padded):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(7, 4))

    model = Long()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        told = list(problems_of(model.load, MAP, PARAMS, tensors, list(PARAMS), {}))
    assert told == ["nothing gives 8 of 28 elements of w their values"]


def test_zeros_that_were_not_traced_are_told_too():
    """An update would leave out what a loader writes there."""

    class Zeroing(Padded):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(7, 4))

        def load(self, weights) -> None:
            super().load(weights)
            self.w.data[5:] = 0.0

    model = Zeroing()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        told = list(problems_of(model.load, MAP, PARAMS, tensors, list(PARAMS), {}))
    assert told == ["its loader writes more of w than was traced"]


def test_two_values_for_one_element_are_told():
    """The later one is there: the map says that the earlier one is, too."""
    both = {**MAP.pieces, "c": (*MAP.pieces["c"], (Box((0,), (1,)), Window("bc", 3, (1,), (1,))))}
    model = Padded()
    with torch.no_grad():
        tensors = dict(model.named_parameters())
        told = list(
            problems_of(
                model.load, attrs.evolve(MAP, pieces=both), PARAMS, tensors, list(PARAMS), {}
            )
        )
    assert told == ["its loader brings other values of c to bc than was traced"]


def test_values_are_compared_in_the_dtype_of_their_place():
    """A float32 tensor in a bfloat16 model, such as a router's bias."""
    model = Padded()
    params = {name: Param(param.shape, torch.bfloat16) for name, param in PARAMS.items()}
    with torch.no_grad():
        tensors = dict(model.named_parameters())
        assert not list(problems_of(model.load, MAP, params, tensors, list(params), {}))


def test_a_loader_that_refuses_real_values_is_told_of():
    def refusing(weights):
        raise KeyError(weights[0][0])

    assert "its loader refuses w: KeyError: 'w'" in found(refusing)


def test_values_of_a_tied_name_are_loaded_too():
    given = []
    model = Padded()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        list(problems_of(given.extend, MAP, PARAMS, tensors, ["w"], {"w": ["x"]}))
    assert [name for name, _ in given] == ["w", "x"] and torch.equal(given[0][1], given[1][1])
