"""Confines the side effects of vLLM on the process in which it runs.

This is the only module that handles side effects of vLLM's internals.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.parallel import Replicas

SHARED = Path("/dev/shm")
"""The folder of Linux's shared memory."""


@contextlib.contextmanager
def a_guest(variables: dict[str, str]) -> Iterator[None]:
    """Patch the process while vLLM starts in it, and restore it afterwards.

    `variables` are in the environment meanwhile. vLLM changes torch's global settings; its CPU
    worker even replaces torch.set_num_threads by a function that does nothing.
    """
    # Keep what vLLM may change.
    environment = {name: os.environ.get(name) for name in variables}
    grad_enabled = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    set_threads = torch.set_num_threads
    threads = torch.get_num_threads()

    os.environ.update(variables)
    try:
        yield
    finally:
        # First the function, since vLLM's replacement does nothing.
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad_enabled)
        torch.set_default_dtype(dtype)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def own_shared_memory(token: str) -> Iterator[None]:
    """Give vLLM's shared memory names that no other job uses, and remove them at the end.

    On a CPU vLLM's ranks reduce through shared memory. Its name is the same for every job that an
    external launcher started, so a job collides with the memory that a killed one has left. `token`
    must be equal on the ranks of a job, and differ between jobs. Collective: the context waits at
    its end for all ranks. All of them have mapped the memory by then, so its names can be removed.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    def make_group_name(communicator: Any) -> str:
        group = communicator.unique_name.replace(":", "-")
        ranks = "-".join(map(str, communicator.ranks))
        return f"hybridflow-{token}-{group}-{ranks}-cpushm"

    namer = cpu_communicator._CPUSHMDistributed
    original = namer.make_group_name
    namer.make_group_name = staticmethod(make_group_name)
    try:
        yield
        dist.barrier()
    finally:
        namer.make_group_name = staticmethod(original)
        for path in SHARED.glob(f"*{token}*"):
            path.unlink(missing_ok=True)
        _unlink_queues()


@contextlib.contextmanager
def classes_of_its_own() -> Iterator[None]:
    """Limit vLLM's changes of transformers' classes to its own objects.

    vLLM 0.32 runs models without code of its own by transformers' classes, whose __init__ and
    __call__ it replaces for torch.compile. Neither works for a trainer's model of the same class:
    such objects, made before or later, keep the original methods.
    """
    from vllm.compilation import decorators
    from vllm.config import get_current_vllm_config_or_none

    original = decorators._support_torch_compile

    def change(cls: Any, *args: Any, **kwargs: Any) -> Any:
        init = cls.__init__
        call = cls.__call__
        original(cls, *args, **kwargs)
        their_init = cls.__init__
        their_call = cls.__call__
        if not cls.__module__.startswith("transformers.") or their_call is call:
            return cls

        def __init__(self, *args, **kwargs):
            own = get_current_vllm_config_or_none() is not None
            (their_init if own else init)(self, *args, **kwargs)

        def __call__(self, *args, **kwargs):
            # Set by vLLM's __init__
            own = "do_not_compile" in vars(self)
            return (their_call if own else call)(self, *args, **kwargs)

        cls.__init__ = __init__
        cls.__call__ = __call__
        return cls

    decorators._support_torch_compile = change
    try:
        yield
    finally:
        decorators._support_torch_compile = original


@contextlib.contextmanager
def groups_of(replicas: Replicas) -> Iterator[None]:
    """Make vLLM form its groups from these replicas; a rank's index in its group is its tp rank.

    vLLM 0.32 supports only neighbours: it cuts 0, 1, 2, ... into replicas, whose n-th rank is
    mapped to the n-th of `replicas`. The ranks of a group must ascend, since torch sorts them.
    Raises HybridFlowError where an engine runs in this process with other groups.
    """
    from vllm.distributed import parallel_state

    _renew(replicas)
    order = [rank for replica in replicas for stage in replica for rank in stage]
    original = parallel_state.init_model_parallel_group

    def in_order(numbers: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        ranks = [[order[number] for number in group] for group in numbers]
        return original(ranks, *args, **kwargs)

    parallel_state.init_model_parallel_group = in_order
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


def pin_the_runner() -> None:
    """Make vLLM use its model runner V1 in this process, permanently: the variable is read again.

    By default vLLM 0.32 uses V2 on CUDA, which has neither the requests nor the sampler that
    SeededSampler needs.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def check_the_runner(runner: Any) -> None:
    """Raise HybridFlowError for another model runner: a feature of vLLM may require V2."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        raise HybridFlowError(
            f"vLLM runs this model by its {type(runner).__module__}, whose sampler has no place "
            "for our seeds and logprobs; leave out what asks for it in rollout.engine_args (a "
            "watermark, hisparse), or take another engine"
        )


def make_room_for_the_stage_before(runner: Any) -> None:
    """Allocate the receive buffer of a later pipeline stage.

    vLLM allocates it while it measures memory, which it skips where the cache's size is given.
    `runner` is vLLM's model runner.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


