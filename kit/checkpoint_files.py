"""The files of a role's checkpoint: values in safetensors, and an index in JSON.

    index.json                  version; entry -> shape, dtype, parts: where, which file, checksum
    rank-00000-0.safetensors    the parts that rank 0 wrote, by entry and position
    rank-00000-1.safetensors    more of them: a file holds about FILE_BYTES
    rank-00001-0.safetensors    those of rank 1

Nothing in them is code. The checksum of a part is XXH3 of its bytes, compared when they are read;
the index has one of its own (core/values/sealed.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import attrs
import torch

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.sealed import read_sealed, write_sealed
from hybridflow.core.values.weights import Box
from hybridflow.kit.tensor_files import write_tensors

INDEX = "index.json"
FORMAT = 1
"""Version of these files; others are refused."""
FILE_BYTES = 10**9
"""The most bytes of a file, unless a single part has more: a rank has them on the host at once."""


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

    def write(self, folder: Path) -> None:
        """Write the index, which completes the folder."""
        write_sealed(folder / INDEX, {"format": FORMAT, **attrs.asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of a folder.

        Raises DamagedError, and CheckpointError where the files are of another format.
        """
        fields = read_sealed(folder / INDEX)
        number = fields.pop("format", None)
        if number != FORMAT:
            raise CheckpointError(f"{folder / INDEX} has format {number}, this reads {FORMAT}")
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise DamagedError(f"{folder / INDEX} is not an index of a checkpoint") from error

    def dtype(self, entry: str) -> torch.dtype:
        """Return the dtype in which an entry is stored."""
        dtype: torch.dtype = getattr(torch, self.entries[entry]["dtype"])
        return dtype

    def shape(self, entry: str) -> tuple[int, ...]:
        """Return the shape of an entry, whole."""
        return tuple(self.entries[entry]["shape"])


def write_parts(
    parts: Iterable[StatePart], folder: Path, rank: int
) -> Iterator[tuple[str, StoredPart]]:
    """Write a rank's parts into files of its own, and yield what the index says of each.

    The values of one file at a time are on the host; checksums are taken while it is written.
    """
    for number, group in enumerate(_by_file(parts)):
        file = f"rank-{rank:05d}-{number}.safetensors"
        values = [part.values.detach().view(part.box.shape).cpu().contiguous() for part in group]
        keys = [_key(part.entry, part.box.start) for part in group]
        # Both let other threads run.
        with ThreadPoolExecutor(1) as beside:
            sums = beside.map(checksum, values)
            write_tensors(dict(zip(keys, values, strict=True)), folder / file)
        moved()
        for part, digest in zip(group, sums, strict=True):
            start, shape = list(part.box.start), list(part.box.shape)
            yield part.entry, StoredPart(start=start, shape=shape, file=file, sum=digest)


def _by_file(parts: Iterable[StatePart]) -> Iterator[list[StatePart]]:
    """Yield the parts of one file after the other."""
    group: list[StatePart] = []
    nbytes = 0
    for part in parts:
        if group and nbytes + part.values.nbytes > FILE_BYTES:
            yield group
            group = []
            nbytes = 0
        group.append(part)
        nbytes += part.values.nbytes
    if group:
        yield group


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
            values: torch.Tensor = self._file(place["file"]).get_tensor(_key(entry, place["start"]))
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


def _key(entry: str, start: Sequence[int]) -> str:
    """Return the name of a part in its file, such as "model.lm_head.weight@0,0"."""
    return f"{entry}@{','.join(map(str, start))}"
