"""What the tracer says of a loader is what the loader does, or the parameter is opaque.

Each habit of a loader is run twice: traced, and really. The expected tensor is the real run's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.tracer import trace

HEADS, SIZE, WIDTH = 4, 3, 5


@attrs.frozen
class Habit:
    shape: tuple[int, ...]
    """Of the parameter."""
    home: tuple[int, ...]
    """Of the loader's tensor."""
    load: Callable[[torch.Tensor, torch.Tensor], object]
    """(tensor, parameter) -> None."""


def split_heads(home, w):
    home.copy_(w.view(HEADS, 3, SIZE, WIDTH).transpose(0, 1).reshape(-1, WIDTH)[HEADS * SIZE :])


def grouped_heads(home, w):
    v = w.view(2, 4, SIZE, WIDTH)
    q, k, v = (part.reshape(-1, WIDTH) for part in (v[:, :2], v[:, 2:3], v[:, 3:4]))
    home.copy_(torch.cat([q, k, v], 0))


def experts(home, w):
    for expert in range(2):
        home[expert, :4].copy_(w[expert + 1, :, :4].t())


def chunks(home, w):
    for i, chunk in enumerate(w.chunk(3, 1)):
        home[i].copy_(chunk)


def in_threads(home, w):
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda i: home[i].copy_(w[i]), range(len(w))))


def padded(home, w):
    home[:3].copy_(w)
    home[3:].fill_(7.0)


def through_a_copy(home, w):
    between = w.t().contiguous().view(4, 3, 2).transpose(1, 2).contiguous()
    home.copy_(between[1:3].reshape(4, 3))


MAPPED = {
    "rows": Habit((9, 5), (8, 5), lambda home, w: home[2:6].copy_(w[4:8])),
    "columns": Habit((4, 6), (4, 2), lambda home, w: home.copy_(w[:, 2:4])),
    "transposed": Habit((4, 6), (6, 4), lambda home, w: home.copy_(w.t())),
    "interleaved by head": Habit(
        (12, 5), (24, 5), lambda home, w: home.view(4, 2, 3, 5)[:, 1].copy_(w.view(4, 3, 5))
    ),
    "interleaved by row": Habit(
        (12, 5), (24, 5), lambda home, w: home.view(4, 3, 2, 5)[:, :, 0].copy_(w.view(4, 3, 5))
    ),
    "flat, whole rows": Habit((4, 5), (10,), lambda home, w: home.copy_(w.reshape(-1)[5:15])),
    "experts, transposed": Habit((3, 3, 5), (2, 6, 3), experts),
    "every second row": Habit((6, 4), (3, 4), lambda home, w: home.copy_(w[::2])),
    "padded": Habit((3, 2), (5, 2), padded),
    "broadcast": Habit((4,), (3, 4), lambda home, w: home.copy_(w)),
    "to, contiguous, clone": Habit(
        (4, 4), (3, 4), lambda home, w: home.copy_(w.to("cpu").contiguous().clone()[1:])
    ),
    "concatenated": Habit((3, 4), (3, 4), lambda home, w: home.copy_(torch.cat([w[1:], w[:1]]))),
    "part of a concatenation": Habit(
        (6, 3), (4, 2), lambda home, w: home.copy_(torch.cat([w[2:], w[:1]], 0)[1:, 1:])
    ),
    "an index assigned": Habit(
        (3, 3), (4, 4), lambda h, w: h.__setitem__((slice(1, 3), 2), w[0:2, 1])
    ),
    "copies of copies": Habit((6, 4), (4, 3), through_a_copy),
    "fused heads, split": Habit((3 * 12, 5), (2 * 12, 5), split_heads),
    "fused groups, split": Habit((24, 5), (24, 5), grouped_heads),
    "chunks": Habit((4, 6), (3, 4, 2), chunks),
    "in threads": Habit((3, 4), (3, 4), in_threads),
    "a scalar": Habit((), (2,), lambda home, w: home[1].copy_(w)),
}
OPAQUE = {
    "computed": Habit((3, 4), (3, 4), lambda home, w: home.copy_(w + 1)),
    "by index": Habit((3, 4), (3, 4), lambda home, w: home.copy_(w[torch.tensor([1, 0, 2])])),
    "another dtype": Habit((3, 4), (3, 4), lambda home, w: home.copy_(w.to(torch.bfloat16))),
    "bits": Habit(
        (3, 4), (3, 4), lambda home, w: home.view(torch.int32).copy_(w.view(torch.int32))
    ),
    "looked at": Habit((1,), (1,), lambda home, w: home.fill_(float(w[0]))),
    "changed before": Habit((3, 4), (3, 4), lambda home, w: home.copy_(w.mul_(2))),
    "changed after": Habit((3, 4), (3, 4), lambda home, w: home.copy_(w).add_(1)),
    "a mask": Habit((3, 4), (3, 4), lambda home, w: home.__setitem__(w > 0, 1.0)),
    "a copy that is changed": Habit(
        (4, 5), (5, 4), lambda home, w: home.copy_(w.t().contiguous().add_(1))
    ),
    "beside other values": Habit(
        (4, 3), (5, 3), lambda home, w: home.copy_(torch.cat([w[2:], torch.zeros(3, 3)], 0))
    ),
    "part of two rows": Habit((3, 4), (5,), lambda home, w: home.copy_(w.reshape(-1)[2:7])),
    "a function of what is there": Habit(
        (3, 4), (3, 4), lambda home, w: home.copy_(-torch.exp(home.copy_(w)))
    ),
}


