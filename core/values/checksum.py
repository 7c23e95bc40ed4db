"""Checksums of weights, to compare the values of two processes.

A parameter's checksum is the sum of those of its boxes modulo 2**64, for any cut into boxes. A
rotating proof takes a 32nd of the rows each time, chosen by their index in the whole parameter:

    part 0            part 1                   part 31
    rows 0 to R/32    rows R/32 to 2 R/32 ...  the last R/32    together: every value once
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import TypeVar

import torch

from hybridflow.core.values.weights import Box

Key = TypeVar("Key", bound=Hashable)

PARTS = 32
"""Parts of a parameter, of which a rotating proof takes one."""
GRAIN = 1 << 17
"""The least elements of a part; a smaller parameter is a part by itself."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def part_of(name: str, shape: Sequence[int], part: int | None) -> Box | None:
    """Return the box of part number `part` of a parameter, or of all for None; None if empty.

    The number of the first part depends on the name, so that small parameters take turns.
    """
    number = 0 if part is None else (part + zlib.crc32(name.encode())) % PARTS
    if part is None or not shape:
        return None if number else Box.full(shape)

    # Rows of the longest dimension but the last are contiguous in memory.
    axis = max(range(max(len(shape) - 1, 1)), key=lambda dim: shape[dim])
    row = prod(shape) // max(shape[axis], 1)
    grain = max(GRAIN // max(row, 1), 1)
    grains = -(-shape[axis] // grain)
    start = grains * number // PARTS * grain
    stop = min(grains * (number + 1) // PARTS * grain, shape[axis])
    return Box.part(tuple(shape), axis, start, stop) if start < stop else None


@torch.no_grad()
def checksum(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the checksum of a box's values, an int64 scalar on their device.

    It is the sum of (bits of x) w_0(i_0) w_1(i_1) ... over the elements, where each w is an odd
    number mixed from an index in the complete parameter. Along the last dimension w is that of the
    8 bytes in which the element lies, times 2 to the power of its first bit in them, so that 8
    bytes are processed at once. One element that differs always changes the sum; two elements that
    are swapped do, except in one case of 10,000 with 16-bit values, since the last of four has 16
    bits of the sum.
    """
    if not values.dim():
        values = values.reshape(1)
        box = Box((0,), (1,))
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)

    # Eight bytes at a time, where the box begins and ends with them
    size = values.element_size()
    lanes = 8 // size
    start, stop = box.start[-1], box.stop[-1]
    if start % lanes == 0 and stop % lanes == 0:
        try:
            numbers = values.view(torch.int64)
        except RuntimeError:  # its strides do not fit
            numbers = values.clone(memory_format=torch.contiguous_format).view(torch.int64)
        weights = _odd(0, _table(stop), values.device)[start // lanes : stop // lanes]
    else:
        bits = values.contiguous().view(_INTEGERS[size])
        numbers = bits.to(torch.int64) & (2 ** (8 * size) - 1)
        weights = _of_elements(start, stop, lanes, values.device)

    # One dimension after the other, the last one first
    total = _dot(numbers, weights)
    for dim in range(1, values.dim()):
        start, stop = box.start[-1 - dim], box.stop[-1 - dim]
        total = _dot(total, _odd(dim, _table(stop), values.device)[start:stop])
    return total


def totals(sums: Iterable[tuple[Key, torch.Tensor]]) -> dict[Key, int]:
    """Add up the checksums of each key, modulo 2**64."""
    added: dict[Key, torch.Tensor] = {}
    for key, value in sums:
        added[key] = added[key] + value if key in added else value
    # One transfer from the device
    numbers = torch.stack(list(added.values())).tolist() if added else []
    return dict(zip(added, (number % 2**64 for number in numbers), strict=True))


def _dot(numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply and add along the last dimension, modulo 2**64."""
    # CUDA has no product of integer matrices.
    if numbers.device.type != "cpu":
        return (numbers * weights).sum(-1)
    return torch.matmul(numbers, weights)


def _table(stop: int) -> int:
    """Return a table's length for indexes below `stop`: few tables serve all parameters."""
    return 1 << max(stop - 1, 1).bit_length()


@cache
def _odd(dim: int, length: int, device: torch.device) -> torch.Tensor:
    """Return an odd number for each index of a dimension, which is counted from the last one."""
    mixed = (torch.arange(length) + (dim + 1) * 2**40) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return ((mixed ^ (mixed >> 29)) | 1).to(device)


@lru_cache(maxsize=1024)
def _of_elements(start: int, stop: int, lanes: int, device: torch.device) -> torch.Tensor:
    """Return the weights of single elements along the last dimension."""
    index = torch.arange(start, stop, device=device)
    shifts = index % lanes * (64 // lanes)
    return _odd(0, _table(stop), device)[index // lanes] << shifts
