"""A training backend's state in files, by boxes: what one layout or backend wrote, another reads.

torch.distributed.checkpoint has the files; entries are "model.NAME", "optimizer.exp_avg.NAME" and
"optimizer.exp_avg_sq.NAME", NAME and shape being canonical (Hugging Face).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.errors import CheckpointError
from hybridflow.core.values.weights import Box

MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = "counters.json"


@attrs.frozen(eq=False)
class StatePart:
    """What this rank has of one entry. `values` has the box's elements and is written into when loading."""

    entry: str
    shape: tuple[int, ...]
    """Of the whole entry."""
    box: Box
    values: torch.Tensor


def flat_parts(
    pieces: Iterable[tuple[str, tuple[int, ...], Box, int]], start: int, stop: int
) -> Iterator[tuple[str, tuple[int, ...], Box, int]]:
    """(name, shape, box, offset) for the elements start..stop of a flat storage.

    `pieces`: (name, shape, box, place) of the storage's contents; place is where the box's elements, in row-major
    order, begin in it. offset: where those of the given box begin, counted from `start`. How optimizers that cut
    flat buffers (ZeRO, Megatron's distributed optimizer) say which boxes they hold.
    """
    for name, shape, box, place in pieces:
        first, last = max(start, place), min(stop, place + box.numel)
        at = first - start
        for part in box.flat_range(first - place, last - place):
            yield name, shape, part, at
            at += part.numel


def save_state(parts: Iterable[StatePart], version: int, folder: Path, rank: int) -> None:
    """Each element once, whoever holds copies. A collective call; `folder` is there and empty."""
    import torch.distributed.checkpoint as dcp

    dcp.save({}, checkpoint_id=folder, planner=_planners()[0](list(parts)))
    if rank == 0:
        (folder / COUNTERS).write_text(json.dumps({"version": version}))


def load_state(parts: Iterable[StatePart], folder: Path, role: str) -> int:
    """Fill the parts; the version. A collective call.

    Raises CheckpointError when an entry is missing, has another shape, or a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    try:
        version = int(json.loads((folder / COUNTERS).read_text())["version"])
        dcp.load({}, checkpoint_id=folder, planner=_planners()[1](list(parts)))
    except (
        OSError,
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        dcp.api.CheckpointException,
    ) as error:
        raise CheckpointError(
            f"the checkpoint {folder} of role {role!r} cannot be read: {_first_cause(error)}"
        ) from error
    return version


def _planners() -> tuple[type, type]:
    """The planners of torch's checkpoints for boxes; importing it takes a second."""
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

    def chunk(box: Box) -> Any:
        return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))

    class Boxes:
        def __init__(self, parts: Sequence[StatePart]):
            super().__init__()
            self.parts = {(p.entry, torch.Size(p.box.start)): p for p in parts if p.box.numel}

        def _values(self, index: Any) -> torch.Tensor:
            part = self.parts[index.fqn, torch.Size(index.offset)]
            return part.values.detach().view(part.box.shape)

    class SaveBoxes(Boxes, DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            items = []
            for (entry, offset), part in self.parts.items():
                properties = TensorProperties.create_from_tensor(part.values)
                data = TensorWriteData(chunk(part.box), properties, torch.Size(part.shape))
                items.append(
                    WriteItem(MetadataIndex(entry, offset), WriteItemType.SHARD, tensor_data=data)
                )
            self.plan = SavePlan(items, planner_data={})
            return self.plan

        def lookup_object(self, index: Any) -> torch.Tensor:
            return self._values(index)

    class LoadBoxes(Boxes, DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            items = []
            for (entry, _), part in self.parts.items():
                saved = (
                    self.metadata.state_dict_metadata.get(entry)
                    if self.metadata is not None
                    else None
                )
                if not isinstance(saved, TensorStorageMetadata):
                    raise ValueError(f"it has no {entry}")
                if tuple(saved.size) != part.shape:
                    raise ValueError(
                        f"{entry} has shape {tuple(saved.size)} there, {part.shape} here"
                    )
                items += create_read_items_for_chunk_list(entry, saved, [chunk(part.box)])
            return LoadPlan(items)

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return self._values(index)

    return SaveBoxes, LoadBoxes


def _first_cause(error: BaseException) -> str:
    """torch's checkpoint errors hold those of the ranks, with tracebacks; the first one says why."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
