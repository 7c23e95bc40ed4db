"""The registered methods of a worker class: how a group calls each of them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from hybridflow.core.contracts.protocol import TransferProtocol
from hybridflow.core.contracts.worker import Worker
from hybridflow.core.plugins.resolve import find_protocol
from hybridflow.core.values.batch import Batch


@attrs.frozen
class Method:
    """How a worker's method is called from the controller."""

    name: str
    protocol: TransferProtocol
    returns_batch: bool
    same_rows: bool
    reads: tuple[str, ...] | Callable[..., Sequence[str] | None] | None
    writes: tuple[str, ...] | None

    def columns(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[str] | None:
        """The columns to send, or None for all."""
        return self.reads(*args, **kwargs) if callable(self.reads) else self.reads


def methods_of(worker: type[Worker]) -> dict[str, Method]:
    """The registered methods of a worker class, by name."""
    return {m.name: m for m in _methods(worker)}


def _methods(worker: type[Worker]) -> Iterator[Method]:
    for name, function in inspect.getmembers(worker, inspect.isfunction):
        marked = getattr(function, "_registered", None)
        if marked is None:
            continue
        try:
            returns = typing.get_type_hints(function).get("return")
        except Exception:  # annotations that only a type checker sees
            returns = function.__annotations__.get("return")
        protocol, same_rows, reads, writes = marked
        is_batch = returns is Batch or returns == "Batch"
        yield Method(name, find_protocol(protocol), is_batch, same_rows, reads, writes)
