"""The files of a role's checkpoint: values in safetensors, and an index in JSON.

    rank-00000-0.safetensors      the parts that rank 0 wrote, by entry and position
    rank-00000-1.safetensors      more of them: a file holds about 1 GB
    index-00000-of-00002.json     what rank 0 wrote: version; entry -> shape, dtype, parts: where,
                                  which file, checksum; it is the last file that the rank writes
    rank-00001-0.safetensors      those of rank 1
    index-00001-of-00002.json

Nothing in them is code. The checksum of a part is XXH3 of its bytes, compared when they are read;
each index has one of its own (core/values/sealed.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import attrs
import torch

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.sealed import read_sealed
from hybridflow.core.values.weights import Box
from hybridflow.kit.checkpoint_writer import key

FORMAT = 2
"""Version of these files; others are refused."""


def index_file(rank: int, world: int) -> str:
    """Return the name of a rank's index."""
    return f"index-{rank:05d}-of-{world:05d}.json"


@attrs.frozen(eq=False)
class StatePart:
    """A part of one entry that this rank has."""

    entry: str
    shape: tuple[int, ...]
    """Shape of the whole entry."""
    box: Box
    values: torch.Tensor
    """The box's elements; loading writes into them."""


class StoredPart(TypedDict):
    """Where the index says a box of an entry is."""

    start: list[int]
    """First index along each dimension."""
    shape: list[int]
    file: str
    sum: str
    """XXH3 (64 bits) of the bytes, as 16 hexadecimal digits."""


class StoredEntry(TypedDict):
    """What the index says of an entry; its parts are disjoint and make the whole."""

    shape: list[int]
    dtype: str
    """Name in torch, such as "float32"."""
    parts: list[StoredPart]


def _check_index(index: Index, field: attrs.Attribute, entries: Any) -> None:
    """Raise a ValueError for what no index has: other types, or a file outside of the folder."""
    try:
        for entry in entries.values():
            good = isinstance(getattr(torch, entry["dtype"]), torch.dtype)
            numbers = [entry["shape"]]
            for part in entry["parts"]:
                numbers += [part["start"], part["shape"]]
                good &= Path(part["file"]).name == part["file"] and isinstance(part["sum"], str)
            good &= all(type(number) is int and number >= 0 for of in numbers for number in of)
            if not good or len({len(of) for of in numbers}) > 1:
                raise ValueError(entry)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("no entries of an index") from error


@attrs.frozen
class Index:
    """The contents of a role's checkpoint."""

    version: int = attrs.field(validator=attrs.validators.instance_of(int))
    """The version of the weights: the number of optimizer steps."""
    entries: Mapping[str, StoredEntry] = attrs.field(validator=_check_index)

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of a folder: that of each rank.

        Raises DamagedError, and CheckpointError where the files are of another format.
        """
        files = sorted(folder.glob("index-*-of-*.json"))
        if not files:
            raise DamagedError(f"{folder} has no index-*.json, by which a checkpoint is complete")
        world = int(files[0].stem.rpartition("-")[2])
        expected = [folder / index_file(rank, world) for rank in range(world)]
        if missing := [file.name for file in expected if file not in files]:
            raise DamagedError(f"{folder} has no {', '.join(missing[:3])}")

        versions = set()
        entries: dict[str, StoredEntry] = {}
        for file in expected:
            part = cls._read(file)
            versions.add(part.version)
            for name, entry in part.entries.items():
                known = entries.setdefault(name, {**entry, "parts": []})
                if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                    raise DamagedError(f"{file}: {name} has another shape or dtype than elsewhere")
                known["parts"] += entry["parts"]
        if len(versions) > 1 or len(files) > world:
            raise DamagedError(f"{folder} has the index files of several checkpoints")
        return cls(versions.pop(), entries)

    @classmethod
    def _read(cls, file: Path) -> Index:
        fields = read_sealed(file)
        number = fields.pop("format", None)
        if number != FORMAT:
            raise CheckpointError(f"{file} has format {number}, this reads {FORMAT}")
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise DamagedError(f"{file} is not an index of a checkpoint") from error

    def dtype(self, entry: str) -> torch.dtype:
        """Return the dtype in which an entry is stored."""
        dtype: torch.dtype = getattr(torch, self.entries[entry]["dtype"])
        return dtype

    def shape(self, entry: str) -> tuple[int, ...]:
        """Return the shape of an entry, whole."""
        return tuple(self.entries[entry]["shape"])


def checksum(values: torch.Tensor) -> str:
    """Return XXH3 of the bytes of a contiguous tensor on the host."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(values.reshape(-1).view(torch.uint8).numpy().data)


class PartReader:
    """Reads boxes from the files that an index names; a context manager, which closes them."""

    def __init__(self, folder: Path, index: Index):
        self._folder = folder
        self._index = index
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def fill(self, parts: Sequence[StatePart]) -> None:
        """Fill the parts, converted to their dtypes.

        Each stored part is read once, whole, as its checksum demands. Raises DamagedError where
        that differs, where a file cannot be read, and where an element is in none.
        """
        wanted: dict[str, list[StatePart]] = {}
        for part in parts:
            wanted.setdefault(part.entry, []).append(part)
        for entry, targets in wanted.items():
            missing = sum(target.box.numel for target in targets)
            for place in self._index.entries[entry]["parts"]:
                box = _box(place)
                common = [(target, target.box.intersect(box)) for target in targets]
                if not any(both for _, both in common):
                    continue
                values = self._read(entry, place)
                moved()
                for target, both in common:
                    if both is not None:
                        whole = target.values.detach().view(target.box.shape)
                        whole[both.within(target.box)].copy_(values[both.within(box)])
                        missing -= both.numel
            if missing:
                raise DamagedError(f"{missing} elements of {entry} are in no file")

    def _read(self, entry: str, place: StoredPart) -> torch.Tensor:
        """Return the values of a stored part. Raises DamagedError."""
        from safetensors import SafetensorError

        file = self._folder / place["file"]
        try:
            values: torch.Tensor = self._file(place["file"]).get_tensor(key(entry, place["start"]))
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{entry}: {file} cannot be read: {error}") from error
        same = tuple(values.shape) == tuple(place["shape"])
        if not same or values.dtype != self._index.dtype(entry) or checksum(values) != place["sum"]:
            raise DamagedError(f"{entry}: its values in {file} are not those that were written")
        return values

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            opened = safe_open(self._folder / name, framework="pt")
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]


def _box(place: StoredPart) -> Box:
    start = tuple(place["start"])
    return Box(start, tuple(map(operator.add, start, place["shape"])))
