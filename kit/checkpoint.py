"""Saves a training backend's state by boxes, so that other layouts and backends can read it.

torch.distributed.checkpoint writes the files. Entries are "model.NAME", "optimizer.exp_avg.NAME"
and "optimizer.exp_avg_sq.NAME", where NAME and shape are canonical (Hugging Face):

    rank 0   boxes of each entry \\                          / boxes of rank 0'
    rank 1   boxes of each entry  > files, by entry and box <  boxes of rank 1'
    rank 2   boxes of each entry /                          \\ ...
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.errors import CheckpointError
from hybridflow.core.values.weights import Box

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square, as entries name them."""
COUNTERS = "counters.json"
"""The file with the version of the weights."""


@attrs.frozen(eq=False)
class StatePart:
    """A part of one entry that this rank has."""

    entry: str
    shape: tuple[int, ...]
    """Shape of the whole entry."""
    box: Box
    values: torch.Tensor
    """The box's elements; loading writes into them."""


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


def save_state(parts: Iterable[StatePart], version: int, folder: Path, rank: int) -> None:
    """Write each element once, whoever holds copies, into an empty folder. A collective call."""
    import torch.distributed.checkpoint as dcp

    save_boxes, _ = _planners()
    dcp.save({}, checkpoint_id=folder, planner=save_boxes(list(parts)))

    # torch's checkpoint files hold tensors only.
    if rank == 0:
        (folder / COUNTERS).write_text(json.dumps({"version": version}))


def load_state(parts: Iterable[StatePart], folder: Path, role: str) -> int:
    """Fill the parts from files, and return the version of the weights. A collective call.

    Raises CheckpointError when an entry is missing, has another shape, or a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    # All problems of the files are raised as one of these, here or on another rank.
    unreadable = (
        OSError,
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        dcp.api.CheckpointException,
    )
    try:
        version = _version(folder)
        _, load_boxes = _planners()
        dcp.load({}, checkpoint_id=folder, planner=load_boxes(list(parts)))
    except unreadable as error:
        raise _unreadable(folder, role, error) from error
    return version


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
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        self._role = role
        try:
            self.version = _version(folder)
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # files of other programs may cause any error
            raise _unreadable(folder, role, error) from error
        self.entries = {
            entry: (tuple(data.size), data.properties.dtype)
            for entry, data in saved.items()
            if isinstance(data, TensorStorageMetadata)
        }

    def read(self, entry: str) -> torch.Tensor:
        """Return the whole values of an entry."""
        import torch.distributed.checkpoint as dcp

        shape, dtype = self.entries[entry]
        values = torch.empty(shape, dtype=dtype)
        _, load_boxes = _planners()
        part = StatePart(entry, shape, Box.full(shape), values)
        try:
            # torch warns that only one process loads, which is intended.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                dcp.load({}, checkpoint_id=self._folder, planner=load_boxes([part]), no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:
            raise _unreadable(self._folder, self._role, error) from error
        return values


def _version(folder: Path) -> int:
    return int(json.loads((folder / COUNTERS).read_text())["version"])


def _unreadable(folder: Path, role: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} of role {role!r} cannot be read: {_first_cause(error)}"
    )


def _planners() -> tuple[type, type]:
    """Return the (save, load) planners of torch's checkpoints for boxes.

    They are made here because importing torch's planners takes a second.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    # torch calls a box a chunk, and names it by its offset and its sizes.
    def chunk(box: Box) -> Any:
        return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))

    class Boxes:
        def __init__(self, parts: Sequence[StatePart]):
            super().__init__()
            # torch asks for values by entry and offset.
            self.parts = {}
            for part in parts:
                if part.box.numel:
                    self.parts[part.entry, torch.Size(part.box.start)] = part

        def _values(self, index: Any) -> torch.Tensor:
            part = self.parts[index.fqn, torch.Size(index.offset)]
            return part.values.detach().view(part.box.shape)

    class SaveBoxes(Boxes, DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            # One item per box; torch leaves out those that another rank writes too.
            items = []
            for (entry, offset), part in self.parts.items():
                properties = TensorProperties.create_from_tensor(part.values)
                data = TensorWriteData(chunk(part.box), properties, torch.Size(part.shape))
                place = MetadataIndex(entry, offset)
                items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items, planner_data={})
            return self.plan

        def lookup_object(self, index: Any) -> torch.Tensor:
            return self._values(index)

    class LoadBoxes(Boxes, DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            items = []
            for (entry, _), part in self.parts.items():
                saved = None
                if self.metadata is not None:
                    saved = self.metadata.state_dict_metadata.get(entry)
                if not isinstance(saved, TensorStorageMetadata):
                    raise ValueError(f"it has no {entry}")
                if tuple(saved.size) != part.shape:
                    raise ValueError(
                        f"{entry} has shape {tuple(saved.size)} there, {part.shape} here"
                    )

                # torch finds the saved boxes that overlap this one, however they were cut.
                items += create_read_items_for_chunk_list(entry, saved, [chunk(part.box)])
            return LoadPlan(items)

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return self._values(index)

    return SaveBoxes, LoadBoxes


def _first_cause(error: BaseException) -> str:
    """Return the first line of what one rank raised.

    torch's checkpoint errors hold those of all ranks, with tracebacks.
    """
    # An error of this rank alone has no `failures`.
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
