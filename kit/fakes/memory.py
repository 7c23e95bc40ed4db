"""Counts the memory of a simulated device: live bytes, their peak, and copies from and to the host.

A storage counts from the operation that makes it until it is freed, or resized to 0 bytes, as FSDP
does with gathered weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _pytree


class FakeMemory:
    """Bytes on one device. All figures are of storages, without an allocator's rounding."""

    def __init__(self, device: str):
        self.device = device
        self.now = 0
        """Bytes that are live."""
        self.peak = 0
        """The most bytes that were live at once, since `restart`."""
        self.largest = 0
        """Bytes of the largest storage that was live, since `restart`."""
        self.arrived = 0
        """Bytes copied from the host to the device, since `restart`."""
        self.left = 0
        """Bytes copied from the device to the host, since `restart`."""
        self._live: dict[int, int] = {}
        self._paused = False

    def restart(self) -> None:
        """Begin a new phase: the peak is what is live now, and nothing has moved."""
        self.peak = self.now
        self.largest = max(self._live.values(), default=0)
        self.arrived = 0
        self.left = 0

    # --- what the device reports ---

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count the bytes that an operation is about to copy between host and device."""
        if func is torch.ops.aten.copy_.default:
            to, source = args[0].device.type, args[1]
        elif func is torch.ops.aten._to_copy.default:
            source = args[0]
            to = torch.device(kwargs.get("device") or source.device).type
        else:
            return
        # Only copies between the two count.
        nbytes = source.numel() * source.element_size()
        if to == self.device and source.device.type != self.device:
            self.arrived += nbytes
        if to != self.device and source.device.type == self.device:
            self.left += nbytes

    def after(self, result: Any) -> None:
        """Count the storages that an operation has made."""
        if self._paused:
            return
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device:
                self.see(leaf.untyped_storage())

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        # A finalizer notices when a storage is freed.
        key = storage._cdata
        nbytes = storage.nbytes()
        if key not in self._live:
            weakref.finalize(storage, self._gone, key)
        self.now += nbytes - self._live.get(key, 0)
        self._live[key] = nbytes
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, nbytes)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Notice storages that are resized, and leave out those that only serve shapes.

        DTensor asks for the shape of a result by running the operation on whole tensors without
        values, which a real device does not see.
        """
        resize = torch.UntypedStorage.resize_
        shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self.see(storage)
            return result

        def uncounted(*args: Any, **options: Any) -> Any:
            before = self._paused
            self._paused = True
            try:
                return shapes(*args, **options)
            finally:
                self._paused = before

        # Both are methods of torch's own classes, and must be restored.
        patched: Any = torch.UntypedStorage
        propagator: Any = ShardingPropagator
        patched.resize_ = resized
        propagator._propagate_tensor_meta_non_cached = uncounted
        try:
            yield
        finally:
            patched.resize_ = resize
            propagator._propagate_tensor_meta_non_cached = shapes
