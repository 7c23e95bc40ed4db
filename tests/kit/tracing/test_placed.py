"""Boxes copied to the places of a small model whose loader fuses, pads and ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.core.values.checksum import checksum
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.placed import PlacedWeights

PARAMS = {
    "q": Param((4, 3), torch.float32),
    "k": Param((2, 3), torch.float32),
    "embed": Param((5, 3), torch.float32),
}


class Fused(nn.Module):
    """A rank of two: it takes the second half of q and k into one tensor, and pads the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(3, 3))
        self.embed = nn.Parameter(torch.zeros(8, 3))
        if not tied:
            self.head = nn.Parameter(torch.zeros(5, 3))
        self.register_buffer("scale", torch.ones(2))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, values in weights:
            if name == "q":
                self.qk.data[:2].copy_(values[2:])
            elif name == "k":
                self.qk.data[2:].copy_(values[1:])
            elif name == "embed":
                self.embed.data[:5].copy_(values)
                self.embed.data[5:].fill_(0)
            elif name == "head" and hasattr(self, "head"):
                self.head.data.copy_(values)


def placed(model: Fused, load: Callable | None = None, ties: dict[str, str] | None = None):
    device = torch.device("cpu")
    weights = PlacedWeights(
        load or model.load, model.tensors(), PARAMS, ties or {}, "Fused", device
    )
    weights.untie()
    return weights


def test_boxes_go_where_the_loader_puts_them():
    model, expected = Fused(), Fused()
    weights = placed(model)
    weights.prove()
    assert weights.boxes("q") == (Box((2, 0), (4, 3)),)
    assert weights.boxes("k") == (Box((1, 0), (2, 3)),)
    assert weights.boxes("embed") == (Box((0, 0), (5, 3)),)

    values = {name: torch.randn(param.shape) for name, param in PARAMS.items()}
    expected.load(list(values.items()))
    weights.fill()
    # Row by row, and with rows that this rank does not take.
    for name, whole in values.items():
        for row in range(len(whole)):
            weights.receive(name, Box((row, 0), (row + 1, 3)), whole[row : row + 1])
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert model.scale.tolist() == [1.0, 1.0]


def test_a_head_that_the_model_keeps_apart_gets_the_values_that_it_is_tied_to():
    model = Fused(tied=False)
    weights = placed(model, ties={"head": "embed"})
    weights.prove()
    whole = torch.randn(5, 3)
    weights.receive("embed", Box.full((5, 3)), whole)
    assert torch.equal(model.head.data, whole) and torch.equal(model.embed.data[:5], whole)


def test_a_parameter_of_the_model_without_a_source_ends_the_start():
    with pytest.raises(ModelError, match="none of the checkpoint's parameters gives head"):
        placed(Fused(tied=False)).prove()


def shifting(model: Fused) -> Callable:
    """A loader that takes other rows when it sees real values."""

    def load(weights) -> None:
        for name, values in weights:
            moved = name == "q" and values.device.type != "meta"
            model.load([(name, values.roll(1, 0) if moved else values)])

    return load


def more(model: Fused) -> Callable:
    """A loader that writes one element more, of another parameter, when it sees real values."""

    def load(weights) -> None:
        model.load(weights)
        if weights[0][0] == "k" and weights[0][1].device.type != "meta":
            model.qk.data[0, 0] = 7.0

    return load


def half(model: Fused) -> Callable:
    """A loader that takes a part of what the tensor has room for."""

    def load(weights) -> None:
        for name, values in weights:
            if name == "q":
                model.qk.data[:1].copy_(values[2:3])
            else:
                model.load([(name, values)])

    return load


def refusing(model: Fused) -> Callable:
    def load(weights) -> None:
        if weights[0][0] == "k":
            raise KeyError("k")
        model.load(weights)

    return load


