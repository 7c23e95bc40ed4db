"""What megatron-core 0.16 needs to run without CUDA. Nothing here is active on a GPU, nor outside `on_cpu`."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    """device="cuda" is the CPU, Tensor.cuda() the tensor, and Tensor.type() names CUDA types: the distributed
    optimizer and gradient clipping compare these names."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _random() -> contextlib.AbstractContextManager:
    import megatron.core.tensor_parallel.random as random

    return mock.patch.multiple(
        random,
        _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: (
            torch.get_rng_state()
        ),
        _set_cuda_rng_state=lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
            new_state
        ),
    )


PATCHES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "the current device is a number of a GPU": lambda: mock.patch(
        "torch.cuda.current_device", lambda: "cpu"
    ),
    "pipelines wait for the GPU": lambda: mock.patch(
        "torch.cuda.synchronize", lambda *a, **k: None
    ),
    "states of generators come from the GPU": lambda: mock.patch(
        "torch.cuda.get_rng_state", lambda device="cuda": torch.get_rng_state()
    ),
    "checkpointed layers keep the GPU's state": _random,
    "tensors are made on the GPU by name": _CudaIsCpu,
}
"""Why -> the patch; tests/backends/megatron/test_cpu.py shows of each that it is needed."""


EXPECTED = (
    "Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf", "When using async grad allreduce",
    "`torch.distributed.reduce_scatter_tensor` is deprecated", "`torch.distributed.all_gather_into_tensor` is deprecated",
)  # fmt: skip


def no_warnings_of_what_is_meant() -> None:
    """Each rank would print these of Megatron's local layers and of its calls to torch; no user can do anything about them."""
    for said in EXPECTED:
        warnings.filterwarnings("ignore", re.escape(said))


@contextlib.contextmanager
def on_cpu(device: torch.device, without: Any = ()) -> Iterator[None]:
    """Megatron's calls on a CPU go in here; nothing happens for another device."""
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            for why, patch in PATCHES.items():
                if why not in without:
                    stack.enter_context(patch())
        yield
