"""A simulated GPU: its tensors have shapes, dtypes and storages, but no values.

    with FakeGPU() as gpu:
        model = build(torch.device("fakegpu"))      # the real code
        ...
        gpu.memory.peak                             # bytes

Under FakeGPU every operation that touches a tensor of the device runs without values (PyTorch's
FakeTensorMode); tensors of the CPU keep theirs. An operation that mixes the two devices raises, as
on a GPU, and so does one whose result has a size that depends on values. What the host reads from
the device (`.item()`) is 1, and False for truth values; how often it does so is counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hybridflow.kit.fakes.memory import FakeMemory

NAME = "fakegpu"
"""The device's type."""
CAPACITY = 80 * 10**9
"""The device's bytes, as code that asks for them is told; nothing holds it to them."""


class Event:
    """An event of the device's queue, which has always completed."""

    def __init__(self, *args: Any, **options: Any):
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing: no work is queued."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: no work is queued."""

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""

    def query(self) -> bool:
        """Return True: no work is queued."""
        return True


class Stream:
    """A queue of the device, which is always empty."""

    def __init__(self, *args: Any, **options: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        """Do nothing: no work is queued."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: no work is queued."""

    def record_event(self, event: Any = None) -> Event:
        """Return an event that has completed."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class DeviceModule:
    """The device's module, with the functions that PyTorch and libraries call in torch.cuda."""

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    def is_available(self) -> bool:
        """Return True."""
        return True

    def device_count(self) -> int:
        """Return the number of devices of a node."""
        return 8

    def current_device(self) -> int:
        """Return the index of the device in use."""
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: one device represents all of a node."""

    def device(self, device: Any) -> Any:
        """Return a context in which the device is in use."""
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream in use."""
        return Stream()

    def default_stream(self, device: Any = None) -> Stream:
        """Return the stream that is used unless another is named."""
        return Stream()

    def stream(self, stream: Any) -> Any:
        """Return a context in which the stream is in use."""
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: no work is queued."""

    def empty_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return no statistics; `Memory` has them."""
        return {}

    def memory_allocated(self, device: Any = None) -> int:
        """Return 0; `Memory` counts."""
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return 0; `Memory` counts."""
        return 0

    def memory_reserved(self, device: Any = None) -> int:
        """Return 0; `Memory` counts."""
        return 0

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Do nothing; `Memory` counts."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the free and all bytes of a device on which nothing is."""
        return CAPACITY, CAPACITY

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: there are no values to draw."""

    def manual_seed(self, seed: int) -> None:
        """Do nothing: there are no values to draw."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return an arbitrary generator state: there are no values to draw."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Do nothing: there are no values to draw."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of automatic mixed precision."""
        return [torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        """Return True."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False


# Under the names that torch.cuda has.
DeviceModule.Stream = Stream  # type: ignore[attr-defined]
DeviceModule.Event = Event  # type: ignore[attr-defined]


@functools.cache
def fake_device() -> torch.device:
    """Return the device; the first call registers it with PyTorch, for the whole process."""
    _setup_privateuseone_for_python_backend(NAME, DeviceModule())

    # PyTorch keeps these for as long as the library object lives.
    ATEN.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    ATEN.impl("silu_backward", _silu_backward, "PrivateUse1")
    return torch.device(NAME, 0)


class _FromLists(TorchFunctionMode):
    """Creates tensors from Python numbers on the CPU, and moves them to the device.

    PyTorch itself would write them into the device's memory.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run one function of torch."""
        kwargs = kwargs or {}
        if func is not torch.tensor:
            return func(*args, **kwargs)
        # Numbers in the list may be on the device themselves.
        numbers = _pytree.tree_map(_number, args[0])
        device = kwargs.pop("device") if _makes_ours(kwargs) else None
        values = torch.tensor(numbers, *args[1:], **kwargs)
        return values if device is None else values.to(device)


# --- operations for which GPUs have a kernel, and PyTorch else takes several ---

ATEN = torch.library.Library("aten", "IMPL")
"""Operations that have a version for the device alone."""


def _attention(query, key, value, *args, **options):
    """Return an empty result of attention, as of a kernel that keeps no scores."""
    return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    """Attention (arXiv:2307.08691), whose backward pass needs a sum for each head and token."""

    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, length, _ = query.shape
        # Kernels write tokens before heads.
        shape = (batch, length, heads, value.shape[-1])
        result = query.new_empty(shape).transpose(1, 2)
        sums = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _silu_backward(grad, values):
    return torch.empty_like(values)


class _Fake(FakeTensorMode):
    """Runs operations without values, and copies none to a device."""

    avoid_device_init = True


class FakeGPU(TorchDispatchMode):
    """A context in which operations on the fake device run without values, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.device = fake_device()
        self.memory = FakeMemory(NAME)
        self.waits: Counter[str] = Counter()
        """How often the host has waited for values of the device: the operation -> its count."""
        self._fake = _Fake(allow_non_fake_inputs=True)
        self._flags: list[tuple[bool, contextlib.ExitStack]] = []

    def __enter__(self) -> FakeGPU:
        # Modules that move to the device get other parameters: PyTorch cannot change a tensor's
        # kind in place.
        # All changes here are undone at the end.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        undo = contextlib.ExitStack()
        undo.enter_context(self.memory.counting())
        undo.enter_context(_FromLists())
        # A list of numbers is one copy, where PyTorch would read them one by one.
        undo.enter_context(
            mock.patch.object(FakeTensor, "tolist", lambda self: self.cpu().tolist())
        )
        self._flags.append((before, undo))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        before, undo = self._flags.pop()
        undo.close()
        torch.__future__.set_overwrite_module_params_on_conversion(before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation: with values on the CPU, without them on the device."""
        kwargs = kwargs or {}
        # A DTensor, say, comes back here with the tensors that it is made of.
        if not all(kind in PLAIN for kind in types):
            return NotImplemented

        # Of tensors that were made in inference mode, operations that consist of others come whole.
        if func.namespace == "aten" and func._can_decompose():
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)

        # Operations on the CPU alone run unchanged.
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        ours = [tensor for tensor in tensors if tensor.device.type == NAME]
        if not ours and not _makes_ours(kwargs):
            return func(*args, **kwargs)
        # The host reads a value, which the device does not have.
        if func in READS:
            self.waits[READS[func]] += 1
            return _read(ours[0].dtype)

        # Device tensors run for their shapes; the CPU's tensors keep their values.
        if func in COALESCED:
            return _one_by_one(func, args, kwargs, self._fake)

        self.memory.before(func, args, kwargs)
        if _waits_for_copy(func, args, kwargs):
            self.waits["copy"] += 1
        if _brings_home(func, args):
            return args[0]
        try:
            with self._fake:
                result = _complex_on_device(func, args, kwargs)
                if result is None:
                    result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            raise RuntimeError(
                f"the size of what {func} returns depends on values, for which the host would "
                "wait: boolean indices, nonzero and unique belong on the host"
            ) from error
        result = _brought_home(result)
        self.memory.after(result)
        return result


_C10D = torch.ops.c10d
COALESCED = {
    _C10D.reduce_scatter_tensor_coalesced_.default: _C10D._reduce_scatter_base_.default,
    _C10D.allgather_into_tensor_coalesced_.default: _C10D._allgather_base_.default,
}
"""Collectives of several tensors -> those of one, which PyTorch runs without values."""


def _one_by_one(func: Any, args: Any, kwargs: Any, fake: FakeTensorMode) -> Any:
    """Run a collective of several tensors one after the other; return the last one's work."""
    # Each of them is a collective of its own, with the same group.
    outputs, inputs, *rest = args
    work = None
    with fake:
        for output, source in zip(outputs, inputs, strict=True):
            _, work = COALESCED[func](output, source, *rest, **kwargs)
    return work


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
"""Classes of tensors that are not made of other tensors."""
READS = {
    torch.ops.aten._local_scalar_dense.default: "item",
    torch.ops.aten.equal.default: "equal",
}
"""Operations by which the host reads a value -> their names."""


def _number(leaf: Any) -> Any:
    """Return the value that the host reads for a scalar on the device; other leaves unchanged."""
    return leaf.item() if isinstance(leaf, FakeTensor) and not leaf.dim() else leaf


def _read(dtype: torch.dtype) -> bool | int | float:
    """Return the value that the host reads from a tensor of this dtype."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _makes_ours(kwargs: dict[str, Any]) -> bool:
    """Return whether an operation without tensors makes one on the device."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == NAME


def _complex_on_device(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return a complex tensor of the host on the device; None for all other operations.

    PyTorch has no such copy without values.
    """
    if func is not torch.ops.aten._to_copy.default or not args[0].is_complex():
        return None
    return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=NAME)


def _waits_for_copy(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation copies from the device to the host, which waits for it."""
    if func is torch.ops.aten._to_copy.default:
        to = torch.device(kwargs.get("device") or args[0].device).type
        comes = args[0].device.type == NAME and to == "cpu"
        return comes and not kwargs.get("non_blocking")
    # The third argument of copy_ says whether the host goes on at once.
    return _brings_home(func, args) and not any(args[2:]) and not kwargs.get("non_blocking")


def _brings_home(func: Any, args: Any) -> bool:
    """Return whether an operation copies values of the device into a tensor of the CPU."""
    return (
        func is torch.ops.aten.copy_.default
        and args[0].device.type == "cpu"
        and args[1].device.type == NAME
    )


def _brought_home(result: Any) -> Any:
    """Return results on the CPU as real tensors, of zeros."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor) and leaf.device.type == "cpu":
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return leaf

    return _pytree.tree_map(real, result)
