"""Patches with which megatron-core 0.16 runs without CUDA: on a CPU, and on a simulated GPU.

None of them is active on a GPU, nor outside `on_cpu`.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _Stand(TorchFunctionMode):
    """A context in which torch uses another device instead of a CUDA device.

    device="cuda" is that device, Tensor.cuda() moves a tensor there, and Tensor.type() names CUDA
    types: the distributed optimizer and gradient clipping compare these names.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": self.device}
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)

        # Everything else runs unchanged, except for the names of types.
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # A tensor of the CPU has no device in its type's name.
            kind = result.rpartition(".")[2]
            return f"torch.cuda.{kind}"
        return result


def _random(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a patch with which Megatron's generator tracker saves and sets the CPU's state."""
    import megatron.core.tensor_parallel.random as random

    def get_state(device="cuda", clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_state(new_state, device=-1, graph_safe=False):
        return torch.set_rng_state(new_state)

    return mock.patch.multiple(
        random,
        _get_cuda_rng_state=get_state,
        _set_cuda_rng_state=set_state,
    )


PATCHES: dict[str, Callable[[torch.device], contextlib.AbstractContextManager]] = {
    "the current device is a number of a GPU": lambda device: mock.patch(
        "torch.cuda.current_device", lambda: device
    ),
    "pipelines wait for the GPU": lambda device: mock.patch(
        "torch.cuda.synchronize", lambda *a, **k: None
    ),
    "states of generators come from the GPU": lambda device: mock.patch(
        "torch.cuda.get_rng_state", lambda device="cuda": torch.get_rng_state()
    ),
    "checkpointed layers keep the GPU's state": _random,
    "tensors are made on the GPU by name": _Stand,
}
"""Operation of Megatron that a CPU does not support -> the patch for it.

tests/backends/megatron/test_cpu.py shows that each of them is needed.
"""


EXPECTED = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "When using async grad allreduce",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
)
"""First words of the warnings that Megatron's local layers and its calls to torch always cause."""


def no_warnings_of_what_is_meant() -> None:
    """Silence the expected warnings, which users cannot avoid, in this process."""
    for text in EXPECTED:
        warnings.filterwarnings("ignore", re.escape(text))


@contextlib.contextmanager
def on_cpu(device: torch.device, without: Any = ()) -> Iterator[None]:
    """Activate the patches for calls into Megatron without CUDA; on a GPU do nothing.

    without: keys of PATCHES that are left out (tests use it).
    """
    with contextlib.ExitStack() as stack:
        if device.type != "cuda":
            for reason, patch in PATCHES.items():
                if reason not in without:
                    stack.enter_context(patch(device))
        yield
