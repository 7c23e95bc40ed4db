"""Copies of a rank's state, which are written while the state changes."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from helpers.waiting import eventually
from safetensors.torch import load_file

from hybridflow.core.errors import CheckpointError
from hybridflow.core.processes.look import state_of
from hybridflow.core.values.weights import Box
from hybridflow.kit import checkpoint_saving as module
from hybridflow.kit.checkpoint_files import Index, StatePart
from hybridflow.kit.checkpoint_saving import RankWriter, rank_writer


@pytest.fixture
def writer():
    """A writer of this test alone."""
    made = RankWriter()
    yield made
    made.connection.close()
    made.process.kill()
    made.process.wait()


def parts(*tensors: torch.Tensor) -> list[StatePart]:
    return [
        StatePart(f"w{number}", tuple(values.shape), Box.full(values.shape), values)
        for number, values in enumerate(tensors)
    ]


def stop(writer: RankWriter) -> None:
    writer.process.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(writer.process.pid) == "stopped")


def test_the_state_may_change_while_it_is_written(writer, tmp_path):
    values = torch.arange(1000.0)
    stop(writer)
    writing = writer.write(parts(values), tmp_path, 0, 1, 3)
    values.zero_()
    assert not writing.done(wait=False)
    assert not list(tmp_path.iterdir())
    writer.process.send_signal(signal.SIGCONT)
    assert writing.done(wait=True) and writing.done(wait=False)
    found = load_file(tmp_path / "rank-00000-0.safetensors")["w0@0"]
    assert torch.equal(found, torch.arange(1000.0))


def test_views_that_are_not_contiguous_and_empty_parts_are_written(writer, tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    scalar, empty = torch.tensor(2.5), torch.zeros(0, 2, dtype=torch.bfloat16)
    writer.write(parts(whole.t(), scalar, empty), tmp_path, 0, 1, 3).done(wait=True)
    found = load_file(tmp_path / "rank-00000-0.safetensors")
    assert torch.equal(found["w0@0,0"], whole.t()) and found["w1@"] == 2.5
    assert found["w2@0,0"].shape == (0, 2)


def test_memory_is_used_again_and_several_are_under_way_at_once(writer, tmp_path):
    for round_ in range(3):
        writings = []
        for job in range(2):  # two roles of a rank
            folder = tmp_path / f"{round_}-{job}"
            folder.mkdir()
            values = torch.full((100,), float(10 * round_ + job))
            writings.append(writer.write(parts(values), folder, 0, 1, round_))
        assert all(writing.done(wait=True) for writing in writings)
    assert len(writer._free) <= 2
    for round_ in range(3):
        for job in range(2):
            found = load_file(tmp_path / f"{round_}-{job}/rank-00000-0.safetensors")
            assert found["w0@0"].unique().tolist() == [10 * round_ + job]


def test_where_memory_is_short_a_rank_waits_for_its_writer_between_files(
    writer, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "FILE_BYTES", 400)
    monkeypatch.setattr(module, "_fits", lambda nbytes: False)
    values = [torch.full((100,), float(number)) for number in range(5)]
    writer.write(parts(*values), tmp_path, 0, 1, 3).done(wait=True)
    assert len(writer._free) == 1  # one region for all of them
    index = Index.read(tmp_path)
    assert len({entry["parts"][0]["file"] for entry in index.entries.values()}) == 5
    for number in range(5):
        [found] = load_file(tmp_path / f"rank-00000-{number}.safetensors").values()
        assert found.unique().tolist() == [number]


@pytest.mark.parametrize(("available", "fits"), [(21, True), (20, False), (5, False)])
def test_a_tenth_of_the_memory_is_left(monkeypatch, available, fits):
    monkeypatch.setattr(module, "host_memory", lambda: (100, available))
    assert module._fits(10) is fits
    monkeypatch.setattr(module, "host_memory", lambda: None)
    assert module._fits(10)


def test_what_could_not_be_written_is_an_error_once(writer, tmp_path):
    writing = writer.write(parts(torch.ones(3)), tmp_path / "gone", 0, 1, 3)
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        writing.done(wait=True)
    writer.write(parts(torch.ones(3)), tmp_path, 0, 1, 3).done(wait=True)
    assert Index.read(tmp_path).version == 3


def test_a_writer_that_was_killed_is_named_and_the_next_checkpoint_has_another(tmp_path):
    writer = rank_writer()
    assert rank_writer() is writer
    stop(writer)
    writing = writer.write(parts(torch.ones(3)), tmp_path, 0, 1, 3)
    os.kill(writer.process.pid, signal.SIGKILL)
    with pytest.raises(
        CheckpointError, match=rf"\(pid {writer.process.pid}\) has ended \(by signal 9"
    ):
        writing.done(wait=True)
    again = rank_writer()
    assert again is not writer
    again.write(parts(torch.ones(3)), tmp_path, 0, 1, 4).done(wait=True)
    assert Index.read(tmp_path).version == 4


def test_no_memory_is_an_error_with_its_size(monkeypatch):
    def refuses(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", refuses)
    with pytest.raises(CheckpointError, match=r"no memory for a copy of 2 GB: .*No space left"):
        module._allocate(2 * 10**9, 0)
