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


def kill(writer: RankWriter) -> None:
    os.kill(writer.process.pid, signal.SIGKILL)
    eventually(lambda: state_of(writer.process.pid) == "gone")


@pytest.mark.parametrize("written", [0, 1])
def test_another_writer_goes_on_for_one_that_was_killed(
    writer, tmp_path, monkeypatch, caplog, written
):
    """Before anything is written, and after the first of three files."""
    monkeypatch.setattr(module, "FILE_BYTES", 400)
    # It waits at the files after the first ones, as at a disk that does not answer.
    slow = [tmp_path / f"rank-00000-{number}.safetensors" for number in range(written, 3)]
    for file in slow:
        os.mkfifo(file)
    pid = writer.process.pid
    values = [torch.full((100,), float(number)) for number in range(3)]
    writing = writer.write(parts(*values), tmp_path, 0, 1, 7)
    eventually(lambda: not writing.done(wait=False) and len(writer._free) == written)
    kill(writer)
    for file in slow:
        file.unlink()
    assert writing.done(wait=True) and writer.process.pid != pid
    assert f"(pid {pid}) has ended by signal 9; another one writes" in caplog.text
    index = Index.read(tmp_path)
    assert index.version == 7
    for number in range(3):
        [part] = index.entries[f"w{number}"]["parts"]
        [found] = load_file(tmp_path / part["file"]).values()
        assert found.unique().tolist() == [number]


def test_a_writer_that_is_killed_between_two_files_loses_none(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 400)
    values = [torch.full((100,), float(number)) for number in range(3)]
    sent = []

    def send_and_kill(job, region=None):
        RankWriter._send(writer, job, region)
        sent.append(region)
        if len(sent) == 2:
            eventually(lambda: writer._hear(0.0) or len(job.records) == 2)
            kill(writer)

    monkeypatch.setattr(writer, "_send", send_and_kill)
    assert writer.write(parts(*values), tmp_path, 0, 1, 7).done(wait=True)
    index = Index.read(tmp_path)
    assert [len(index.entries[f"w{number}"]["parts"]) for number in range(3)] == [1, 1, 1]


def test_where_no_other_writer_can_be_started_the_checkpoint_fails(writer, tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise OSError(24, "Too many open files")

    stop(writer)
    writing = writer.write(parts(torch.ones(3)), tmp_path, 0, 1, 3)
    monkeypatch.setattr(module.subprocess, "Popen", refuses)
    kill(writer)
    with pytest.raises(CheckpointError, match=r"no other one can be started: .*Too many"):
        writing.done(wait=True)
    assert writing.done(wait=False)  # it is told once


def test_three_writers_of_a_checkpoint_that_end_are_an_error_and_the_next_one_is_written(
    writer, tmp_path
):
    gone, kept = tmp_path / "gone", tmp_path / "kept"
    for folder in (gone, kept):
        folder.mkdir()
    os.mkfifo(gone / "rank-00000-0.safetensors")  # nobody reads it, so that each waits
    writing = writer.write(parts(torch.ones(3)), gone, 0, 1, 3)
    for _ in range(2):
        kill(writer)
        assert not writing.done(wait=False)
    kill(writer)
    with pytest.raises(CheckpointError, match="has ended by signal 9, as 2 others before it"):
        writing.done(wait=True)
    writer.write(parts(torch.ones(3)), kept, 0, 1, 4).done(wait=True)
    assert Index.read(kept).version == 4 and len(writer._free) == 1


def test_a_file_that_could_not_be_written_is_not_forgotten_with_its_writer(writer, tmp_path):
    stop(writer)
    writing = writer.write(parts(torch.ones(3)), tmp_path, 0, 1, 3)
    [job] = writer._jobs.values()
    job.why = "OSError: the disk is full"  # told of one file, before the next
    kill(writer)
    with pytest.raises(CheckpointError, match="the disk is full"):
        writing.done(wait=True)
    assert not list(tmp_path.iterdir())


def test_a_process_has_one_writer():
    assert rank_writer() is rank_writer()


def test_no_memory_is_an_error_with_its_size(monkeypatch):
    def refuses(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", refuses)
    with pytest.raises(CheckpointError, match=r"no memory for a copy of 2 GB: .*No space left"):
        module._allocate(2 * 10**9, 0)
