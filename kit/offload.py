"""Moves a model's parts between its device and the host's memory, in place.

A tensor keeps its identity: its storage gives its memory back while it is away, so parameters,
shards and optimizers that refer to it notice nothing.

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
    """A storage of the device that may be away, and its copy on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    on_host: torch.Tensor | None = None
    """uint8 [nbytes]; None before the first time away."""
    stale: bool = True
    """Whether the values on the device have changed since the copy was made."""


class Residence:
    """Where the parts of one model are: on its device, or on the host.

    A part is a set of tensors, which may grow (an optimizer's state is made by its first step).
    Copies on the host are kept, so a part that has not changed is not copied out a second time.
    """

    def __init__(
        self,
        device: torch.device,
        parts: Mapping[str, Callable[[], Iterable[torch.Tensor]]],
        scratch: Mapping[str, Callable[[], Iterable[torch.Tensor]]] | None = None,
    ):
        """Take the parts: name -> a function that yields the part's tensors on `device`.

        scratch: name of a part -> a function that yields tensors that are needed only beside it,
        and whose values are not (gradient buffers between updates). They leave without a copy,
        and come back as zeros.
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
        """Say that values on the device have changed: of these parts, or of all."""
        for part in parts or self._storages:
            for away in self._storages[part].values():
                away.stale = True

    @torch.no_grad()
    def offload(self, parts: Sequence[str]) -> None:
        """Move parts to the host; those that are there stay."""
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
        # torch would keep what is free for itself, and engines have allocators of their own.
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    @torch.no_grad()
    def onload(self, parts: Sequence[str]) -> None:
        """Move parts to the device; those that are there stay."""
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

        # What was dropped comes back on the stream in use.
        for part in parts:
            for dropped in self._dropped.pop(part, ()):
                dropped.storage.resize_(dropped.nbytes)
                _bytes(dropped.storage, self.device).zero_()

    def _drop(self, part: str) -> None:
        """Give back the memory of a part's scratch."""
        if part in self._scratch:
            found = self._found(self._scratch[part](), {})
            self._dropped[part] = list(found.values())
            for dropped in self._dropped[part]:
                dropped.storage.resize_(0)

    def _collect(self, part: str) -> Iterable[_Away]:
        """Return the storages of a part as they are now."""
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
        """Copy on a stream of its own, between what was queued before and what comes after."""
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