_REPLICAS: Replicas = ()
"""The replicas from which vLLM's groups in this process were made."""
_RUNNING: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The engines that run in this process, by id(). All of them use the same groups."""


def running(engine: Any) -> None:
    """Note that an engine of vLLM uses the groups, until `end`."""
    _RUNNING[id(engine)] = engine


def _renew(replicas: Replicas) -> None:
    """Make vLLM create its groups again if its present ones have ended, or are of other ranks.

    vLLM creates them once in a process, for the first model. A second run in this process has other
    process groups, and a mixture of experts after a dense model lacks the group of experts, which
    without expert parallelism is that of the tp ranks.
    """
    global _REPLICAS
    from vllm.distributed import parallel_state

    before = _REPLICAS
    if _RUNNING and before != replicas:
        raise HybridFlowError(
            "vLLM has one set of groups in a process: an engine runs with the replicas "
            f"{_listed(before)}, and this one asks for {_listed(replicas)}; give the roles of the "
            "pool the same layout and generation"
        )
    _REPLICAS = replicas
    forget_ended_groups()
    if parallel_state._WORLD is None:
        return

    # Groups of other ranks end, and that of the world stays.
    if before != replicas:
        parallel_state.destroy_model_parallel()
    else:
        parallel_state._EP = parallel_state._EP or parallel_state._TP


def forget_ended_groups() -> None:
    """Make vLLM drop its groups if their process groups have ended."""
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    if world is None or world.device_group in dist.distributed_c10d._world.pg_map:
        return
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)


def _listed(replicas: Replicas) -> str:
    """Return the ranks of replicas as text, one bracket for each."""
    return " ".join(str([rank for stage in replica for rank in stage]) for replica in replicas)


def process_as_at_first(layer: Any) -> None:
    """Make vLLM process a layer's weights as for the first time.

    The second time vLLM skips the packing of experts for a CPU, and the packed kernel then reads
    weights that are not packed (0.32: `_setup_kernel` of its unquantised experts).
    """
    layer.__dict__.pop("_already_called_process_weights_after_loading", None)
    method: Any = getattr(layer, "quant_method", None)
    weight = next(layer.parameters(recurse=False), None)
    on_cpu = weight is not None and weight.device.type in ("cpu", "meta")
    if on_cpu and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


def end(engine: Any) -> None:
    """End an engine of vLLM, but keep the process groups.

    vLLM's own end runs as a finalizer, and would destroy process groups that are not its own.
    """
    _RUNNING.pop(id(engine), None)
    client = engine.engine_core
    finalizer = getattr(client, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()

    # An engine whose start failed half-way lacks its core, or its executor.
    core = getattr(client, "engine_core", None)
    if core is not None and core.model_executor is not None:
        core.model_executor.shutdown()


def _unlink_queues() -> None:
    """Remove the names of the queues of vLLM's groups.

    A queue is shared memory, by which one rank sends work to the others. It stays usable for the
    processes that have mapped it. Its creator removes the name.
    """
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        group = reference()
        buffer: Any = getattr(group.mq_broadcaster, "buffer", None) if group is not None else None
        if buffer is not None and buffer.is_creator:
            with contextlib.suppress(FileNotFoundError):
                buffer.shared_memory.unlink()