def traced(habit: Habit):
    home = torch.zeros(habit.home)
    found = trace(
        lambda pairs: habit.load(home, pairs[0][1]),
        {"home": home},
        {"w": Param(habit.shape, torch.float32)},
    )
    assert not home.any()  # tracing writes nothing
    return found


@pytest.mark.parametrize("name", MAPPED)
def test_the_map_writes_what_the_loader_writes(name):
    habit = MAPPED[name]
    found = traced(habit)
    assert not found.opaque

    values = torch.randn(habit.shape)
    by_map = torch.full(habit.home, -1.0)
    for window, constant in found.fills:
        window.of(by_map).fill_(constant)
    for box, window in found.pieces["w"]:
        window.of(by_map).copy_(values[box.slices()])

    by_loader = torch.full(habit.home, -1.0)
    habit.load(by_loader, values.clone())
    assert torch.equal(by_map, by_loader)


@pytest.mark.parametrize("name", OPAQUE)
def test_what_no_map_describes_is_opaque_with_a_reason(name):
    found = traced(OPAQUE[name])
    assert found.opaque["w"]
    assert "w" not in found.pieces


def test_a_loader_that_ignores_or_refuses_a_name_says_so():
    def load(pairs):
        if pairs[0][0] == "refused":
            raise KeyError("refused")

    shape = Param((2,), torch.float32)
    found = trace(load, {}, {"ignored": shape, "refused": shape})
    assert found.pieces == {"ignored": ()}
    assert found.opaque == {"refused": "KeyError: 'refused'"}


def test_many_parameters_are_one_call_and_an_unclean_one_takes_few_more():
    home = torch.empty(64, 4, device="meta")
    calls = []

    def load(pairs):
        calls.append([])
        for name, source in pairs:
            calls[-1].append(name)
            row = int(name[1:])
            home[row].copy_(source * 2 if row in doubled else source)
            home[row, 3:].fill_(0)

    params = {f"w{row}": Param((4,), torch.float32) for row in range(64)}
    doubled: set[int] = set()
    found = trace(load, {"home": home}, params)
    assert calls == [list(params)] and not found.opaque
    assert found.pieces["w9"][0][1].offset == 9 * 4

    # Halves of 64, 32, ... 2 around it: 6 pairs of calls behind the first.
    calls.clear()
    doubled.add(9)
    again = trace(load, {"home": home}, params)
    assert len(calls) == 13 and dict(again.opaque) == {"w9": "it is computed"}
    assert again.pieces == {name: held for name, held in found.pieces.items() if name != "w9"}
    assert set(again.fills) == set(found.fills) and again.touched == found.touched


def test_a_loader_that_sorts_what_it_gets_is_asked_one_by_one():
    home = torch.empty(3, 4, device="meta")

    def load(pairs):
        for name, source in sorted(pairs, reverse=True):
            home[int(name)].copy_(source)

    found = trace(load, {"home": home}, {str(row): Param((4,), torch.float32) for row in range(3)})
    assert [found.pieces[str(row)][0][1].offset for row in range(3)] == [0, 4, 8]
    assert not found.opaque


def test_a_source_that_is_kept_for_later_is_opaque():
    kept = []
    found = trace(kept.extend, {}, {"w": Param((2, 2), torch.float32)})
    assert found.opaque == {"w": "the loader keeps it for later"}


def test_values_of_two_parameters_in_one_are_opaque():
    home = torch.zeros(4)
    halves = {}

    def load(pairs):
        halves.update(pairs)
        if len(halves) == 2:
            home.copy_(torch.cat(list(halves.values())))

    shape = Param((2,), torch.float32)
    found = trace(load, {"home": home}, {"a": shape, "b": shape})
    assert set(found.opaque) == {"a", "b"}


def test_experts_that_are_copied_one_by_one_are_one_piece():
    home = torch.zeros(3, 6, 2)

    def load(pairs):
        for expert in range(3):
            home[expert, 2:4].copy_(pairs[0][1][expert])

    found = trace(load, {"home": home}, {"w": Param((3, 2, 2), torch.float32)})
    ((box, window),) = found.pieces["w"]
    assert box == Box((0, 0, 0), (3, 2, 2))
    assert (window.offset, window.size, window.stride) == (4, (3, 2, 2), (12, 2, 1))


def test_a_box_that_goes_to_two_windows_is_received_once():
    home = torch.zeros(6, 2)

    def load(pairs):
        home[:4].copy_(pairs[0][1])
        home[4:].copy_(pairs[0][1][1:3])

    found = trace(load, {"home": home}, {"w": Param((4, 2), torch.float32)})
    assert len(found.pieces["w"]) == 2
    assert found.boxes("w") == (Box((0, 0), (4, 2)),)
