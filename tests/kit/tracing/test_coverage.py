"""Parameters of a model without a source, and values that nobody takes."""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.coverage import check_taken, say_opaque, unfilled

PARAMS = {"a": Param((4, 2), torch.float32), "b": Param((3,), torch.float32)}
LEFT = {"a": (Box((0, 0), (4, 1)),)}
RIGHT = {"a": (Box((0, 1), (3, 2)),), "b": (Box((0,), (3,)),)}
WHOLE = {"a": (Box.full((4, 2)),), "b": (Box.full((3,)),)}


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([LEFT, RIGHT], "Model of E takes only 7 of 8 elements of a of this qwen2: it would"),
        ([LEFT], "Model of E takes only 4 of 8 elements of a and 1 more of this qwen2"),
        ([{"a": WHOLE["a"]}], "Model of E takes no b of this qwen2"),
    ],
)
def test_what_no_rank_takes_is_told_with_its_size(ranks, told):
    with pytest.raises(ModelError, match=told):
        check_taken(PARAMS, ranks, "Model of E", "qwen2")


def test_ranks_may_take_the_same_and_each_a_part():
    check_taken(PARAMS, [WHOLE, WHOLE], "Model of E", "qwen2")
    check_taken(PARAMS, iter([RIGHT, LEFT, {"a": (Box((3, 1), (4, 2)),)}]), "Model of E", "qwen2")


def test_a_parameter_without_a_source_is_named_but_not_a_tied_one_or_a_buffer():
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    tied = torch.nn.Parameter(one.data)
    tensors = {"one": one, "tied": tied, "two": two, "scale": torch.ones(1)}
    assert list(unfilled(tensors, {"one"})) == ["two"]
    assert list(unfilled(tensors, {"tied", "two"})) == []


def test_opaque_parameters_are_told_of(capsys):
    say_opaque({}, 3, "E")
    assert not capsys.readouterr().out
    say_opaque({"a": "it is computed", "b": "it is kept"}, 3, "E")
    assert capsys.readouterr().out.startswith("2 of 3 parameters come whole to each rank of E, as")