@pytest.mark.parametrize(
    ("habit", "told"),
    [
        (shifting, "its loader brings other values of q to qk than was traced"),
        (more, "its loader brings other values of q to qk than was traced"),
        (half, "nothing gives 3 of 9 elements of qk their values"),
        (refusing, "Fused does not take k: KeyError"),
    ],
)
def test_a_map_that_is_not_what_the_loader_does_ends_the_start(habit, told):
    model = Fused()
    with pytest.raises(ModelError, match=told):
        placed(model, habit(model)).prove()


def doubling(model: Fused) -> Callable:
    """A loader that computes one parameter, in the memory that it is given."""

    def load(weights) -> None:
        for name, values in weights:
            model.load([(name, values.mul_(2) if name == "embed" else values)])

    return load


def test_an_opaque_parameter_is_handed_to_the_loader_once_it_is_whole():
    model = Fused()
    weights = placed(model, doubling(model))
    weights.prove()
    full = Box.full((5, 3))
    assert weights.boxes("embed") == (full,) and "embed" in weights.map.opaque

    wanted = {"embed": (torch.float32, (full,)), "q": (torch.float32, (Box((2, 0), (4, 3)),))}
    for version in (1, 2):
        values = {name: torch.randn(param.shape) for name, param in PARAMS.items()}
        model.embed.data.zero_()
        weights.begin(version)
        weights.fill()
        for name, whole in values.items():
            weights.receive(name, Box((2, 0), tuple(whole.shape)), whole[2:])
        weights.receive("k", Box((0, 0), (2, 3)), values["k"])
        assert not model.embed.any()
        weights.receive("embed", Box((0, 0), (2, 3)), values["embed"][:2])
        assert torch.equal(model.embed[:5], values["embed"] * 2)

        # The proof is of what the loader was given, and of the tensors for the others.
        weights.expect(wanted)
        sums = {
            "embed": int(checksum(values["embed"], full)) % 2**64,
            "q": int(checksum(values["q"][2:], wanted["q"][1][0])) % 2**64,
        }
        assert weights.proof() == {name: (version, total) for name, total in sums.items()}
        weights.end()
        assert weights.proof() == {"embed": (version, None), "q": (version, sums["q"])}


def test_an_update_brings_everything_and_once():
    model = Fused()
    weights = placed(model, doubling(model))
    values = {name: torch.randn(param.shape) for name, param in PARAMS.items()}
    q = Box((2, 0), (4, 3))

    weights.begin(1)
    weights.receive("q", q, values["q"][2:])
    weights.receive("embed", Box((0, 0), (4, 3)), values["embed"][:4])
    weights.expect({"q": (torch.float32, ()), "embed": (torch.float32, ())})
    assert {name: version for name, (version, _) in weights.proof().items()} == {"q": 1, "embed": None}  # fmt: skip
    with pytest.raises(HybridFlowError, match="elements of q twice"):
        weights.receive("q", q, values["q"][2:])
    with pytest.raises(HybridFlowError, match=r"lacks 2 of 3 parameters: k, embed \(12 of 15"):
        weights.end()

    # What was left half done is no part of the next one.
    weights.begin(2)
    weights.receive("embed", Box((0, 0), (4, 3)), values["embed"][:4])
    with pytest.raises(HybridFlowError, match="lacks 3 of 3 parameters"):
        weights.end()


@pytest.mark.parametrize(
    ("name", "box", "shape", "told"),
    [
        ("c", Box((0,), (1,)), (1,), "no parameter 'c'"),
        ("tied", Box((0,), (1,)), (1,), "tied is tied to embed"),
        ("q", Box((0, 0), (5, 3)), (5, 3), r"q has shape \(4, 3\)"),
        ("q", Box((0, 0), (4, 3)), (2, 3), r"got a tensor of shape \(2, 3\)"),
    ],
)
def test_what_is_not_of_the_model_is_refused(name, box, shape, told):
    weights = placed(Fused(), ties={"tied": "embed"})
    weights.begin(1)
    with pytest.raises(HybridFlowError, match=told):
        weights.receive(name, box, torch.zeros(shape))
