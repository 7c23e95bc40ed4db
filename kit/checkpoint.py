"""Saves a training backend's state by boxes, so that other layouts and backends can read it.

Entries are "model.NAME", "optimizer.exp_avg.NAME" and "optimizer.exp_avg_sq.NAME", where NAME and
shape are canonical (Hugging Face):

    rank 0   boxes of each entry \\                          / boxes of rank 0'
    rank 1   boxes of each entry  > files, by entry and box <  boxes of rank 1'
    rank 2   boxes of each entry /                          \\ ...

kit/checkpoint_files.py has the files; kit/checkpoint_writer.py writes them, beside the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.values.weights import Box
from hybridflow.kit.checkpoint_files import Index, PartReader, StatePart
from hybridflow.kit.checkpoint_saving import Writing, rank_writer

__all__ = ["MOMENTS", "SavedState", "StatePart", "flat_parts", "load_state", "save_state"]

T = TypeVar("T")

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square, as entries name them."""


def flat_parts(
    pieces: Iterable[tuple[str, tuple[int, ...], Box, int]], start: int, stop: int
) -> Iterator[tuple[str, tuple[int, ...], Box, int]]:
    """Yield (name, shape, box, offset) for the elements start..stop of a flat storage.

    Backends whose optimizers cut flat buffers (ZeRO, Megatron's distributed optimizer) find by this
    which boxes they hold.

    pieces: (name, shape, box, position) of each tensor in the storage; the box's elements begin at
        `position` in it, in row-major order.
    offset: the position of the yielded box's first element, counted from `start`.
    """
    for name, shape, box, place in pieces:
        # The part of the piece that lies between start and stop, if any does.
        first = max(start, place)
        last = min(stop, place + box.numel)
        offset = first - start
        for part in box.flat_range(first - place, last - place):
            yield name, shape, part, offset
            offset += part.numel


# --- of all ranks ---


def save_state(parts: Iterable[StatePart], version: int, folder: Path, rank: int) -> Writing:
    """Have each element written once, whoever holds copies, into an empty folder.

    A collective call. It returns what waits for the end of that, when the parts have been copied,
    and may change. Raises CheckpointError where the boxes of all ranks are not the whole of an
    entry.
    """
    held = {_place(part): part for part in parts if part.box.numel}
    every = _gathered(list(held))
    writers = _writers(every)
    _check_complete(writers)
    mine = [held[place] for place, writer in writers.items() if writer == rank]
    return rank_writer().write(mine, folder, rank, len(every), version)


def load_state(parts: Iterable[StatePart], folder: Path, role: str, complete: bool = True) -> int:
    """Fill the parts from files, and return the version of the weights. A collective call.

    complete: whether the ranks together should want every entry of the files.

    Raises DamagedError where files are not as they were written, and CheckpointError where the
    model has another shape or other entries than they.
    """
    wanted = [part for part in parts if part.box.numel]

    def load() -> tuple[int, set[str]]:
        index = Index.read(folder)
        _check_entries(wanted, index)
        with PartReader(folder, index) as reader:
            reader.fill(wanted)
        return index.version, index.entries.keys() - {part.entry for part in wanted}

    try:
        every = _all_or_none(load)
        version, _ = every[0]
        unknown = set.intersection(*(others for _, others in every))
        if complete and unknown:
            raise CheckpointError(
                f"it has {_listed(sorted(unknown))}, which the model here has not"
            )
    except CheckpointError as error:
        raise _of_role(folder, role, error) from error
    return version


class _Place(NamedTuple):
    """A box of an entry, which several ranks may hold."""

    entry: str
    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...]
    box_shape: tuple[int, ...]


def _place(part: StatePart) -> _Place:
    dtype = str(part.values.dtype).removeprefix("torch.")
    return _Place(part.entry, tuple(part.shape), dtype, part.box.start, part.box.shape)


def _writers(held: Sequence[Sequence[_Place]]) -> dict[_Place, int]:
    """Return the rank that writes each box: of those that hold it, the one with least to write.

    held: the boxes of each rank.
    """
    holders: dict[_Place, list[int]] = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)

    load = [0] * len(held)
    writers = {}
    for place, ranks in holders.items():
        writers[place] = min(ranks, key=lambda rank: load[rank])
        load[writers[place]] += prod(place.box_shape)
    return writers


def _check_complete(places: Iterable[_Place]) -> None:
    """Raise CheckpointError where boxes do not make whole entries."""
    elements: dict[tuple, int] = {}
    for place in places:
        entry = (place.entry, place.shape)
        elements[entry] = elements.get(entry, 0) + prod(place.box_shape)
    for (name, shape), found in elements.items():
        if found != prod(shape):
            raise CheckpointError(
                f"{name} of shape {shape} has {prod(shape)} elements, and the boxes of all ranks "
                f"have {found}: the backend's boxes overlap in part, leave some out, or differ in "
                "shape or dtype"
            )


def _check_entries(parts: Iterable[StatePart], index: Index) -> None:
    """Raise CheckpointError for a part whose entry the index has not, or in another shape."""
    missing = list(dict.fromkeys(part.entry for part in parts if part.entry not in index.entries))
    if missing:
        raise CheckpointError(f"it has no {_listed(missing)}")
    for part in parts:
        if index.shape(part.entry) != tuple(part.shape):
            raise CheckpointError(
                f"{part.entry} has shape {index.shape(part.entry)} there, {tuple(part.shape)} here"
            )


def _all_or_none(act: Callable[[], T]) -> list[T]:
    """Call `act` on every rank and return the results of all; where one fails, raise on every rank.

    The error is a DamagedError where a rank raised one, else a CheckpointError.
    """
    result: Any = None
    failure: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        result = act()
    except CheckpointError as error:
        cause = error
        failure = (isinstance(error, DamagedError), str(error))
    except Exception as error:
        cause = error
        failure = (False, f"{type(error).__name__}: {error}")

    every = _gathered((result, failure))
    failures = [failure for _, failure in every if failure is not None]
    if failures:
        damaged, text = max(failures, key=lambda failure: failure[0])
        raise (DamagedError if damaged else CheckpointError)(text) from cause
    return [result for result, _ in every]


def _gathered(own: T) -> list[T]:
    """Return the objects of all ranks, in their order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


# --- of one process ---


class SavedState:
    """The files of `save_state`, read by one process without a process group.

    Raises CheckpointError for files that cannot be read.
    """

    version: int
    """The version of the weights."""
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Entry -> shape and dtype of the whole."""

    def __init__(self, folder: Path, role: str):
        """Read the list of entries; `role` is for messages."""
        self._folder = folder
        self._role = role
        try:
            self._index = Index.read(folder)
        except CheckpointError as error:
            raise _of_role(folder, role, error) from error
        self.version = self._index.version
        self.entries = {
            entry: (self._index.shape(entry), self._index.dtype(entry))
            for entry in self._index.entries
        }

    def read(self, entry: str) -> torch.Tensor:
        """Return the whole values of an entry."""
        shape, dtype = self.entries[entry]
        values = torch.empty(shape, dtype=dtype)
        try:
            with PartReader(self._folder, self._index) as reader:
                reader.fill([StatePart(entry, shape, Box.full(shape), values)])
        except CheckpointError as error:
            raise _of_role(self._folder, self._role, error) from error
        return values


def _of_role(folder: Path, role: str, error: CheckpointError) -> CheckpointError:
    """Return the same error with the folder and the role."""
    return type(error)(f"the checkpoint {folder} of role {role!r} cannot be read: {error}")


def _listed(names: Sequence[str], most: int = 3) -> str:
    """Return names for a message, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
