"""The memory that a worker reports: of the machine, or of the container that limits it."""

from __future__ import annotations

import pytest
import torch
from helpers.fake_jobs import deterministic
from helpers.ranks import fresh

import hybridflow.core.workers.device_memory as module
from hybridflow.core.workers.device_memory import DeviceWorker, host_memory
from hybridflow.kit.testing import one_rank

KB = 1024


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files as Linux has them: 100 MB in all, 60 MB available."""
    (tmp_path / "meminfo").write_text(
        "MemTotal:       100000 kB\nMemFree:         20000 kB\nMemAvailable:    60000 kB\n"
        "HugePages_Total:       0\n"
    )
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    return tmp_path


def test_without_a_limit_it_is_the_machines(machine):
    assert host_memory() == (100000 * KB, 60000 * KB)
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("5\n")
    assert host_memory() == (100000 * KB, 60000 * KB)


@pytest.mark.parametrize(
    ("limit", "taken", "expected"),
    [
        (80000, 30000, (80000, 50000)),
        (80000, 10000, (80000, 60000)),  # the machine itself has no more
        (80000, 90000, (80000, 0)),
        (200000, 0, (100000, 60000)),
    ],
)
def test_a_containers_limit_counts_where_it_is_less(machine, limit, taken, expected):
    (machine / "memory.max").write_text(f"{limit * KB}\n")
    (machine / "memory.current").write_text(f"{taken * KB}\n")
    assert host_memory() == tuple(size * KB for size in expected)


def test_files_that_were_read_are_not_taken(machine):
    """Of 60,000 kB taken 25,000 are of files that the container can drop."""
    (machine / "memory.max").write_text(f"{80000 * KB}\n")
    (machine / "memory.current").write_text(f"{60000 * KB}\n")
    (machine / "memory.stat").write_text(f"anon 1\ninactive_file {25000 * KB}\n")
    assert host_memory() == (80000 * KB, 45000 * KB)


def test_a_rank_on_a_cpu_shares_its_machines_memory(machine):
    with one_rank() as context:
        found = DeviceWorker(context).memory()
    assert (found.total, found.free) == (100000 * KB, 60000 * KB)
    assert found.shared


def test_a_system_that_does_not_tell_is_not_known(machine):
    (machine / "meminfo").unlink()
    assert host_memory() is None
    with one_rank() as context:
        assert DeviceWorker(context).memory() is None


def test_segments_grow_by_the_allocators_own_setting(monkeypatch):
    """What torch makes of it needs a GPU; that its function takes the setting does not."""
    set_to = []
    assert callable(torch._C._accelerator_setAllocatorSettings)
    for name in module.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to.append)
    with one_rank() as context:
        DeviceWorker(context).grow_segments()
    assert set_to == ["expandable_segments:True"]

    # Who has settings of the allocator in the environment keeps them.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    with one_rank() as context:
        DeviceWorker(context).grow_segments()
    assert set_to == ["expandable_segments:True"]


def test_deterministic_algorithms_are_torchs(monkeypatch):
    """What they do needs a GPU; here, that operations without one are refused, in a process of its own."""
    found = fresh(deterministic)
    assert found == {"workspace": ":4096:8", "algorithms": True, "fills": False}
