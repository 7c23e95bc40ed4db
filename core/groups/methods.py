"""The registered methods of a worker class, and how a group calls each of them."""

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
    """How a worker's method is called from the controller (see `register`)."""

    name: str
    protocol: TransferProtocol
    returns_batch: bool
    """Whether the method is annotated `-> Batch`: a call returns a promised Batch, no Future."""
    same_rows: bool
    """Whether the result has the rows of the first batch among the arguments."""
    reads: Sequence[str] | Callable[..., Sequence[str] | None] | None
    """The columns that the method reads, or a function of its arguments that names them."""
    writes: Sequence[str] | Callable[..., Sequence[str]] | None
    """The columns of the result where they are known before the call, or a function of its
    arguments that names them."""
    early: bool = False
    """Whether the call need not wait for the turn of its step, in any pool."""
    late: bool = False
    """Whether the call is held even where it need not wait for the turn."""

    def columns(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[str] | None:
        """Return the columns to send, or None for all."""
        return self.reads(*args, **kwargs) if callable(self.reads) else self.reads

    def promised(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, ...] | None:
        """Return the columns of the result, or None where they are not known before the call."""
        names = self.writes(*args, **kwargs) if callable(self.writes) else self.writes
        return None if names is None else tuple(names)


def methods_of(worker: type[Worker]) -> dict[str, Method]:
    """Return the registered methods of a worker class, by name.

    Raises PluginError for an unknown protocol.
    """
    return {method.name: method for method in _methods(worker)}


def _methods(worker: type[Worker]) -> Iterator[Method]:
    for name, function in inspect.getmembers(worker, inspect.isfunction):
        marked = getattr(function, "_registered", None)
        if marked is None:
            continue

        try:
            returns = typing.get_type_hints(function).get("return")
        except Exception:  # annotations that only a type checker sees
            returns = function.__annotations__.get("return")
        is_batch = returns is Batch or returns == "Batch"

        # `register` left these, and names the protocol where it is a plugin.
        protocol, *how = marked
        same_rows, reads, writes, early, late = how
        yield Method(name, find_protocol(protocol), is_batch, same_rows, reads, writes, early, late)
