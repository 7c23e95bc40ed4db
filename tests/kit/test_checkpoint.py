"""State by boxes: flat ranges against brute force, and files that any cut reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from hybridflow.core.errors import CheckpointError
from hybridflow.core.values.weights import Box
from hybridflow.kit.checkpoint import SavedState, StatePart, flat_parts, load_state, save_state


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
    save_state(parts(whole, *saved), 4, tmp_path, 0)
    assert load_state(parts(again, *loaded), tmp_path, "actor") == 4
    assert torch.equal(again, whole)


def test_copies_are_written_once_and_read_by_all(tmp_path):
    whole, again, other = (
        torch.randn(4, 2),
        torch.zeros(4, 2),
        torch.zeros(4, 2, dtype=torch.bfloat16),
    )
    save_state([*parts(whole), *parts(whole)], 0, tmp_path, 0)
    load_state(parts(again), tmp_path, "actor")
    load_state(parts(other), tmp_path, "actor")
    assert torch.equal(again, whole) and torch.equal(other, whole.bfloat16())


def test_what_is_missing_or_shaped_otherwise_is_named(tmp_path):
    whole = torch.randn(4, 2)
    save_state(parts(whole), 0, tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"'critic' .* no model\.other"):
        load_state(
            [StatePart("model.other", (1,), Box.full((1,)), torch.zeros(1))], tmp_path, "critic"
        )
    with pytest.raises(CheckpointError, match=r"model\.w has shape \(4, 2\) there, \(4, 3\) here"):
        load_state(parts(torch.zeros(4, 3)), tmp_path, "critic")


def test_one_process_reads_entries_without_the_others(tmp_path, recwarn):
    whole = torch.arange(24.0).view(6, 4)
    half = StatePart("model.h", (3,), Box.full((3,)), torch.ones(3, dtype=torch.bfloat16))
    save_state([*parts(whole, 2, 5), half], 7, tmp_path, 0)
    state = SavedState(tmp_path, "actor")
    assert state.version == 7
    assert state.entries == {"model.w": ((6, 4), torch.float32), "model.h": ((3,), torch.bfloat16)}
    assert torch.equal(state.read("model.w"), whole)
    assert torch.equal(state.read("model.h"), half.values)
    assert not recwarn.list


def test_files_that_one_process_cannot_read_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="of role 'actor' cannot be read: FileNotFoundError"):
        SavedState(tmp_path, "actor")
    save_state(parts(torch.ones(2, 2)), 1, tmp_path, 0)
    state = SavedState(tmp_path, "actor")
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match="of role 'actor' cannot be read"):
        state.read("model.w")
