"""Moves a model's parts between its device and the host's memory.

Tensors keep their identity: while a tensor is offloaded its storage has 0 bytes, so parameters,
shards and optimizers that refer to it need no change.

    onload    storage on the device   <--  copy on the host
    offload   storage of 0 bytes           copy on the host   (written only if the values changed)

The copies go through page-locked memory, on a stream of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch


@attrs.define(eq=False)
class _Away:
    """A storage of the device that may be offloaded, and its copy on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    on_host: torch.Tensor | None = None
    """The copy on the host, uint8 [nbytes]; None before the first offload."""
    stale: bool = True
    """Whether the values on the device have changed since the copy was made."""


class Residence:
    """Where the parts of one model are: on its device, or on the host.

    A part is a set of tensors, which may grow (an optimizer's state is made by its first step).
    Copies on the host are kept, so that an unchanged part is not copied out a second time.
    """

    def __init__(
        self,
        device: torch.device,
        parts: Mapping[str, Callable[[], Iterable[torch.Tensor]]],
        scratch: Mapping[str, Callable[[], Iterable[torch.Tensor]]] | None = None,
    ):
        """Take the parts: name -> a function that yields the part's tensors on `device`.

        scratch: name of a part -> a function that yields tensors that are needed whenever the part
        is on the device, but whose values are not (gradient buffers between updates). They are
        freed without a copy, and come back as zeros.
        """
        self.device = device
        self.away: set[str] = set()
        """The parts that are on the host."""
        self._tensors = parts
        self._scratch = scratch or {}
        self._dropped: dict[str, list[_Away]] = {}
        self._storages: dict[str, dict[int, _Away]] = {name: {} for name in parts}
        self._stream: Any = None

    def changed(self, *parts: str) -> None:
        """Note that values on the device have changed: those of these parts, or of all."""
        for part in parts or self._storages:
            for away in self._storages[part].values():
                away.stale = True

    @torch.no_grad()
    def offload(self, parts: Sequence[str]) -> None:
        """Move parts to the host; parts that are on the host already stay."""
        leaving: list[_Away] = []
        for part in parts:
            if part not in self.away:
                leaving += self._collect(part)
                self._drop(part)
                self.away.add(part)

        with self._copying():
            for away in leaving:
                if away.on_host is None:
                    pinned = self.device.type == "cuda"
                    away.on_host = torch.empty(away.nbytes, dtype=torch.uint8, pin_memory=pinned)
                if away.stale:
                    away.on_host.copy_(_bytes(away.storage, self.device), non_blocking=True)
                    away.stale = False

        # The copies must have been read before the memory goes to others.
        if self._stream is not None:
            self._stream.synchronize()
        for away in leaving:
            away.storage.resize_(0)
        # torch would cache the freed memory, and engines have allocators of their own.
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    @torch.no_grad()
    def onload(self, parts: Sequence[str]) -> None:
        """Move parts to the device; parts that are on the device already stay."""
        coming: list[_Away] = []
        for part in parts:
            if part in self.away:
                coming += self._storages[part].values()
                self.away.remove(part)
        for away in coming:
            away.storage.resize_(away.nbytes)
        with self._copying():
            for away in coming:
                assert away.on_host is not None  # it has been away
                _bytes(away.storage, self.device).copy_(away.on_host, non_blocking=True)

        # Scratch is allocated again on the current stream.
        for part in parts:
            for dropped in self._dropped.pop(part, ()):
                dropped.storage.resize_(dropped.nbytes)
                _bytes(dropped.storage, self.device).zero_()

    def _drop(self, part: str) -> None:
        """Free the memory of a part's scratch."""
        if part in self._scratch:
            found = self._found(self._scratch[part](), {})
            self._dropped[part] = list(found.values())
            for dropped in self._dropped[part]:
                dropped.storage.resize_(0)

    def _collect(self, part: str) -> Iterable[_Away]:
        """Return the present storages of a part."""
        self._storages[part] = self._found(self._tensors[part](), self._storages[part])
        return self._storages[part].values()

    def _found(
        self, tensors: Iterable[torch.Tensor], before: Mapping[int, _Away]
    ) -> dict[int, _Away]:
        """Return the storages of tensors on the device; tensors may share one."""
        now: dict[int, _Away] = {}
        for tensor in tensors:
            # An empty shard has nothing to move, and a count of steps may live on the host.
            storage = tensor.untyped_storage()
            if tensor.device.type != self.device.type or not storage.nbytes():
                continue
            key = storage._cdata
            now[key] = before.get(key) or _Away(storage, storage.nbytes())
        return now

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy on a separate stream, after the work queued so far and before later work."""
        if self.device.type == "cpu":
            yield
            return
        module = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = module.Stream(self.device)
        self._stream.wait_stream(module.current_stream(self.device))
        with module.stream(self._stream):
            yield
        module.current_stream(self.device).wait_stream(self._stream)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return all bytes of a storage as a tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
