"""State by boxes: flat ranges against brute force, and files that any cut reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.values.weights import Box
from hybridflow.kit.checkpoint import (
    SavedState,
    StatePart,
    _Place,
    _writers,
    flat_parts,
    load_state,
    save_state,
)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip
def test_flat_parts_are_the_elements_of_the_range(sizes, first, second):
    """Each element of the storage is a number; the parts give those of the range, each once, where they say."""
    start, stop = sorted((first, second))
    pieces, storage, place = [], {}, 0
    for at, (rows, columns, gap) in enumerate(sizes):
        place += gap  # padding
        box = Box((2, 1), (2 + rows, 1 + columns))
        pieces.append((f"p{at}", (9, 9), box, place))
        for i in range(rows):
            for j in range(columns):
                storage[f"p{at}", 2 + i, 1 + j] = place + i * columns + j
        place += box.numel
    found = {}
    for name, shape, box, offset in flat_parts(pieces, start, stop):
        assert shape == (9, 9)
        for n, index in enumerate(
            (i, j)
            for i in range(box.start[0], box.stop[0])
            for j in range(box.start[1], box.stop[1])
        ):
            assert (name, *index) not in found
            found[name, *index] = start + offset + n
    assert found == {key: value for key, value in storage.items() if start <= value < stop}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if mine:
        dist.destroy_process_group()


def parts(whole: torch.Tensor, *cuts: int) -> list[StatePart]:
    """The rows of `whole`, cut at `cuts`."""
    edges = [0, *cuts, len(whole)]
    return [
        StatePart("model.w", tuple(whole.shape), Box.part(whole.shape, 0, a, b), whole[a:b])
        for a, b in pairwise(edges)
    ]


@pytest.mark.parametrize(("saved", "loaded"), [((3,), (5,)), ((), (1, 2, 6)), ((2, 4), ())])
def test_what_one_cut_wrote_another_reads(tmp_path, saved, loaded):
    whole, again = torch.randn(7, 3), torch.zeros(7, 3)
    save_state(parts(whole, *saved), 4, tmp_path, 0).done(wait=True)
    assert load_state(parts(again, *loaded), tmp_path, "actor") == 4
    assert torch.equal(again, whole)


def test_copies_are_written_once_and_read_by_all(tmp_path):
    whole, again, other = (
        torch.randn(4, 2),
        torch.zeros(4, 2),
        torch.zeros(4, 2, dtype=torch.bfloat16),
    )
    save_state([*parts(whole), *parts(whole)], 0, tmp_path, 0).done(wait=True)
    load_state(parts(again), tmp_path, "actor")
    load_state(parts(other), tmp_path, "actor")
    assert torch.equal(again, whole) and torch.equal(other, whole.bfloat16())


def test_what_is_missing_or_shaped_otherwise_is_named(tmp_path):
    whole = torch.randn(4, 2)
    save_state(parts(whole), 0, tmp_path, 0).done(wait=True)
    with pytest.raises(CheckpointError, match=r"'critic' .* no model\.other"):
        load_state(
            [StatePart("model.other", (1,), Box.full((1,)), torch.zeros(1))], tmp_path, "critic"
        )
    with pytest.raises(CheckpointError, match=r"model\.w has shape \(4, 2\) there, \(4, 3\) here"):
        load_state(parts(torch.zeros(4, 3)), tmp_path, "critic")


def test_one_process_reads_entries_without_the_others(tmp_path, recwarn):
    whole = torch.arange(24.0).view(6, 4)
    half = StatePart("model.h", (3,), Box.full((3,)), torch.ones(3, dtype=torch.bfloat16))
    save_state([*parts(whole, 2, 5), half], 7, tmp_path, 0).done(wait=True)
    state = SavedState(tmp_path, "actor")
    assert state.version == 7
    assert state.entries == {"model.w": ((6, 4), torch.float32), "model.h": ((3,), torch.bfloat16)}
    assert torch.equal(state.read("model.w"), whole)
    assert torch.equal(state.read("model.h"), half.values)
    assert not recwarn.list


def test_files_that_one_process_cannot_read_are_named(tmp_path):
    with pytest.raises(DamagedError, match=r"of role 'actor' cannot be read: .*index-\*\.json"):
        SavedState(tmp_path, "actor")
    save_state(parts(torch.ones(2, 2)), 1, tmp_path, 0).done(wait=True)
    state = SavedState(tmp_path, "actor")
    (tmp_path / "rank-00000-0.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"of role 'actor' cannot be read: model\.w"):
        state.read("model.w")


def test_entries_that_the_model_has_not_are_refused(tmp_path):
    whole = torch.randn(4, 2)
    moment = StatePart("optimizer.exp_avg.w", (4, 2), Box.full((4, 2)), torch.randn(4, 2))
    save_state([*parts(whole), moment], 3, tmp_path, 0).done(wait=True)
    again = torch.zeros(4, 2)
    with pytest.raises(
        CheckpointError, match=r"it has optimizer\.exp_avg\.w, which the model here"
    ):
        load_state(parts(again), tmp_path, "actor")
    assert load_state(parts(again), tmp_path, "actor", complete=False) == 3
    assert torch.equal(again, whole)


@pytest.mark.parametrize("cut", [(0, 3), (2, 5), (0, 2)], ids=["short", "late", "gap"])
def test_boxes_that_do_not_make_the_whole_are_refused_at_once(tmp_path, cut):
    whole = torch.randn(5, 3)
    held = [parts(whole, 2)[1], *parts(whole, 3)] if cut == (2, 5) else []
    if not held:
        held = [StatePart("model.w", (5, 3), Box.part((5, 3), 0, *cut), whole[slice(*cut)])]
    with pytest.raises(CheckpointError, match=r"model\.w of shape \(5, 3\) has 15 elements"):
        save_state(held, 0, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_of_ranks_with_copies_the_one_with_least_to_write_writes():
    def place(entry: str, rows: int):
        return _Place(entry, (rows,), "float32", (0,), (rows,))

    large, small, own = place("large", 100), place("small", 10), place("own", 5)
    assert _writers([[large, small, own], [large, small]]) == {large: 0, small: 1, own: 0}
