"""Messages as files: whole or not there, and gone when they are forgotten."""

from __future__ import annotations

import resource

import pytest
import torch
from helpers.transport_jobs import link, message

from hybridflow.backends.transports.disk import Disk, DiskConfig


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "set sync.transport.folder" in str(Disk.problem(link(0)))
    for name in ("none", "file"):
        said = Disk.problem(link(0), DiskConfig(str(tmp_path / name)))
        assert said == f"{tmp_path / name} is not a folder to write to"
    assert Disk.problem(link(0), DiskConfig(str(tmp_path))) is None


def test_what_one_rank_leaves_another_one_reads_until_it_is_forgotten(tmp_path):
    sender, receiver = (Disk(link(rank), DiskConfig(str(tmp_path))) for rank in (0, 1))
    shared = message(3, 1, 4)
    tickets = sender.post({1: shared, 2: shared})
    assert tickets[1] == tickets[2]  # left once
    later = sender.post({1: message(5, 9)})
    assert receiver.get(tickets[1], 3).tolist() == [3, 1, 4]
    assert receiver.get(later[1], 2).tolist() == [5, 9]
    sender.forget(keep=1)
    assert [str(path) for path in tmp_path.iterdir()] == [later[1]]
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_no_part_of_a_message(tmp_path):
    sender = Disk(link(0), DiskConfig(str(tmp_path)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError):
            sender.put(torch.zeros(1 << 20, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
