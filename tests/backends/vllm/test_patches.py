"""What vLLM does to its process is undone: environment, torch's settings, shared memory, process groups."""

from __future__ import annotations

import os
import uuid
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.installed import needs

from hybridflow.backends.vllm.patches import SHARED, a_guest, end, own_shared_memory
from hybridflow.kit.testing import one_rank


@pytest.fixture
def settings():
    """Of torch, as they were, for a test that breaks them."""
    before = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.set_num_threads,
        torch.get_num_threads(),
    )
    yield before
    torch.set_grad_enabled(before[0])
    torch.set_default_dtype(before[1])
    torch.set_num_threads = before[2]
    torch.set_num_threads(before[3])


def what_vllm_does() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_num_threads = lambda threads: None
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)


def test_torchs_settings_are_behind_a_guest_as_they_were(settings):
    with a_guest({}):
        what_vllm_does()
    found = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.set_num_threads,
        torch.get_num_threads(),
    )
    assert found == settings


def test_they_are_too_behind_one_that_fails(settings):
    with pytest.raises(RuntimeError, match="no such model"), a_guest({}):
        what_vllm_does()
        raise RuntimeError("no such model")
    found = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.set_num_threads,
        torch.get_num_threads(),
    )
    assert found == settings


def test_variables_are_set_for_a_guests_time_alone(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_THERE", "before")
    monkeypatch.delenv("HYBRIDFLOW_NEW", raising=False)
    with a_guest({"HYBRIDFLOW_THERE": "now", "HYBRIDFLOW_NEW": "1"}):
        assert (os.environ["HYBRIDFLOW_THERE"], os.environ["HYBRIDFLOW_NEW"]) == ("now", "1")
        del os.environ["HYBRIDFLOW_NEW"]  # a guest may change them
    assert os.environ["HYBRIDFLOW_THERE"] == "before" and "HYBRIDFLOW_NEW" not in os.environ


def test_an_engine_ends_without_its_finalizer_and_with_its_executor():
    done = []
    executor = SimpleNamespace(shutdown=lambda: done.append("executor"))
    client = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
    owner = uuid.uuid4()
    client._finalizer = weakref.finalize(owner, done.append, "groups of others")
    end(SimpleNamespace(engine_core=client))
    del owner
    assert done == ["executor"] and not client._finalizer.alive


def test_an_engine_whose_start_failed_half_way_ends():
    end(SimpleNamespace(engine_core=SimpleNamespace()))
    end(
        SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=None))
        )
    )


@needs("vllm")
def test_shared_memory_has_names_of_its_own_and_is_unlinked():
    from vllm.distributed.device_communicators import cpu_communicator

    names, token = cpu_communicator._CPUSHMDistributed, uuid.uuid4().hex
    before = names.make_group_name
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    mine: list[Path] = []
    with one_rank():
        with own_shared_memory(token):
            name = names.make_group_name(communicator)
            assert name == f"hybridflow-{token}-tp-0-0-1-cpushm"
            mine.append(SHARED / name)
            mine[0].write_bytes(b"sums")
        with pytest.raises(OSError, match="the link is down"), own_shared_memory(token):
            mine.append(SHARED / f"later-{token}")
            mine[1].write_bytes(b"sums")
            raise OSError("the link is down")
    assert names.make_group_name is before and not any(path.exists() for path in mine)
