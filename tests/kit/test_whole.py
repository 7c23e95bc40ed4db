"""Whole parameters out of boxes, for engines that cut them themselves."""

import pytest
import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.whole import WholeParameters

PARAMS = {"a": Param((4, 3), torch.float32), "b": Param((5,), torch.float32)}
A, B = torch.arange(12.0).view(4, 3), torch.arange(5.0)


def test_every_rank_holds_everything_and_gives_no_view():
    store = WholeParameters(PARAMS, {"tied": "a"}, torch.device("cpu"), print)
    layout = store.layout(2)
    assert layout.held[1] == {n: (Box.full(p.shape),) for n, p in PARAMS.items()}
    assert layout.opaque == set(PARAMS) and layout.ties == {"tied": "a"}


@pytest.fixture
def store():
    loaded = {}
    found = WholeParameters(PARAMS, {"tied": "a"}, torch.device("cpu"), loaded.__setitem__)
    found.loaded = loaded
    return found


def give(store, name, values, start, stop):
    box = Box(start, stop)
    store.receive(name, box, values[box.slices()])


def test_each_parameter_is_handed_over_once_it_is_whole(store):
    store.begin()
    give(store, "a", A, (2, 0), (4, 3))
    give(store, "a", A, (0, 0), (2, 2))
    assert not store.loaded
    give(store, "b", B, (0,), (5,))
    assert list(store.loaded) == ["b"]
    give(store, "a", A, (0, 2), (2, 3))
    assert torch.equal(store.loaded["a"], A) and not store._parts
    store.end()


def test_a_broken_off_update_leaves_nothing_to_the_next(store):
    store.begin()
    give(store, "a", A, (2, 0), (4, 3))
    with pytest.raises(
        HybridFlowError, match=r"lacks 2 of 2 parameters: a \(6 of 12 elements came\), b"
    ):
        store.end()
    store.begin()
    give(store, "a", A + 1, (0, 0), (2, 3))
    give(store, "a", A + 1, (2, 0), (4, 3))
    give(store, "b", B, (0,), (5,))
    store.end()
    assert torch.equal(store.loaded["a"], A + 1)


def test_every_update_brings_everything_once(store):
    for names in (["a"], ["a", "b"], ["b"]):
        store.begin()
        for name in names:
            whole = {"a": A, "b": B}[name]
            give(store, name, whole, (0,) * whole.dim(), tuple(whole.shape))
        if len(names) == 2:
            store.end()
            continue
        with pytest.raises(HybridFlowError, match="lacks 1 of 2 parameters"):
            store.end()
    with pytest.raises(HybridFlowError, match="elements of b twice"):
        give(store, "b", B, (4,), (5,))


@pytest.mark.parametrize(
    "name, box, shape, said",
    [("c", Box((0,), (1,)), (1,), "no parameter 'c'"), ("tied", Box((0,), (1,)), (1,), "tied to a"),
     ("b", Box((0,), (6,)), (6,), "has shape"), ("b", Box((0,), (5,)), (4,), "has shape")],
)  # fmt: skip
def test_what_is_not_of_the_model_is_refused(store, name, box, shape, said):
    store.begin()
    with pytest.raises(HybridFlowError, match=said):
        store.receive(name, box, torch.zeros(shape))
