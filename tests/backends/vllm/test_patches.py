"""What vLLM does to its process is undone: environment, torch's settings, shared memory, process groups."""

from __future__ import annotations

import os
import uuid
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from helpers.installed import needs
from helpers.paths import matrix

from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.backends.vllm.patches import (
    SHARED,
    a_guest,
    check_the_runner,
    classes_of_its_own,
    end,
    groups_of,
    own_shared_memory,
)
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.testing import one_rank, reference


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


def groups_in_turn(rank: int, world: int, spec: Any) -> list[Any]:
    """(ranks of vLLM's tp group, place in it) of engines in turn, and what a second one beside another says."""
    from vllm.distributed.parallel_state import get_tp_group

    def engine(train: ParallelLayout, tp: int, grouping: str) -> VLLMEngine:
        generation = generation_layout(train, tp=tp, grouping=grouping)
        context = RankContext("actor", rank, train, torch.device("cpu"), 0, generation)
        return VLLMEngine(spec, VLLMConfig(kv_memory_gb=0.02, max_sequences=4), context)

    four = ParallelLayout(tp=4)
    found: list[Any] = []
    for tp, grouping in [(2, "zero-redundancy"), (2, "consecutive"), (4, "consecutive")]:
        one = engine(four, tp, grouping)
        one.start()
        found.append((list(get_tp_group().ranks), get_tp_group().rank_in_group))
        if len(found) == 2:
            with pytest.raises(HybridFlowError) as refused:
                engine(four, 2, "zero-redundancy").start()
            found.append(str(refused.value))
        one.close()
    return found


@matrix
@needs("vllm")
@pytest.mark.timeout(300)
def test_tensor_parallel_groups_are_those_of_the_layout_one_set_at_a_time(ranks):
    spec = attrs.evolve(reference("llama", width=128).spec, path=None)
    for rank, found in enumerate(ranks(groups_in_turn, 4, spec)):
        alternate, place = [[0, 2], [1, 3]][rank % 2], rank // 2
        assert found[0] == (alternate, place)
        assert found[1] == ([[0, 1], [2, 3]][rank // 2], rank % 2)
        assert "replicas [0, 1] [2, 3], and this one asks for [0, 2] [1, 3]" in found[2]
        assert found[3] == ([0, 1, 2, 3], rank)


@needs("vllm")
def test_vllm_has_its_own_way_of_making_groups_back():
    from vllm.distributed import parallel_state

    before = parallel_state.init_model_parallel_group
    with pytest.raises(RuntimeError, match="no memory"), groups_of((((0,),),)):
        assert parallel_state.init_model_parallel_group is not before
        raise RuntimeError("no memory")
    assert parallel_state.init_model_parallel_group is before


class Hooked:
    """How often a model's forward hook has run: vLLM's __call__ leaves hooks out."""

    def __init__(self, model: torch.nn.Module):
        self.calls = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


@needs("vllm")
def test_a_trainers_model_of_a_class_that_vllm_runs_works_before_and_behind():
    from transformers import Olmo2Config, Olmo2Model
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import VllmConfig, set_current_vllm_config

    sizes = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    config = Olmo2Config(**sizes, num_attention_heads=2, pad_token_id=None)
    ids = torch.tensor([[1, 2, 3]])
    before = Olmo2Model(config)
    with classes_of_its_own():
        support_torch_compile(dynamic_arg_dims={"input_ids": 1})(Olmo2Model)
    with set_current_vllm_config(VllmConfig()):
        theirs = Olmo2Model(config)
    behind = Olmo2Model(config)
    behind.load_state_dict(before.state_dict())

    hooked = [Hooked(before), Hooked(behind)]
    found = [model(input_ids=ids).last_hidden_state for model in (before, behind)]
    assert torch.equal(*found)
    assert [hook.calls for hook in hooked] == [1, 1]
    # It is no longer needed once vLLM leaves the classes of others as they were.
    assert hasattr(theirs, "do_not_compile")


@needs("vllm")
def test_another_model_runner_is_refused():
    class Runner:
        pass

    with pytest.raises(HybridFlowError, match=r"vLLM runs this model by its .*test_patches, whose"):
        check_the_runner(Runner())
